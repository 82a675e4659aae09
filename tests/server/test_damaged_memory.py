"""Bytes in the region change, by a flipped bit or a stray write, and readers detect it."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from harness.payloads import assert_serves, correct_hits, filled, is_payload, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import ChecksumMismatch, Client, DurableStatus, StoreStatus
from kvtier.protos.wire.part_digests import sampled

PART = 16 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(64)]
DAMAGED = 20

Transport = Literal["shm", "tcp", "grpc"]
TRANSPORTS: tuple[Transport, ...] = ("shm", "tcp", "grpc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("s"), tcp=True, lmdb=0) as process:
        yield process.start()


def connected(server: ServerProcess, transport: Transport, **options: object) -> Client:
    endpoint = server.tcp if transport == "tcp" else server.endpoint
    options = {"verify": "always", "namespace": NAMESPACE, **options}
    client = Client(endpoint, transport=transport, **options)  # type: ignore[arg-type]
    client.wait_until_connected(10)
    return client


def store(client: Client, keys: list[bytes], rank: int = 0) -> None:
    statuses = client.store(keys, [payload(key, PART, rank) for key in keys])
    assert set(statuses) == {StoreStatus.GRANTED}


@contextlib.contextmanager
def slots_of(client: Client, keys: list[bytes]) -> Iterator[list[memoryview]]:
    """The slots of blocks, writable, as any process that maps the region sees them."""
    with client.lookup(keys, slots=True) as lease:
        assert lease.slots is not None
        offsets = struct.unpack(f"<{len(keys)}Q", lease.slots.offsets)
        memory = client._transport.session.region.memory
        yield [memory[offset : offset + PART] for offset in offsets]


def flip(server: ServerProcess, keys: list[bytes], namespace: object = NAMESPACE) -> None:
    with connected(server, "shm", namespace=namespace) as stray, slots_of(stray, keys) as slots:
        for slot in slots:
            slot[PART // 3] ^= 4


@pytest.fixture
def fresh(server: ServerProcess) -> Iterator[None]:
    yield
    with connected(server, "shm") as client:
        assert client.reset(wait=10) == 0


def mismatches(server: ServerProcess) -> int:
    return server.log.count("block damaged in memory")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("writer", TRANSPORTS)
@pytest.mark.parametrize("reader", TRANSPORTS)
def test_a_flipped_bit_is_a_miss(server: ServerProcess, writer: Transport, reader: Transport) -> None:
    """The load ends before the damaged block, which the server removes, and a store brings back."""
    known = mismatches(server)
    with connected(server, writer, engine_id="writing") as writing, connected(server, reader) as reading:
        store(writing, KEYS)
        assert_serves(reading, KEYS)
        flip(server, [KEYS[DAMAGED]])
        assert correct_hits(reading, KEYS) == DAMAGED
        wait_until(lambda: mismatches(server) == known + 1, 10)
        assert reading.lookup(KEYS).prefix_hits == DAMAGED
        assert correct_hits(reading, KEYS[DAMAGED + 1 :]) == len(KEYS) - DAMAGED - 1
        line = next(line for line in reversed(server.log.splitlines()) if "block damaged in memory" in line)
        assert KEYS[DAMAGED].hex() in line
        assert '"stored_by": "writing"' in line
        reasons = {each.reason: each.keys for each in server.status().misses}
        assert reasons[12] > 0
        store(writing, [KEYS[DAMAGED]])
        assert_serves(reading, KEYS)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("reader", TRANSPORTS)
def test_read_raises(server: ServerProcess, reader: Transport) -> None:
    with connected(server, "shm") as writing, connected(server, reader) as reading:
        store(writing, KEYS)
        flip(server, [KEYS[3], KEYS[5]])
        with (
            reading.lookup(KEYS) as lease,
            pytest.raises(ChecksumMismatch, match="item 3 of the lookup"),
            reading.read(lease, range(8)),
        ):
            pass
        with reading.lookup(KEYS) as lease:
            assert lease.prefix_hits == 3
            with reading.read(lease, range(3)) as batch:
                assert [bytes(view) for view in batch.views()] == [payload(key, PART).tobytes() for key in KEYS[:3]]


@pytest.mark.usefixtures("fresh")
def test_a_worker_with_the_slots_of_a_scheduler_compares(server: ServerProcess) -> None:
    engine = {"engine_id": "engine", "namespace": namespace_of(PART, world_size=2)}
    with contextlib.ExitStack() as opened:
        scheduler = opened.enter_context(connected(server, "shm", **engine))
        workers = [opened.enter_context(connected(server, "shm", rank=rank, **engine)) for rank in range(2)]
        for rank, worker in enumerate(workers):
            store(worker, KEYS, rank)
        lease = opened.enter_context(scheduler.lookup(KEYS, slots=True))
        assert lease.slots is not None
        offsets = struct.unpack(f"<{2 * len(KEYS)}Q", lease.slots.offsets)
        memory = scheduler._transport.session.region.memory
        memory[offsets[2 * DAMAGED + 1] + 9] ^= 1  # the part of rank 1
        with workers[0].read(lease.id, range(len(KEYS)), slots=lease.slots):
            pass
        with pytest.raises(ChecksumMismatch), workers[1].read(lease.id, range(len(KEYS)), slots=lease.slots):
            pass
        assert scheduler.lookup(KEYS).prefix_hits == DAMAGED


@pytest.mark.usefixtures("fresh")
def test_intact_bytes_of_another_block_or_rank_are_damage(server: ServerProcess) -> None:
    options = {"namespace": namespace_of(PART, world_size=2)}
    keys = [key_of(number, salt="swapped") for number in range(8)]
    with contextlib.ExitStack() as opened:
        workers = [opened.enter_context(connected(server, "shm", rank=rank, **options)) for rank in range(2)]
        for rank, worker in enumerate(workers):
            store(worker, keys, rank)
        with workers[0].lookup(keys, slots=True) as lease, workers[1].lookup(keys, slots=True) as other:
            assert lease.slots is not None
            assert other.slots is not None
            mine, theirs = (struct.unpack("<8Q", each.slots.offsets) for each in (lease, other))  # type: ignore[union-attr]
            region = workers[0]._transport.session.region
            memory, digests = region.memory, region.digests
            for first, second in ((mine[1], mine[2]), (mine[5], theirs[5])):
                bytes_of_first = bytes(memory[first : first + PART])
                memory[first : first + PART] = memory[second : second + PART]
                memory[second : second + PART] = bytes_of_first
                one, two = first // 4096, second // 4096
                digests[one], digests[two] = digests[two], digests[one]
        found = filled(8, PART)
        assert workers[0].load(keys, found) == 1
        assert is_payload(keys[0], found[0])
        assert workers[0].load(keys[3:8], filled(5, PART)) == 2
        found = filled(2, PART)
        assert workers[1].load(keys[6:8], found) == 2
        assert is_payload(keys[6], found[0], 1)


@pytest.mark.usefixtures("fresh")
def test_a_write_after_the_store(server: ServerProcess) -> None:
    """A writer that goes on after its store, also when the slot has another block, is detected."""
    with connected(server, "shm") as writing, connected(server, "shm") as reading:
        with writing.write(KEYS[:1]) as batch:
            [view] = batch.views()
            view[:] = payload(KEYS[0], PART).data
        view[:] = bytes(PART)
        assert reading.load(KEYS[:1], filled(1, PART)) == 0
        wait_until(lambda: not reading.lookup(KEYS[:1]).prefix_hits, 10)
        others = [key_of(number, salt="other") for number in range(200)]
        store(reading, others)  # one of them has the slot
        view[:] = bytes(PART)
        assert sum(correct_hits(reading, others[start : start + 1]) for start in range(len(others))) == len(others) - 1


@pytest.mark.usefixtures("fresh")
def test_a_client_verifies_what_it_was_told(server: ServerProcess) -> None:
    """`sampled` detects damage of its sample only; no setting takes intact blocks for damaged."""
    chosen = sampled(KEYS)
    assert 0 < len(chosen) < len(KEYS) // 2
    others = [number for number in range(len(KEYS)) if number not in chosen]
    with contextlib.ExitStack() as opened:
        full, part, off = (
            opened.enter_context(connected(server, "shm", verify=verify)) for verify in ("always", "sampled", "off")
        )
        known = mismatches(server)
        store(full, KEYS)
        flip(server, [KEYS[number] for number in others])
        assert part.load(KEYS, filled(len(KEYS), PART)) == len(KEYS)
        flip(server, [KEYS[chosen[0]]])
        assert off.load(KEYS, filled(len(KEYS), PART)) == len(KEYS)
        assert part.load(KEYS, filled(len(KEYS), PART)) == chosen[0]
        wait_until(lambda: mismatches(server) == known + 1, 10)
        assert full.reset(wait=10) == 0
        store(off, KEYS)  # in slots that had digests
        assert_serves(full, KEYS)
        assert full.reset(wait=10) == 0
        store(part, KEYS)
        assert_serves(full, KEYS)
        assert mismatches(server) == known + 1


@pytest.mark.usefixtures("fresh")
def test_a_report_of_intact_blocks_removes_none(server: ServerProcess) -> None:
    with connected(server, "shm") as writing, connected(server, "shm") as liar:
        store(writing, KEYS)
        with liar.lookup(KEYS, slots=True) as lease, liar._operations.held() as held:
            reading = liar._run(liar._operations.begin_read(held, lease, range(len(KEYS))))
            liar._operations._compare = lambda _reading, _addresses, damaged: damaged.extend(range(len(KEYS)))  # type: ignore[method-assign]
            with pytest.raises(ChecksumMismatch):
                liar._run(liar._operations.end_read(reading))
        assert_serves(writing, KEYS)


def test_a_damaged_block_is_loaded_from_its_tier(tmp_path: Path) -> None:
    """The copy in LMDB is intact, because it was compared with the digest before it was stored."""
    with ServerProcess(tmp_path, tcp=True) as server, connected(server.start(), "shm") as client:
        store(client, KEYS)
        assert set(client.flush(KEYS, wait=10)) == {DurableStatus.DURABLE}
        flip(server, [KEYS[DAMAGED]])
        assert correct_hits(client, KEYS) == DAMAGED
        assert_serves(client, KEYS)
        server.restart()
        client.wait_until_connected(10)
        assert_serves(client, KEYS)
        flip(server, [KEYS[DAMAGED]])  # promoted: the server has recorded its digest
        assert correct_hits(client, KEYS) == DAMAGED
        assert_serves(client, KEYS)


def test_verify_must_be_known() -> None:
    with pytest.raises(Exception, match="verify must be one of always, sampled, off"):
        Client("unix:/nowhere", namespace=NAMESPACE, verify="often")  # type: ignore[arg-type]


def test_an_unknown_setting_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_VERIFY", "often")
    Client("unix:/nowhere", namespace=NAMESPACE).close()
    monkeypatch.setenv("KVTIER_VERIFY", "always")
    client = Client("unix:/nowhere", namespace=NAMESPACE)
    assert client._operations._digests.names(KEYS) == dict(enumerate(KEYS))
    client.close()


@pytest.mark.usefixtures("fresh")
def test_a_server_records_what_the_sessions_compare(server: ServerProcess) -> None:
    """Parts of streams: all while a session compares all, otherwise the sample."""
    chosen = sampled(KEYS)

    def recorded(mapping: Client) -> list[int]:
        with mapping.lookup(KEYS, slots=True) as lease:
            assert lease.slots is not None
            offsets = struct.unpack(f"<{len(KEYS)}Q", lease.slots.offsets)
        digests = mapping._transport.session.region.digests
        return [number for number, offset in enumerate(offsets) if digests[offset // 4096]]

    with connected(server, "tcp", verify="sampled") as sampling, connected(server, "shm", verify="off") as mapping:
        store(sampling, KEYS)
        assert recorded(mapping) == chosen
        assert sampling.reset(wait=10) == 0
        with connected(server, "tcp", verify="always"):
            store(sampling, KEYS)
            assert recorded(mapping) == list(range(len(KEYS)))
        assert sampling.reset(wait=10) == 0
        wait_until(lambda: len(server.status().sessions) == 2, 10)
        store(sampling, KEYS)
        assert recorded(mapping) == chosen


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_damage_is_found_beside_a_store_of_the_same_client(server: ServerProcess, transport: Transport) -> None:
    others = [[key_of(number, salt=f"{batch}") for number in range(256)] for batch in range(8)]
    ended = threading.Event()

    def store_others() -> None:
        while not ended.is_set():
            for keys in others:
                client.store(keys, [payload(key, PART) for key in keys])

    with connected(server, transport) as client:
        store(client, KEYS)
        thread = threading.Thread(target=store_others)
        thread.start()
        try:
            for damaged in range(40, 20, -1):
                flip(server, [KEYS[damaged]])
                assert correct_hits(client, KEYS) == damaged
        finally:
            ended.set()
            thread.join()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_verifies_what_it_was_told(server: ServerProcess, transport: Transport) -> None:
    """Of what its scheduler names. Over streams the scheduler has no slots, but names the keys."""
    found = {}
    for verify in ("always", "sampled", "off"):
        engine = {"engine_id": "engine"}
        with (
            connected(server, transport, **engine) as scheduler,
            connected(server, transport, verify=verify, **engine) as worker,
        ):
            store(scheduler, KEYS)
            lease = scheduler.lookup(KEYS, slots=True)
            flip(server, [KEYS[DAMAGED]])
            try:
                with worker.read(lease.id, range(len(KEYS)), slots=lease.slots):
                    pass
                found[verify] = False
            except ChecksumMismatch:
                found[verify] = True
            lease.release()
            assert scheduler.reset(wait=10) == 0
    assert DAMAGED not in sampled(KEYS)
    assert found == {"always": True, "sampled": False, "off": False}


@pytest.mark.usefixtures("fresh")
def test_a_reader_may_change_its_staging_buffer(server: ServerProcess) -> None:
    with connected(server, "tcp") as client:
        store(client, KEYS)
        with client.lookup(KEYS) as lease:
            with client.read(lease, range(4)) as batch:
                batch.memory[:] = bytes(len(batch.memory))
            flip(server, [KEYS[2]])
            with pytest.raises(ChecksumMismatch), client.read(lease, range(4)):
                pytest.fail("the block is damaged")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_caller_may_change_its_list_of_keys(server: ServerProcess, transport: Transport) -> None:
    with connected(server, transport) as client:
        keys = KEYS[:4]
        with client.write(keys) as batch:
            for key, view in zip(keys, batch.views(), strict=True):
                view[:] = payload(key, PART).data
            keys.clear()
        keys = KEYS[:4]
        lease = client.lookup(keys)
        keys.reverse()
        with client.read(lease, range(4)) as read:
            assert [bytes(view) for view in read.views()] == [payload(key, PART).tobytes() for key in KEYS[:4]]
        lease.release()
        assert_serves(client, KEYS[:4])
