"""Clients that die, hang or lose their session during a write or read leave no block and no pin."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.raw import RawSession, refusal_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KeyStatus, StoreStatus
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys, unpack_offsets

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(16)]
LEASE_SECONDS = 3.0

# Prepares a store, prints a line in the middle of writing, and then does what the test says.
_WRITER = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from harness.long_timeouts import long_timeouts
from harness.payloads import key_of, namespace_of
from kvtier.client import Client
from kvtier.client.session import reconnect
reconnect._SILENT_INTERVALS = 10_000  # it is to be killed, or cut off, and not to give up
keys = [key_of(number) for number in range(16)]
with long_timeouts(), Client(sys.argv[2], namespace=namespace_of(1 << 20), name="writer", transport=sys.argv[3]) as client:
    client.wait_until_connected(60)
    try:
        with client.write(keys) as batch:
            for number, view in enumerate(batch.views()):
                view[:] = b"\\xee" * len(view)
                if number == 7:
                    print("writing", flush=True)
                    {then}
    except Exception as error:
        print(type(error).__name__, getattr(error, "reason", ""), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server with a CPU tier of 32 blocks."""
    with ServerProcess(tmp_path, region=32 * MIB, config="[leases]\ndefault = 600\npart = 1.0") as process:
        yield process.start()


@contextlib.contextmanager
def writer(server: ServerProcess, transport: str, then: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a client process that has filled eight of its sixteen slots."""
    program = _WRITER.replace("{then}", then)
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", program, tests, server.endpoint, transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def statuses_of(client: Client, keys: list[bytes]) -> set[int]:
    with client.lookup(keys, prefix=False) as found:
        return set(found.statuses)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("then", ["signal.pause()", "batch.memory[0:0]"], ids=["between two copies", "while copying"])
def test_a_killed_writer_publishes_nothing(server: ServerProcess, transport: str, then: str) -> None:
    """Its slots are used again once the process is gone (B4.5)."""
    then = (
        then if "pause" in then else "end = time.time() + 60\n" + " " * 20 + "while time.time() < end: view[:] = view"
    )
    with Client(server.endpoint, namespace=NAMESPACE) as other:
        with writer(server, transport, then) as process:
            assert statuses_of(other, KEYS) == {KeyStatus.HIT_PENDING}
            assert set(other.store(KEYS, [payload(key, PART) for key in KEYS])) == {StoreStatus.IN_PROGRESS}
            process.kill()
        status = server.wait_for(lambda status: len(status.sessions) == 1 and not status.quarantined_bytes)
        assert (status.stores, status.leases) == (0, 0)
        assert statuses_of(other, KEYS) == {KeyStatus.MISS}
        # All memory is available: 32 blocks fit, including the slots of the killed client.
        many = [*KEYS, *(key_of(number, salt="more") for number in range(15))]
        assert set(other.store(many, [payload(key, PART) for key in many])) == {StoreStatus.GRANTED}
        assert_serves(other, many)


@pytest.mark.parametrize("how", ["killed", "channel closed", "stream cancelled"])
def test_a_lost_client_is_noticed_at_once(tmp_path: Path, how: str) -> None:
    """The session ends at once, not when its stream is collected, in any state of the server."""
    with ServerProcess(tmp_path, region=32 * MIB, config="[sessions]\nheartbeat_interval = 0.01").start() as server:
        for number in range(3):
            with contextlib.ExitStack() as closing:
                if how == "killed":
                    vanish = closing.enter_context(writer(server, "grpc", "signal.pause()")).kill
                else:
                    raw = closing.enter_context(RawSession(server.endpoint, NAMESPACE, engine_id=f"raw {number}"))
                    vanish = raw.channel.close if how == "channel closed" else raw.end
                server.wait_for(lambda status: len(status.sessions) == 1)
                time.sleep(0.1 + number * 0.003)
                vanish()
                # only a busy machine needs this long
                server.wait_for(lambda status: not status.sessions, 9.0)


def test_slots_of_an_ended_session_wait_for_its_process(server: ServerProcess) -> None:
    """While the process maps the region, the slots of its ended session are not reused.

    Otherwise a late write could overwrite another client's block.
    """
    with Client(server.endpoint, namespace=NAMESPACE) as other:
        other.wait_until_connected(60)
        with RawSession(server.endpoint, NAMESPACE, engine_id="raw", transport="shm") as raw:
            late = raw.attach()
            second = raw.attach()
            request = cache_pb2.PrepareStoreRequest(session=raw.ref, keys=pack_keys(KEYS))
            offsets = unpack_offsets(raw.cache.PrepareStore(request).slot_offsets)
            raw.end()
            status = server.wait_for(lambda status: len(status.sessions) == 1)
            assert status.quarantined_bytes == len(KEYS) * PART
            assert statuses_of(other, KEYS) == {KeyStatus.MISS}
            # The rest of the region is filled while the process still writes.
            many = [key_of(number, salt="more") for number in range(32)]
            granted = other.store(many, [payload(key, PART) for key in many])
            stored = [key for key, status in zip(many, granted, strict=True) if status == StoreStatus.GRANTED]
            assert 12 <= len(stored) <= 16
            for offset in offsets:
                late.region.memory[offset : offset + PART] = b"\xdd" * PART
            assert_serves(other, stored, wait=0)
            second.close()
            assert server.status().quarantined_bytes == len(KEYS) * PART
            late.close()
            server.wait_for(lambda status: not status.quarantined_bytes)
        assert set(other.store(KEYS, [payload(key, PART) for key in KEYS])) == {StoreStatus.GRANTED}
        assert_serves(other, KEYS)


def test_a_store_of_an_ended_session_cannot_be_completed(server: ServerProcess) -> None:
    """A later session of the same engine cannot complete it either."""
    with RawSession(server.endpoint, NAMESPACE, engine_id="raw") as raw:
        store_id = raw.cache.PrepareStore(cache_pb2.PrepareStoreRequest(session=raw.ref, keys=pack_keys(KEYS))).store_id
        raw.end()
        server.wait_for(lambda status: not status.sessions)
    with RawSession(server.endpoint, NAMESPACE, engine_id="raw") as raw:
        with pytest.raises(grpc.RpcError) as refusal:
            raw.cache.CompleteStore(cache_pb2.CompleteStoreRequest(session=raw.ref, store_id=store_id))
        assert refusal_of(refusal.value) == ("NOT_FOUND", "STORE_NOT_FOUND")
        found = raw.cache.Lookup(cache_pb2.LookupRequest(session=raw.ref, keys=pack_keys(KEYS)))
        assert found.lease_id == 0


@pytest.mark.slow
def test_a_stopped_writer_loses_its_store(tmp_path: Path) -> None:
    """The store expires, and its slots wait until the client reports again.

    Its completion is refused and publishes nothing, but tells the server that the write has ended.
    """
    with (
        ServerProcess(tmp_path, region=32 * MIB, config=f"[leases]\ndefault = {LEASE_SECONDS}").start() as server,
        Client(server.endpoint, namespace=NAMESPACE) as other,
        writer(server, "shm", "sys.stdin.readline()") as process,
    ):
        other.wait_until_connected(60)
        os.kill(process.pid, signal.SIGSTOP)
        status = server.wait_for(lambda status: not status.stores, LEASE_SECONDS + 60)
        assert status.quarantined_bytes == len(KEYS) * PART
        assert len(status.sessions) == 2
        assert statuses_of(other, KEYS) == {KeyStatus.MISS}
        half = KEYS[:8]
        assert set(other.store(half, [payload(key, PART) for key in half])) == {StoreStatus.GRANTED}
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "LeaseLost STORE_NOT_FOUND\n"
        server.wait_for(lambda status: not status.quarantined_bytes)
        assert_serves(other, half, wait=0)
        assert statuses_of(other, KEYS[8:]) == {KeyStatus.MISS}


@pytest.mark.slow
def test_a_stopped_reader_loses_its_lease(server: ServerProcess) -> None:
    """Its blocks may be evicted (B4.9), and the client discards what it read meanwhile."""
    with (
        Client(server.endpoint, namespace=NAMESPACE) as reader,
        Client(server.endpoint, namespace=NAMESPACE) as other,
    ):
        reader.store(KEYS, [payload(key, PART) for key in KEYS])
        many, again = ([key_of(number, salt=salt) for number in range(32)] for salt in ("more", "again"))
        blocks = [payload(key, PART) for key in many]
        pinned = reader.lookup(KEYS, lease=LEASE_SECONDS)
        assert pinned.prefix_hits == len(KEYS)
        crowd = other.store(many, blocks)
        assert StoreStatus.NO_ROOM in crowd, "a pinned block was evicted"
        assert_serves(reader, KEYS, wait=0)
        with contextlib.ExitStack() as reading:
            batch = reading.enter_context(reader.read(pinned, range(len(KEYS))))
            server.wait_for(lambda status: not status.leases, LEASE_SECONDS + 60)
            other.store(again, [payload(key, PART) for key in again])
            stale = [
                not np.array_equal(view, payload(key, PART)) for view, key in zip(batch.views(), KEYS, strict=True)
            ]
            assert any(stale), "no slot was reused"
            with pytest.raises(Exception, match="lease") as refusal:
                reading.close()
            assert refusal.value.reason == "LEASE_NOT_FOUND"  # type: ignore[attr-defined]


def test_a_stopped_client_does_not_delay_others(server: ServerProcess) -> None:
    """While one client is stopped during a write, others store and load at full length."""
    with Client(server.endpoint, namespace=NAMESPACE) as other, writer(server, "grpc", "signal.pause()") as process:
        os.kill(process.pid, signal.SIGSTOP)
        keys = [key_of(number, salt="other") for number in range(8)]
        # No call waits for the other client's lease, which outlasts the calls.
        other.store(keys, [payload(key, PART) for key in keys])
        assert_serves(other, keys, wait=0)
        assert server.status().stores == 1
