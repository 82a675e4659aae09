"""Staging buffers of a process that has a GPU, pinned while they are lent; a registrar that takes notes stands for a driver."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.cache_client import NAMESPACE, SMALL, new_keys
from devices.registrar import Notes
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client
from kvtier.client.staging import StagingPool
from kvtier.cuda.host.copy import address_of
from kvtier.cuda.host.pinning import PIN_CHUNK_BYTES, Pin, PinError, Pinning

SMALLEST = 4 << 20


@pytest.fixture
def notes() -> Notes:
    """Nothing noted yet."""
    return Notes()


def pins(notes: Notes, allowed: Callable[[], bool] = lambda: True) -> Pin:
    """What a process with such a driver gives its client."""
    return lambda memory: Pinning(memory, notes, allowed)


def spans(view: memoryview) -> dict[int, int]:
    """How a buffer is registered: in chunks, from its beginning to its end."""
    address, size = address_of(view)
    return {address + start: min(PIN_CHUNK_BYTES, size - start) for start in range(0, size, PIN_CHUNK_BYTES)}


@pytest.mark.parametrize("nbytes", [1, SMALLEST, PIN_CHUNK_BYTES + 1])
def test_a_buffer_is_pinned_once(notes: Notes, nbytes: int) -> None:
    """Before it is lent for the first time, all of it, in chunks that no transfer crosses; not again."""
    pool = StagingPool(pins(notes))
    for _ in range(3):
        with pool.lend(nbytes) as view:
            assert notes.registered == spans(view)
    assert notes.calls == len(notes.registered)
    pool.close()
    assert not notes.registered


def test_buffers_that_are_let_go_are_unpinned(notes: Notes) -> None:
    """While they are still mapped, which the registrar looks at; the largest stay, pinned as they are."""
    pool = StagingPool(pins(notes), keep=1)
    with pool.lend(SMALLEST) as small, pool.lend(2 * SMALLEST) as large:
        assert notes.registered == spans(small) | spans(large)
    assert notes.registered == spans(large)


def test_what_is_lent_is_unpinned_when_it_comes_back(notes: Notes) -> None:
    """A client may be closed while another thread is in the middle of a copy."""
    pool = StagingPool(pins(notes))
    with pool.lend(1) as view:
        pool.close()
        assert notes.registered == spans(view)
        view[:5] = b"bytes"
    assert not notes.registered


def is_mapped(address: int) -> bool:
    """Whether there is memory at an address."""
    spans_ = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans_)


@pytest.mark.parametrize("pinned", [True, False])
def test_whoever_has_a_view_may_release_it(notes: Notes, *, pinned: bool) -> None:
    """The memory stays while it is lent, and is lent again."""
    pool = StagingPool(pins(notes) if pinned else None)
    for _ in range(2):
        with pool.lend(1) as view:
            address, _ = address_of(view)
            view.release()
            assert is_mapped(address)
    pool.close()


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_let_go_is_unmapped_at_once(notes: Notes, *, pinned: bool, is_closed: bool) -> None:
    """Not when garbage is collected: it is a lot. By a client that is dropped without being closed, too."""
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


def test_nothing_is_pinned_while_graphs_are_captured(notes: Notes) -> None:
    """B4.16 The buffer serves all the same, and is pinned when it is lent the next time; what is left of it, too."""
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


def test_a_driver_that_refuses_is_asked_once(notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    """Without pinning copies are slower; it says so once and gives up, for other buffers as well."""
    notes.error = PinError("cuMemHostRegister failed with CUDA error 2")
    pool = StagingPool(pins(notes))
    with caplog.at_level(logging.WARNING), pool.lend(1), pool.lend(1):
        pass
    with pool.lend(1) as view:
        view[:5] = b"bytes"
    assert notes.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kvtier: staging buffers are not pinned, copies of the GPU will be slower: cuMemHostRegister failed with CUDA error 2"
    ]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One that listens on the loopback, too."""
    with ServerProcess(tmp_path, region=128 * MIB, tcp=True).start() as server:
        yield server


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_what_an_engine_writes_to_and_reads_from_is_pinned(server: ServerProcess, notes: Notes, transport: str) -> None:
    """Of a server on another host an engine with a GPU has staging buffers; at the client's end nothing is left pinned."""
    keys, data = new_keys(3), bytes(range(250)) * (SMALL // 250)
    with Client(server.tcp, namespace=NAMESPACE, transport=transport, pin=pins(notes)) as client:  # type: ignore[arg-type]
        client.wait_until_connected(60)
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
