"""Pinned staging buffers of a process with a GPU, with a recording registrar."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.cache_client import NAMESPACE, SMALL, new_keys
from devices.registrar import RecordingRegistrar
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client
from kvtier.client.staging import StagingPool
from kvtier.cuda.host.copy import address_of
from kvtier.cuda.host.pinning import PIN_CHUNK_BYTES, Pin, PinError, Pinning

SMALLEST = 4 << 20


@pytest.fixture
def notes() -> RecordingRegistrar:
    return RecordingRegistrar()


def pins(notes: RecordingRegistrar, allowed: Callable[[], bool] = lambda: True) -> Pin:
    """The `pin` argument of a client in such a process."""
    return lambda memory: Pinning(memory, notes, allowed)


def spans(view: memoryview) -> dict[int, int]:
    """The registered chunks of a buffer."""
    address, size = address_of(view)
    return {address + start: min(PIN_CHUNK_BYTES, size - start) for start in range(0, size, PIN_CHUNK_BYTES)}


@pytest.mark.parametrize("nbytes", [1, SMALLEST, PIN_CHUNK_BYTES + 1])
def test_a_buffer_is_pinned_once(notes: RecordingRegistrar, nbytes: int) -> None:
    """A buffer is pinned by chunks before its first use, and only once."""
    pool = StagingPool(pins(notes))
    for _ in range(3):
        with pool.lend(nbytes) as view:
            assert notes.registered == spans(view)
    assert notes.calls == len(notes.registered)
    pool.close()
    assert not notes.registered


def test_released_buffers_are_unpinned(notes: RecordingRegistrar) -> None:
    """Buffers are unpinned before they are unmapped; the largest ones stay pinned."""
    pool = StagingPool(pins(notes), keep=1)
    with pool.lend(SMALLEST) as small, pool.lend(2 * SMALLEST) as large:
        assert notes.registered == spans(small) | spans(large)
    assert notes.registered == spans(large)


def test_buffers_in_use_are_unpinned_when_returned(notes: RecordingRegistrar) -> None:
    """A client may be closed while another thread copies."""
    pool = StagingPool(pins(notes))
    with pool.lend(1) as view:
        pool.close()
        assert notes.registered == spans(view)
        view[:5] = b"bytes"
    assert not notes.registered


def is_mapped(address: int) -> bool:
    spans_ = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans_)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_view_may_be_released(notes: RecordingRegistrar, *, pinned: bool) -> None:
    """The memory stays mapped while it is in use, and is reused."""
    pool = StagingPool(pins(notes) if pinned else None)
    for _ in range(2):
        with pool.lend(1) as view:
            address, _ = address_of(view)
            view.release()
            assert is_mapped(address)
    pool.close()


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_released_buffers_are_unmapped_at_once(notes: RecordingRegistrar, *, pinned: bool, is_closed: bool) -> None:
    """Closed and dropped clients unmap at once, without waiting for garbage collection."""
    pool = StagingPool(pins(notes) if pinned else None)
    with pool.lend(1) as view:
        address, _ = address_of(view)
        del view
    gc.disable()
    try:
        if is_closed:
            pool.close()
        else:
            del pool
        assert not is_mapped(address)
        assert not notes.registered
    finally:
        gc.enable()


def test_nothing_is_pinned_while_graphs_are_captured(notes: RecordingRegistrar) -> None:
    """B4.16 The buffer is used unpinned, and pinned (or the rest of it) at its next use."""
    answers = iter([False, True, False, True])
    pool = StagingPool(pins(notes, lambda: next(answers)))
    with pool.lend(PIN_CHUNK_BYTES + 1) as view:
        assert not notes.registered
        view[-1] = 1
    with pool.lend(PIN_CHUNK_BYTES + 1):
        assert sum(notes.registered.values()) == PIN_CHUNK_BYTES
    with pool.lend(PIN_CHUNK_BYTES + 1) as view:
        assert notes.registered == spans(view)
        assert view[-1] == 1


def test_a_driver_that_refuses_is_asked_once(notes: RecordingRegistrar, caplog: pytest.LogCaptureFixture) -> None:
    """After a refusal pinning logs once and stops, for other buffers as well."""
    notes.error = PinError("cuMemHostRegister failed with CUDA error 2")
    pool = StagingPool(pins(notes))
    with caplog.at_level(logging.WARNING), pool.lend(1), pool.lend(1):
        pass
    with pool.lend(1) as view:
        view[:5] = b"bytes"
    assert notes.calls == 1
    [record] = caplog.records
    assert record.getMessage() == (
        "kvtier: staging buffers are not pinned, so copies to and from the GPU are slower:"
        " cuMemHostRegister failed with CUDA error 2"
    )
    assert record.getMessage() == f"kvtier: {pool.refusal}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that also listens on the loopback."""
    with ServerProcess(tmp_path, region=128 * MIB, tcp=True).start() as server:
        yield server


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_staging_buffers_of_an_engine_are_pinned(
    server: ServerProcess, notes: RecordingRegistrar, transport: str
) -> None:
    """With a server on another host, an engine with a GPU has pinned staging buffers.

    Closing unpins them.
    """
    keys, data = new_keys(3), bytes(range(250)) * (SMALL // 250)
    way: Any = transport
    with Client(server.tcp, namespace=NAMESPACE, transport=way, pin=pins(notes)) as client:
        with client.write(keys) as batch:
            assert notes.registered == spans(batch.memory)
            with batch.memory as memory:
                for offset in batch.offsets:
                    memory[offset : offset + SMALL] = data
        with client.lookup(keys) as lease, client.read(lease, [0, 1, 2]) as read:
            assert notes.registered == spans(read.memory)
            assert [bytes(read.memory[offset : offset + SMALL]) for offset in read.offsets] == [data] * 3
        assert notes.registered
    assert not notes.registered


def test_a_buffer_may_return_while_its_thread_holds_the_lock() -> None:
    """The garbage collector ends a dropped reader at any allocation, also one of the pool."""
    pool = StagingPool()
    lent = pool.lend(1)
    lent.__enter__()

    def give_back() -> None:
        with pool._lock:
            lent.__exit__(None, None, None)

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(pool._free) == 1


def test_the_smallest_buffers_are_freed() -> None:
    """In any order of their return."""
    pool = StagingPool(keep=2)
    lent = [pool.lend(size * SMALLEST) for size in (2, 8, 1, 4)]
    for each in lent:
        each.__enter__()
    for each in lent:
        each.__exit__(None, None, None)
    assert [buffer.size_bytes for buffer in pool._free] == [4 * SMALLEST, 8 * SMALLEST]
    with pool.lend(5 * SMALLEST) as view:
        assert len(view) == 8 * SMALLEST
