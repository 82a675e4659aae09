"""Export of an engine's KV tensors: handles, layouts and origin, for another process to open.

The server sends the export of an engine to the copy worker as JSON. The export describes a tensor
as an offset in an allocation: a handle refers to a whole allocation, and a caching allocator puts
many tensors into one allocation. The export names the device by UUID, because ordinals differ
between processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Final

from .device_errors import Cause, DeviceError
from .driver_contract import HANDLE_BYTES, Allocation, Driver, EventId
from .layout import BlockLayout, LayoutRun

__all__ = ["DeviceExport", "ExportedAllocation", "Origin", "export_blocks", "likely_cause", "obstacle", "other_host"]


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = "/dev/shm"  # noqa: S108
_MAX_PIECES: Final = 1 << 16
"""Maximum number of pieces of one block. An export with more pieces is invalid, because the
planner's tables and the plans would become too large."""


@dataclass(frozen=True)
class Origin:
    """Host, pid and namespaces of a process: they decide which processes can open its memory."""

    boot: str
    pid: int
    pid_namespace: int
    shm_device: int

    @classmethod
    def here(cls) -> Origin:
        """The calling process. A field that cannot be read (no /proc) is empty or 0."""
        return cls(_boot(), os.getpid(), _number("/proc/self/ns/pid", "st_ino"), _number(_SHM, "st_dev"))

    def shares_events_with(self, other: Origin) -> bool:
        """Whether both processes have the same /dev/shm, which the driver uses to share events."""
        return self.boot == other.boot and self.shm_device == other.shm_device != 0

    def is_gone(self, observer: Origin) -> bool:
        """Whether the process is known to have ended; ``observer`` is the calling process."""
        if self.pid_namespace != observer.pid_namespace:
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        return state[0] in {"Z", "X"}


@dataclass(frozen=True)
class ExportedAllocation:
    handle: bytes
    nbytes: int


@dataclass(frozen=True)
class DeviceExport:
    """The blocks of one engine process on one device.

    ``layouts`` has the layout of each group; buffer i of a layout is ``allocations[i]``.
    ``events`` are handles of events that the engine records; copy requests name an event by its
    index in ``events``. Raises DeviceError (BAD_EXPORT) if blocks are outside of the allocations.
    """

    device: str
    origin: Origin
    allocations: tuple[ExportedAllocation, ...]
    layouts: Mapping[int, BlockLayout]
    events: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.layouts or any(len(handle) != HANDLE_BYTES for handle in self._handles()):
            raise DeviceError(Cause.BAD_EXPORT, f"there are no blocks, or a handle does not have {HANDLE_BYTES} bytes")
        for group, layout in self.layouts.items():
            if sum(run.pieces for run in layout.runs) > _MAX_PIECES:
                raise DeviceError(Cause.BAD_EXPORT, f"a block of group {group} has more than {_MAX_PIECES} pieces")
            for run in layout.runs:
                if (
                    run.buffer >= len(self.allocations)
                    or run.end(layout.num_blocks) > self.allocations[run.buffer].nbytes
                ):
                    raise DeviceError(Cause.BAD_EXPORT, f"blocks of group {group} are outside of the allocations")

    def _handles(self) -> list[bytes]:
        return [*(allocation.handle for allocation in self.allocations), *self.events]

    def to_bytes(self) -> bytes:
        fields = {
            "device": self.device,
            "origin": asdict(self.origin),
            "allocations": [[allocation.handle.hex(), allocation.nbytes] for allocation in self.allocations],
            "layouts": {
                group: [layout.num_blocks, [astuple(run) for run in layout.runs]]
                for group, layout in self.layouts.items()
            },
            "events": [handle.hex() for handle in self.events],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> DeviceExport:
        fields = json.loads(data)
        return cls(
            device=fields["device"],
            origin=Origin(**fields["origin"]),
            allocations=tuple(
                ExportedAllocation(bytes.fromhex(handle), size) for handle, size in fields["allocations"]
            ),
            layouts={
                int(group): BlockLayout(num_blocks, tuple(LayoutRun(*run) for run in runs))
                for group, (num_blocks, runs) in fields["layouts"].items()
            },
            events=tuple(bytes.fromhex(handle) for handle in fields["events"]),
        )


def export_blocks(
    driver: Driver,
    groups: Mapping[int, tuple[BlockLayout, Sequence[int]]],
    *,
    events: Sequence[EventId] = (),
) -> DeviceExport:
    """Exports an engine's blocks; ``groups`` has each group's layout and buffer addresses.

    Call it once, after the tensors are allocated and not during a graph capture. Raises DeviceError
    if the tensors cannot be shared.
    """
    allocations: dict[int, Allocation] = {}
    layouts = {}
    for group, (layout, addresses) in groups.items():
        found = [_exportable(driver, address, max(1, layout.end(buffer))) for buffer, address in enumerate(addresses)]
        allocations.update((allocation.base, allocation) for allocation in found)
        order = list(allocations)
        layouts[group] = layout.rebased(
            [
                (order.index(allocation.base), address - allocation.base)
                for allocation, address in zip(found, addresses, strict=True)
            ]
        )
    return DeviceExport(
        device=driver.device,
        origin=Origin.here(),
        allocations=tuple(
            ExportedAllocation(driver.export_memory(base), of.nbytes) for base, of in allocations.items()
        ),
        layouts=layouts,
        events=tuple(driver.export_event(event) for event in events),
    )


def _exportable(driver: Driver, address: int, nbytes: int) -> Allocation:
    allocation = driver.allocation_of(address)
    cause = allocation.kind.obstacle
    if cause is Cause.VMM_MEMORY and _expandable_segments():
        cause = Cause.EXPANDABLE_SEGMENTS
    if cause is not None:
        raise DeviceError(cause, f"{nbytes} bytes at {address:#x}")
    if address + nbytes > allocation.base + allocation.nbytes:
        raise DeviceError(Cause.UNKNOWN_MEMORY, f"{nbytes} bytes at {address:#x} reach beyond their allocation")
    return allocation


def _expandable_segments() -> bool:
    """Whether torch uses expandable segments. Torch reads both environment variables."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def other_host(exporter: Origin, opener: Origin) -> DeviceError | None:
    """The error if the two processes are on different hosts, else None."""
    if exporter.boot == opener.boot:
        return None
    detail = f"the exporter has boot id {exporter.boot or 'unknown'}, this host has {opener.boot or 'unknown'}"
    return DeviceError(Cause.OTHER_HOST, detail)


def obstacle(exporter: Origin, opener: Origin) -> DeviceError | None:
    """The error if opening is certain to fail, else None."""
    if (error := other_host(exporter, opener)) is not None:
        return error
    if exporter.pid == opener.pid:
        same = exporter.pid_namespace == opener.pid_namespace
        return DeviceError(Cause.SAME_PROCESS if same else Cause.SAME_PID, f"pid {exporter.pid}")
    return None


def likely_cause(error: DeviceError, exporter: Origin, opener: Origin) -> DeviceError:
    """Returns an error with a more specific cause than CANNOT_OPEN, if known, else ``error``."""
    if error.cause is not Cause.CANNOT_OPEN:
        return error
    if exporter.is_gone(opener):
        return DeviceError(Cause.EXPORTER_GONE, f"pid {exporter.pid}: {error.detail}")
    if exporter.pid_namespace != opener.pid_namespace:
        return DeviceError(Cause.OTHER_NAMESPACE, error.detail)
    return error


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _number(path: str, field: str) -> int:
    try:
        return int(getattr(Path(path).stat(), field))
    except OSError:
        return 0
