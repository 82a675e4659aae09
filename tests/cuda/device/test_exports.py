"""What an engine says of its memory.

Exact, checked where it arrives, and refused with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import Engine
from devices.kv import LAYOUTS, Kv

from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver_contract import HANDLE_BYTES, MemoryKind
from kvtier.cuda.device.exports import DeviceExport, ExportedAllocation, Origin, export_blocks, likely_cause, obstacle
from kvtier.cuda.device.handles import OpenHandles
from kvtier.cuda.device.layout import BlockLayout, LayoutRun
from kvtier.cuda.host.region import PAGE_BYTES

StartEngine = Callable[[Kv], Engine]

HERE = Origin.here()
ELSEWHERE = dataclasses.replace(HERE, pid=HERE.pid + 1)
EXPORT = DeviceExport(
    device="a device",
    origin=ELSEWHERE,
    allocations=(ExportedAllocation(bytes(range(HANDLE_BYTES)), 1000), ExportedAllocation(bytes(HANDLE_BYTES), 50)),
    layouts={
        0: BlockLayout(4, (LayoutRun(0, 8, 100, 20, 2, 40), LayoutRun(1, 0, 10, 5))),
        3: BlockLayout(1, (LayoutRun(1, 0, 50, 50),)),
    },
    events=(bytes(HANDLE_BYTES),),
)


@pytest.fixture
def host() -> HostBackend:
    return HostBackend()


def test_an_export_survives_its_journey() -> None:
    """An export equals its parsed JSON."""
    assert DeviceExport.from_bytes(EXPORT.to_bytes()) == EXPORT


@pytest.mark.parametrize(
    "changes",
    [
        {"allocations": (ExportedAllocation(b"short", 1000), *EXPORT.allocations[1:])},
        {"allocations": (ExportedAllocation(bytes(HANDLE_BYTES), 327), *EXPORT.allocations[1:])},
        {"events": (b"",)},
        {"layouts": {}},
        {"layouts": {0: BlockLayout(1, (LayoutRun(2, 0, 1, 1),))}},
        {"layouts": {0: BlockLayout(1, (LayoutRun(0, 981, 100, 20),))}},
    ],
)
def test_invalid_exports_are_refused(changes: dict[str, Any]) -> None:
    """Handles must have the right size, and blocks must be inside of the allocations."""
    with pytest.raises(DeviceError) as caught:
        dataclasses.replace(EXPORT, **changes)
    assert caught.value.cause is Cause.BAD_EXPORT


def test_blocks_of_too_many_pieces_are_refused() -> None:
    """The number of pieces per block is limited, because plans are made of pieces."""
    run = LayoutRun(0, 0, 1 << 20, 1, 70_000, 2)
    with pytest.raises(DeviceError, match="pieces"):
        dataclasses.replace(
            EXPORT, allocations=(ExportedAllocation(bytes(HANDLE_BYTES), 1 << 30),), layouts={0: BlockLayout(1, (run,))}
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_are_named_by_allocation_and_offset(start_engine: StartEngine, name: str) -> None:
    """One handle per allocation, for any number of tensors; the layout keeps its length."""
    kv = LAYOUTS[name]
    export = start_engine(kv).export
    assert len(export.allocations) == (1 if kv.carved else kv.count)
    assert export.layouts[0].part_bytes == kv.layout().part_bytes
    assert export.layouts[0].runs[0].offset == (256 if kv.carved else 0)
    assert len(export.events) == 2


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (MemoryKind.VMM, Cause.VMM_MEMORY),
        (MemoryKind.POOL, Cause.POOL_MEMORY),
        (MemoryKind.MANAGED, Cause.MANAGED_MEMORY),
        (MemoryKind.HOST, Cause.HOST_MEMORY),
    ],
)
def test_memory_that_cannot_be_shared_is_refused_with_the_reason(
    host: HostBackend, kind: MemoryKind, cause: Cause
) -> None:
    """At start the engine gets the reason and the advice."""
    at = host.driver.allocate(PAGE_BYTES, kind)
    with pytest.raises(DeviceError) as caught:
        export_blocks(host.driver, {0: (BlockLayout(1, (LayoutRun(0, 0, 8, 8),)), [at])})
    assert caught.value.cause is cause
    host.close()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_named(host: HostBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If torch uses expandable segments, the error names the setting."""
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    at = host.driver.allocate(PAGE_BYTES, MemoryKind.VMM)
    with pytest.raises(DeviceError, match="expandable_segments:True") as caught:
        export_blocks(host.driver, {0: (BlockLayout(1, (LayoutRun(0, 0, 8, 8),)), [at])})
    assert caught.value.cause is Cause.EXPANDABLE_SEGMENTS
    host.close()


def test_a_tensor_beyond_its_allocation_is_refused(host: HostBackend) -> None:
    """A handle is for one allocation, so a tensor in two allocations cannot be exported."""
    at = host.driver.allocate(PAGE_BYTES)
    with pytest.raises(DeviceError) as caught:
        export_blocks(host.driver, {0: (BlockLayout(2, (LayoutRun(0, 0, PAGE_BYTES, 8),)), [at])})
    assert caught.value.cause is Cause.UNKNOWN_MEMORY
    host.close()


@pytest.mark.parametrize(
    ("exporter", "cause"),
    [
        (dataclasses.replace(ELSEWHERE, boot="another"), Cause.OTHER_HOST),
        (HERE, Cause.SAME_PROCESS),
        (dataclasses.replace(HERE, pid_namespace=1), Cause.SAME_PID),
        (ELSEWHERE, None),
        (dataclasses.replace(ELSEWHERE, pid_namespace=1, shm_device=1), None),
    ],
)
def test_certain_failures_are_known_in_advance(exporter: Origin, cause: Cause | None) -> None:
    """Another host, the same process and the same pid are refused without calling the driver."""
    found = obstacle(exporter, HERE)
    assert (found and found.cause) == cause


def test_failures_are_explained() -> None:
    """If the driver gives no reason, the facts of the exporter do."""
    failure = DeviceError(Cause.CANNOT_OPEN, "invalid argument")
    parent = dataclasses.replace(HERE, pid=os.getppid())
    unknown = dataclasses.replace(HERE, pid=2**22 + 1)
    assert likely_cause(failure, unknown, HERE).cause is Cause.EXPORTER_GONE
    assert likely_cause(failure, dataclasses.replace(unknown, pid_namespace=1), HERE).cause is Cause.OTHER_NAMESPACE
    assert likely_cause(failure, parent, HERE) is failure
    broken = DeviceError(Cause.BROKEN)
    assert likely_cause(broken, unknown, HERE) is broken


def test_a_zombie_is_gone() -> None:
    """A zombie process counts as ended."""
    child = subprocess.Popen(["sleep", "60"])
    origin = dataclasses.replace(HERE, pid=child.pid)
    assert not origin.is_gone(HERE)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert origin.is_gone(HERE)
    child.wait()
    assert origin.is_gone(HERE)


def test_events_need_a_common_shm() -> None:
    """Events need a common, known /dev/shm."""
    assert HERE.shares_events_with(ELSEWHERE)
    assert not HERE.shares_events_with(dataclasses.replace(ELSEWHERE, shm_device=1))
    unknown = dataclasses.replace(HERE, shm_device=0)
    assert not unknown.shares_events_with(unknown)


def test_every_cause_has_advice() -> None:
    """Every cause has advice in its message."""
    for cause in Cause:
        assert len(str(DeviceError(cause))) > 20
        assert str(DeviceError(cause, "in detail")).endswith("(in detail)")


def test_allocations_are_opened_once_and_closed_with_their_last_user(
    backend: Backend, start_engine: StartEngine
) -> None:
    """Two sessions share the mapping of one allocation; the last one closes it."""
    engine = start_engine(LAYOUTS["a tensor per layer, K and V joined"])
    handles = OpenHandles(backend.driver)
    first, second = handles.open(engine.export), handles.open(engine.export)
    assert first == second
    assert handles.allocations == 3
    handles.close(engine.export)
    size = engine.kv.tensors(0)[0].nbytes
    assert b"".join(backend.read(at, size) for at in first) == engine.expected(0)
    handles.close(engine.export)
    assert handles.allocations == 0


def test_a_dead_engines_memory_is_reported_as_such(backend: Backend, start_engine: StartEngine) -> None:
    """Opening memory of a dead process raises EXPORTER_GONE and leaves nothing open."""
    engine = start_engine(LAYOUTS["a tensor per layer, K and V joined"])
    engine.kill()
    handles = OpenHandles(backend.driver)
    with pytest.raises(DeviceError) as caught:
        handles.open(engine.export)
    assert caught.value.cause is Cause.EXPORTER_GONE
    assert handles.allocations == 0


def test_all_allocations_are_opened_or_none(backend: Backend, start_engine: StartEngine) -> None:
    """One bad handle leaves nothing open."""
    export = start_engine(LAYOUTS["a tensor per layer, K and V joined"]).export
    bad = (*export.allocations[:2], ExportedAllocation(bytes(HANDLE_BYTES), export.allocations[2].nbytes))
    handles = OpenHandles(backend.driver)
    with pytest.raises(DeviceError):
        handles.open(dataclasses.replace(export, allocations=bad))
    assert handles.allocations == 0


def test_claimed_sizes_are_checked(backend: Backend, start_engine: StartEngine) -> None:
    """A claimed size above the real one is refused: a copy beyond it would break the context."""
    export = start_engine(LAYOUTS["all layers of a block together"]).export
    (allocation,) = export.allocations
    larger = dataclasses.replace(export, allocations=(ExportedAllocation(allocation.handle, 1 << 40),))
    handles = OpenHandles(backend.driver)
    with pytest.raises(DeviceError) as caught:
        handles.open(larger)
    assert caught.value.cause is Cause.BAD_EXPORT
    assert handles.allocations == 0


def test_a_process_cannot_open_its_own_export(backend: Backend) -> None:
    """SAME_PROCESS instead of the driver's "invalid device context"."""
    at = backend.allocate(PAGE_BYTES)
    export = export_blocks(backend.driver, {0: (BlockLayout(2, (LayoutRun(0, 0, 64, 64),)), [at])})
    with pytest.raises(DeviceError) as caught:
        OpenHandles(backend.driver).open(export)
    assert caught.value.cause is Cause.SAME_PROCESS
    backend.free(at)
