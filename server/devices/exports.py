"""An engine's description of its blocks, from how it travels to how `cuda` knows it. All of it is checked."""

from __future__ import annotations

from ...cuda.device.device_errors import Cause, DeviceError
from ...cuda.device.exports import DeviceExport, ExportedAllocation
from ...cuda.device.layout import BlockLayout, LayoutError, Run
from ...cuda.device.origin import Origin
from ...protos.v1 import devices_pb2, transfer_pb2

__all__ = ["export_of"]

_MOST = 1 << 63  # addresses and sizes beyond are not a device's
_MAX_NAME_LENGTH = 256
_MAX_HANDLES = 4096


def export_of(request: transfer_pb2.RegisterDeviceBuffersRequest) -> DeviceExport:
    """Returns what a session registers. Raises DeviceError (BAD_EXPORT)."""
    origin = request.origin
    if max(len(request.device_uuid), len(origin.boot_id)) > _MAX_NAME_LENGTH:
        raise DeviceError(Cause.BAD_EXPORT, f"names are {_MAX_NAME_LENGTH} characters long at most")
    if len(request.allocations) + len(request.event_handles) > _MAX_HANDLES:
        raise DeviceError(Cause.BAD_EXPORT, f"{_MAX_HANDLES} allocations and events are the most")
    if len({group.group_index for group in request.groups}) != len(request.groups):
        raise DeviceError(Cause.BAD_EXPORT, "a group is described twice")
    try:
        return DeviceExport(
            device=request.device_uuid,
            origin=Origin(origin.boot_id, origin.pid, origin.pid_namespace, origin.shm_device),
            allocations=tuple(ExportedAllocation(one.handle, one.size_bytes) for one in request.allocations),
            layouts={group.group_index: _layout_of(group) for group in request.groups},
            events=tuple(request.event_handles),
        )
    except LayoutError as error:
        raise DeviceError(Cause.BAD_EXPORT, str(error)) from error


def _layout_of(group: devices_pb2.DeviceGroup) -> BlockLayout:
    return BlockLayout(group.num_blocks, tuple(map(_run_of, group.runs)))


def _run_of(run: devices_pb2.DeviceRun) -> Run:
    sizes = (run.offset_bytes, run.block_stride_bytes, run.piece_bytes, run.piece_stride_bytes)
    if max(sizes) >= _MOST:
        raise LayoutError(f"sizes of a run go beyond a device: {sizes}")
    offset, block_stride, piece_bytes, piece_stride = sizes
    return Run(run.allocation_index, offset, block_stride, piece_bytes, run.pieces, piece_stride)
