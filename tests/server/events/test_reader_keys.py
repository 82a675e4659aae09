"""Readers with keys (CURVE), made with libzmq: who may connect, and what each gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.server_process import ServerProcess
from harness.zmtp_peer import GREETING, RawPeer, ready

from kvtier.client import Client
from kvtier.server.auth.credential_files import FileError
from kvtier.server.config.events import EventConfig
from kvtier.server.events.reader_keys import MAX_TENANTS, ReaderKeyFile
from kvtier.server.events.reader_process import ReaderProcess
from kvtier.server.events.reader_sockets import PublisherError

PART = 4096


def pair() -> tuple[str, str]:
    """A public and a secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


SERVER, ALL, ACME, ZETA, STRANGER = (pair() for _ in range(5))


def write_keys(path: Path, *readers: tuple[str, str], secret: str = SERVER[1]) -> None:
    tables = (f'[[readers]]\nname = "{number}"\nkey = "{key}"\ntenant = "{tenant}"\n'
              for number, (key, tenant) in enumerate(readers))  # fmt: skip
    beside = path.with_suffix(".new")
    beside.touch(0o600)
    beside.write_text(f'secret = "{secret}"\n' + "".join(tables))
    beside.replace(path)


class Site:
    def __init__(self, server: ServerProcess, keys: Path, publish: int, replay: int) -> None:
        self.server, self.keys = server, keys
        self.publish, self.replay = f"127.0.0.1:{publish}", f"127.0.0.1:{replay}"


@contextlib.contextmanager
def serving(directory: Path, *readers: tuple[str, str]) -> Iterator[Site]:
    keys = directory / "readers.toml"
    write_keys(keys, *readers)
    with ReservedPort() as publish, ReservedPort() as replay:
        config = (
            f'[events]\npublish = "tcp://127.0.0.1:{publish.number}"\nreplay = "tcp://127.0.0.1:{replay.number}"\n'
            f'keys = "{keys}"\n'
        )
        with ServerProcess(directory, config=config).start() as server:
            yield Site(server, keys, publish.number, replay.number)


@contextlib.contextmanager
def connected(address: str, kind: int, keys: tuple[str, str], server: str = SERVER[0]) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVTIMEO, 60_000)
        sock.curve_publickey, sock.curve_secretkey = (each.encode() for each in keys)
        sock.curve_serverkey = server.encode()
        if kind == zmq.SUB:
            sock.subscribe(b"")
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        sock.connect(f"tcp://{address}")
        assert monitor.poll(60_000)
        number = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        sock.disable_monitor()
        monitor.close()
        yield sock if number == zmq.EVENT_HANDSHAKE_SUCCEEDED else None


def replayed(sock: Any) -> list[tuple[bytes, int]]:
    """Topic and sequence of all messages."""
    sock.send_multipart([b"", bytes(8)])
    found = []
    while (message := sock.recv_multipart())[2] != b"\xff" * 8:
        found.append((message[1], int.from_bytes(message[2], "big")))
    return found


def test_a_reader_gets_the_events_of_its_tenant(tmp_path: Path) -> None:
    """Numbered without gaps, also in the replay. A reader of all tenants gets everything."""
    with serving(tmp_path, (ALL[0], "*"), (ACME[0], "acme"), (ZETA[0], "zeta")) as site:
        with (
            connected(site.publish, zmq.SUB, ACME) as acme,
            connected(site.publish, zmq.SUB, ZETA) as zeta,
            Client(site.server.endpoint, namespace=namespace_of(PART, tenant="zeta")) as of_zeta,
            Client(site.server.endpoint, namespace=namespace_of(PART, tenant="acme")) as of_acme,
        ):
            for number in range(5):
                of_zeta.store([key_of(number)], [payload(key_of(number), PART)])
                zeta_message = zeta.recv_multipart()
                assert zeta_message[0] == b"kvtier@zeta"
                of_acme.store([key_of(number)], [payload(key_of(number), PART)])
                message = acme.recv_multipart()
                assert message[0] == b"kvtier@acme"
                if not number:
                    first = int.from_bytes(message[1], "big")
            assert first == 0
        with connected(site.replay, zmq.DEALER, ACME) as acme, connected(site.replay, zmq.DEALER, ALL) as everyone:
            found = replayed(acme)
            assert {topic for topic, _ in found} == {b"kvtier@acme"}
            assert [number for _, number in found] == list(range(len(found)))
            assert {topic for topic, _ in replayed(everyone)} == {b"kvtier@acme", b"kvtier@zeta"}


def test_peers_without_a_known_key(tmp_path: Path) -> None:
    """They get no message: without CURVE, with an unknown key, with a wrong key of the server."""
    with serving(tmp_path, (ACME[0], "acme")) as site:
        for address, kind in ((site.publish, zmq.SUB), (site.replay, zmq.DEALER)):
            with connected(address, kind, STRANGER) as refused:
                assert refused is None
            with connected(address, kind, ACME, server=STRANGER[0]) as refused:
                assert refused is None
            peer = RawPeer(address)
            peer.socket.sendall(GREETING + ready(b"SUB"))
            wait_until(peer.has_been_closed)
            peer.close()
            with connected(address, kind, ACME) as admitted:
                assert admitted is not None


def test_a_key_that_is_removed(tmp_path: Path) -> None:
    """Its connection is closed without a restart of the server, and a new key is admitted."""
    with serving(tmp_path, (ACME[0], "acme")) as site:
        with connected(site.replay, zmq.DEALER, ACME) as acme:
            assert replayed(acme) == []
            # libzmq frees the address of the first monitor later, on another thread.
            monitor = acme.get_monitor_socket(zmq.EVENT_DISCONNECTED, "inproc://removed")
            write_keys(site.keys, (ZETA[0], "zeta"))
            assert monitor.poll(60_000)
            acme.disable_monitor()
            monitor.close()

        def is_admitted() -> bool:
            with connected(site.replay, zmq.DEALER, ZETA) as zeta:
                return zeta is not None

        wait_until(is_admitted)


def test_two_readers_with_keys_of_one_tenant_share_messages(tmp_path: Path) -> None:
    """A message of a kind that needs the long form of a frame is decrypted, too."""
    with (
        serving(tmp_path, (ACME[0], "acme"), (ZETA[0], "acme")) as site,
        connected(site.publish, zmq.SUB, ACME) as one,
        connected(site.publish, zmq.SUB, ZETA) as other,
        Client(site.server.endpoint, namespace=namespace_of(PART, tenant="acme")) as client,
    ):
        keys = [key_of(number) for number in range(50)]
        client.store(keys, [payload(key, PART) for key in keys])
        while len((message := one.recv_multipart())[2]) < 300:
            assert other.recv_multipart() == message
        assert other.recv_multipart() == message


def _mode(path: Path) -> None:
    write_keys(path)
    path.chmod(0o604)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (Path.mkdir, "cannot be read"),
        (_mode, "chmod 0600"),
        (lambda path: write_keys(path, secret=STRANGER[1][1:]), "secret: must be 40 characters of Z85"),
        (lambda path: write_keys(path, secret=40 * "#"), "secret: must be 40 characters of Z85"),
        (lambda path: write_keys(path, ("~" * 40, "acme")), "readers, '0': key: must be 40"),
        (lambda path: write_keys(path, (ACME[0], "a"), (ACME[0], "b")), "another reader has this key"),
        (lambda path: write_keys(path, *((pair()[0], f"{n}") for n in range(MAX_TENANTS + 1))), "more than 64 tenants"),
        (lambda path: path.write_text("secret = 3\n") and path.chmod(0o600), "secret"),
        (lambda path: path.write_text("[") and path.chmod(0o600), "is not TOML"),
    ],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, write: Callable[[Path], object], problem: str) -> None:
    """The message is for the operator, and contains no key."""
    path = tmp_path / "keys.toml"
    write(path)
    with pytest.raises(FileError, match=problem) as error:
        ReaderKeyFile(path)
    assert SERVER[1] not in f"{error.value}"


@pytest.mark.parametrize("attack", ["mode", "directory"])
def test_a_planted_key_file_is_never_used(tmp_path: Path, attack: str) -> None:
    """Neither at the start nor later. When only its owner can change it again, the file is read."""
    path = tmp_path / "inner" / "keys.toml"
    path.parent.mkdir(mode=0o755)
    write_keys(path, (ACME[0], "acme"))
    before = ReaderKeyFile(path)
    known = before.readers()
    write_keys(path, (STRANGER[0], "*"))
    object_at_fault, mode, sound = (path, 0o620, 0o600) if attack == "mode" else (path.parent, 0o777, 0o755)
    object_at_fault.chmod(mode)
    with pytest.raises(FileError, match="chmod"):
        ReaderKeyFile(path)
    assert before.readers() == known
    object_at_fault.chmod(sound)
    assert before.readers() != known


async def test_the_ipc_socket_is_the_owners(tmp_path: Path) -> None:
    """It has mode 0600 in a directory of mode 0700, and a second server cannot take it."""
    path = tmp_path / "new" / "pub"
    config = EventConfig(publish=f"ipc://{path}")
    process = ReaderProcess(config)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(PublisherError, match="in use"):
        ReaderProcess(config)
    process.close()
    assert not path.exists()
