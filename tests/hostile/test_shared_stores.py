"""A store that several servers share, and that lies about the blocks of one namespace.

The store is honest about the blocks of the victim. While an attacker's engine asks for the other
ones, the server must load the victim's blocks, stay alive, and keep its memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from contracts.tier import DONE, full
from harness.hostile_stores import HostileRedis, HostileS3, S3Handler, running
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client
from kvtier.tiers.remote import value_codec
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.pack_format import PackName, encode_index, folder_of
from kvtier.tiers.remote.s3 import S3Tier
from kvtier.tiers.remote.valkey import ValkeyTier
from kvtier.tiers.secondary_tier import NamespaceId, SecondaryTier

PART = 64 << 10
VICTIM, ATTACKER = (namespace_of(PART, model=model) for model in ("victim", "attacker"))
BAD_KEYS = [key_of(number, salt="bad") for number in range(4)]
GROWTH_BYTES = 192 * MIB
"""Allowed growth of the server's memory, with the buffers of its threads."""
PATIENT = RemoteLimits(deadline_seconds=20.0)


@dataclass
class Site:
    """A server with a shared tier, and a writer at the same store."""

    server: ServerProcess
    writer: SecondaryTier
    names: Callable[[], Iterable[str]]
    """Returns the names of all values or packs in the store."""
    ids: list[NamespaceId] = field(default_factory=list)
    """Ids of the victim's and the attacker's namespace."""
    own_bytes: int = 0

    def learn_ids(self) -> None:
        for number, namespace in enumerate((VICTIM, ATTACKER)):
            known = set(self.names())
            with Client(self.server.endpoint, namespace=namespace) as client:
                client.store([key_of(number)], [payload(key_of(number), PART)])
                wait_until(lambda known=known: set(self.names()) - known, 60)  # type: ignore[misc]
            [name] = set(self.names()) - known
            tenant, rest = name.split("/")[2:4]
            self.ids.append(NamespaceId(bytes.fromhex(tenant + rest)))
        self.own_bytes = self.server.own_bytes()

    def write(self, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
        """Stores blocks as another server would."""
        blocks = [full(key, [bytes(payload(key, PART))], namespace) for key in keys]
        assert self.writer.store(blocks) == [DONE] * len(keys)

    def check_victim(self, salt: str) -> None:
        """Stores new blocks of the victim, which the server must find and load."""
        keys = [key_of(number, salt=salt) for number in range(4)]
        self.write(self.ids[0], keys)
        with Client(self.server.endpoint, namespace=VICTIM) as client:

            def is_served() -> bool:
                buffers = [bytearray(PART) for _ in keys]
                return client.load(keys, buffers, wait=5.0) == len(keys)

            wait_until(is_served, 60)
            assert_serves(client, keys)
        assert self.server.alive
        assert self.server.own_bytes() < self.own_bytes + GROWTH_BYTES

    def attack(self, salt: str, *, during: bool) -> None:
        """Loads the attacker's blocks repeatedly; checks the victim meanwhile or afterwards."""
        ended, rounds = threading.Event(), 0

        def run() -> None:
            nonlocal rounds
            with Client(self.server.endpoint, namespace=ATTACKER) as client:
                while not ended.is_set():
                    keys = [*BAD_KEYS, key_of(rounds, salt=salt)]
                    client.load(keys, [bytearray(PART) for _ in keys], wait=0.3)
                    rounds += 1

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_until(lambda: rounds >= 3 or not thread.is_alive(), 60)
            assert thread.is_alive(), "the attacker's client failed"
            if during:
                self.check_victim(salt)
        finally:
            ended.set()
            thread.join()
        if not during:
            self.check_victim(salt)


def start(directory: Path, tier: str) -> ServerProcess:
    return ServerProcess(
        directory, region=32 * MIB, lmdb=4 * MIB, config=f'[[tiers]]\nname = "shared"\n{tier}\n'
    ).start()


@pytest.fixture(scope="module")
def redis() -> Iterator[HostileRedis]:
    server = HostileRedis()
    with running(server):
        yield server


@pytest.fixture(scope="module")
def valkey_site(redis: HostileRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("v")
    writer = ValkeyTier("writer", 1 << 30, url=redis.url, limits=PATIENT)
    with start(directory, f'type = "valkey"\noptions = {{ url = "{redis.url}" }}') as server:
        site = Site(server, writer, lambda: [name.decode() for name in redis.values])
        site.learn_ids()
        site.write(site.ids[1], BAD_KEYS)
        yield site
        assert '"call failed"' not in server.log
    writer.close()


@pytest.mark.parametrize(
    ("answer", "during"),
    [
        ([b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"], True),
        ([b"-ERR no\r\n"], True),
        ([b"-MOVED 1 127.0.0.1:1\r\n"], True),
        ([b"$5\r\nwrong\r\n"], True),
        ([b"$70000\r\n", bytes(70000), b"\r\n"], True),
        ([b"$9223372036854775807\r\n"], False),
        ([b"$4294967296\r\n"], False),
        ([b"*65536\r\n" * 4], False),
        (itertools.repeat(b"x" * 4096), False),
        ([b"$70"], False),
    ],
    ids=["type", "error", "moved", "short", "long", "2^63", "4 GiB", "nested", "line", "half"],
)
def test_lies_about_one_namespace(
    valkey_site: Site, redis: HostileRedis, request: pytest.FixtureRequest, answer: Iterable[bytes], *, during: bool
) -> None:
    """A wrong value has no effect on others. An answer of another protocol ends with the attack."""
    rest = valkey_site.ids[1][value_codec.TENANT_TAG_BYTES :].hex().encode()  # type: ignore[attr-defined]
    redis.lie = lambda command: answer if command[0] == b"GET" and rest in command[1] else None
    try:
        valkey_site.attack(request.node.name, during=during)
    finally:
        redis.lie = lambda _: None


def _chunks(handler: S3Handler, piece: bytes, count: int) -> None:
    handler.reply(206, b"", {"Content-Range": "bytes 0-99/100", "ETag": "x", "Content-Length": f"{1 << 50}"})
    for _ in range(count):
        handler.wfile.write(piece)
        time.sleep(0.001)


def _loop(handler: S3Handler) -> None:
    more = "<NextContinuationToken>t</NextContinuationToken>"
    handler.reply(200, handler.listed(more).replace(b"<IsTruncated>false", b"<IsTruncated>true"))


@pytest.fixture(scope="module")
def store() -> Iterator[HostileS3]:
    pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")
    server = HostileS3()
    with running(server):
        yield server


@pytest.fixture(scope="module")
def s3_site(store: HostileS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("o")
    credentials = directory / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    options = {"url": "s3://bucket", "endpoint": store.endpoint, "credentials_file": credentials}
    writer = S3Tier("writer", 1 << 30, limits=PATIENT, **options)  # type: ignore[arg-type]
    text = "\n".join(f'{name} = "{value}"' for name, value in options.items())
    with start(directory, f'type = "s3"\n[tiers.options]\ndeadline = "500ms"\n{text}') as server:
        site = Site(server, writer, lambda: list(store.objects))
        site.learn_ids()
        yield site
        assert '"call failed"' not in server.log
    writer.close()


@pytest.mark.parametrize("whose", [0, 1], ids=["victim", "attacker"])
@pytest.mark.parametrize("attack", ["sizes", "future", "names", "many", "short"])
def test_planted_objects(
    s3_site: Site, store: HostileS3, request: pytest.FixtureRequest, attack: str, whose: int
) -> None:
    """By an attacker who may write objects; also in the folder of the victim."""
    folder = folder_of(s3_site.ids[whose])
    keys = [key_of(number, salt=request.node.name) for number in range(4)]
    planted: dict[str, bytes] = {}
    for number in range(400 if attack == "many" else 5):
        sizes = [(1 << 64) - 1] * 4 if attack in ("sizes", "many") else [50] * 4
        entries = encode_index(keys, sizes)
        name = PackName.new(folder, time.time(), len(entries) + value_codec.INDEX_SEAL_BYTES)
        path = name.path
        if attack == "future":
            path = f"{folder}9999-12-31T23/{number:07}-0123456789abcdef-{name.index_bytes:x}"
        if attack == "names":
            path = f"{path.rpartition('/')[0]}/0/{'é' * 200}{number}"
        value = value_codec.seal_index(s3_site.ids[whose], path, entries) + bytes(200)
        planted[path] = value[:20] if attack == "short" else value
    store.objects |= planted
    try:
        s3_site.attack(request.node.name, during=True)
    finally:
        for path in planted:
            del store.objects[path]


@pytest.mark.parametrize(
    "lie",
    [
        lambda handler: handler.reply(403, b"<Error><Code>AccessDenied</Code></Error>"),
        lambda handler: handler.reply(500, b"oops"),
        lambda handler: handler.reply(200, b"not a range"),
        lambda handler: _chunks(handler, bytes(4096), 5000),
        lambda handler: _chunks(handler, b"x", 3000),
        lambda handler: handler.wfile.write(b"HTTP/1.1 206 OK\r\nContent-Length: 50\r\n\r\nhalf"),
        lambda handler: handler.wfile.write(b"\x00" * 100),
    ],
    ids=["403", "500", "200", "long", "slow", "half", "no HTTP"],
)
def test_lies_about_objects_of_one_namespace(
    s3_site: Site, store: HostileS3, request: pytest.FixtureRequest, lie: Callable[[S3Handler], object]
) -> None:
    keys = [key_of(number, salt=f"{request.node.name} bad") for number in range(3)]
    folder = folder_of(s3_site.ids[1])

    def lie_about(handler: S3Handler) -> bool:
        is_theirs = handler.object.startswith(folder)
        if is_theirs:
            lie(handler)
            handler.close_connection = True
        return is_theirs

    for key in keys:
        s3_site.write(s3_site.ids[1], [key])
    store.lie = lie_about
    try:
        s3_site.attack(request.node.name, during=True)
    finally:
        store.lie = lambda _: False


@pytest.mark.parametrize("lie", [_loop, lambda handler: handler.reply(200, b"<Lis")], ids=["loop", "no XML"])
def test_lies_about_the_list_of_one_namespace(
    s3_site: Site, store: HostileS3, request: pytest.FixtureRequest, lie: Callable[[S3Handler], object]
) -> None:
    folder = folder_of(s3_site.ids[1])

    def lie_about(handler: S3Handler) -> bool:
        is_theirs = handler.query.get("prefix", "").startswith(folder[:-1])
        if is_theirs:
            lie(handler)
        return is_theirs

    store.lie = lie_about
    try:
        s3_site.attack(request.node.name, during=False)
    finally:
        store.lie = lambda _: False
