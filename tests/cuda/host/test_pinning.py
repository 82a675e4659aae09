"""Background pinning in chunks, with a recording registrar."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from contracts.cache_client import NAMESPACE, SMALL, new_keys
from devices.registrar import RecordingRegistrar
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KeyStatus
from kvtier.cuda.host.pinning import PIN_CHUNK_BYTES, CudaRegistrar, PinError, Pinnable, Pinning, split_at_chunks
from kvtier.cuda.host.region import PAGE_BYTES, HostRegion
from kvtier.cuda.host.warmup import warm_up

SIZE = 2 * PIN_CHUNK_BYTES + 3 * PAGE_BYTES


@pytest.fixture
def notes() -> RecordingRegistrar:
    return RecordingRegistrar()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    """A region of three chunks, the last one short; the first two are backed."""
    with HostRegion.create(SIZE) as made:
        made.back(0, 2 * PIN_CHUNK_BYTES)
        yield made


def test_chunks_are_whole_pages_and_cover_what_is_backed(region: HostRegion, notes: RecordingRegistrar) -> None:
    """B4.16 Page-aligned chunks are pinned one by one; memory that is not backed is not pinned."""
    pinning = Pinning(region, notes, allowed=lambda: True)
    rounds: list[float] = []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            assert list(notes.registered.values()) == [PIN_CHUNK_BYTES] * 2
            region.back(2 * PIN_CHUNK_BYTES, 3 * PAGE_BYTES)

    warm_up(region, pinning, over=lambda: False, refused=pytest.fail, sleep=sleep)
    assert len(rounds) == 3
    spans = sorted(notes.registered.items())
    assert spans[0][0] == region.address
    assert all(address % PAGE_BYTES == 0 and nbytes % PAGE_BYTES == 0 for address, nbytes in spans)
    assert all(address + nbytes == following for (address, nbytes), (following, _) in pairwise(spans))
    assert sum(notes.registered.values()) == SIZE
    pinning.close()
    assert not notes.registered


def test_nothing_is_pinned_while_graphs_are_captured(region: HostRegion, notes: RecordingRegistrar) -> None:
    """B4.16 Pinning stops for every capture and continues after it."""
    captures = iter([True, *[False] * 200, True, True])
    region.back(2 * PIN_CHUNK_BYTES, 3 * PAGE_BYTES)
    pinning = Pinning(region, notes, allowed=lambda: next(captures))
    asked = 0

    def sleep(_: float) -> None:
        nonlocal asked
        asked += 1
        assert notes.calls == 1

    warm_up(region, pinning, over=lambda: False, refused=pytest.fail, sleep=sleep)
    assert asked == 100  # two chunks are left, asked once per round
    assert sum(pinning._pinned.values()) == SIZE


def test_a_driver_that_refuses_is_asked_once(region: HostRegion, notes: RecordingRegistrar) -> None:
    """After a refusal pinning reports it once and stops."""
    refusals: list[PinError] = []
    notes.error = PinError("cuMemHostRegister failed with CUDA error 2")
    region.back(2 * PIN_CHUNK_BYTES, 3 * PAGE_BYTES)
    warm_up(region, Pinning(region, notes, allowed=lambda: True), over=lambda: False, refused=refusals.append)
    assert notes.calls == 1
    assert refusals == [notes.error]


def test_a_closed_region_is_not_pinned(region: HostRegion, notes: RecordingRegistrar) -> None:
    """A session may end while its region is being pinned."""
    pinning = Pinning(region, notes, allowed=lambda: True)
    assert pinning.pin(0, PIN_CHUNK_BYTES)
    pinning.close()
    assert not pinning.pin(PIN_CHUNK_BYTES, PIN_CHUNK_BYTES)
    assert not notes.registered


@pytest.mark.parametrize(("offset", "length"), [(-PAGE_BYTES, PAGE_BYTES), (0, PIN_CHUNK_BYTES + 1), (0, 0), (SIZE, 1)])
def test_only_chunks_are_pinned(region: HostRegion, notes: RecordingRegistrar, offset: int, length: int) -> None:
    """No range crosses a multiple of the chunk size, because transfers are split there."""
    with pytest.raises(ValueError, match="not in one chunk"):
        Pinning(region, notes, allowed=lambda: True).pin(offset, length)


@pytest.mark.parametrize(
    ("offset", "nbytes", "pieces"),
    [
        (5, 10, [(5, 10)]),
        (0, PIN_CHUNK_BYTES, [(0, PIN_CHUNK_BYTES)]),
        (PIN_CHUNK_BYTES - 4, 10, [(PIN_CHUNK_BYTES - 4, 4), (PIN_CHUNK_BYTES, 6)]),
        (7, 0, []),
    ],
)
def test_transfers_are_cut_where_chunks_meet(offset: int, nbytes: int, pieces: list[tuple[int, int]]) -> None:
    """B4.16 A driver accepts no transfer that crosses a registration boundary."""
    assert list(split_at_chunks(offset, nbytes)) == pieces


def test_without_a_gpu_there_is_a_reason() -> None:
    """Pinning is optional: the error names the missing part."""
    with pytest.raises(PinError, match=r"CUDA|cuDeviceGet"):
        CudaRegistrar(10_000)


def test_the_service_answers_while_its_memory_is_being_pinned(tmp_path: Path, notes: RecordingRegistrar) -> None:
    """B4.16 Clients work while memory is being pinned; closing leaves nothing pinned."""
    notes.hold.clear()
    made: list[Pinning] = []

    def pin(memory: Pinnable) -> Pinning:
        made.append(Pinning(memory, notes, allowed=lambda: True))
        return made[0]

    with ServerProcess(tmp_path, region=128 * MIB).start() as server:
        client = Client(server.endpoint, namespace=NAMESPACE, transport="shm", pin=pin)
        client.wait_until_connected()
        keys = new_keys(3)
        client.store(keys, [bytes(SMALL)] * 3)
        with client.lookup(keys) as lease:
            assert set(lease.statuses) == {KeyStatus.HIT}
        assert not notes.registered
        notes.hold.set()
        wait_until(lambda: sum(made[0]._pinned.values()) >= 128 * MIB)
        assert notes.threads == {"kvtier-warmup"}
        client.close()
        wait_until(lambda: not notes.registered)
