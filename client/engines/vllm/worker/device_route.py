"""Copies by the server: a copy worker of the server copies between a GPU's KV tensors and slots.

This route needs CUDA IPC, a server with device support, and a running copy worker. If one of these
is missing, the engine's worker copies the blocks itself. No GPU has run this code yet, see
docs/decisions/0013-cuda-ipc.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .....cuda.device.cuda_driver import CudaDriver
from .....cuda.device.device_errors import DeviceError
from .....cuda.device.driver_contract import Driver, StreamId
from .....cuda.device.layout import BlockLayout, LayoutError, LayoutRun
from .... import Client, DeviceUnavailable, InvalidRequest, KvBuffers, KVTierError, Mark
from ..background import RateLimitedLog
from ..layout import GroupLayout

__all__ = ["DeviceRoute", "RouteOf", "StepMark", "cuda_route", "describe_layout"]

RouteOf = Callable[[Sequence[GroupLayout], torch.device, RateLimitedLog], "DeviceRoute | None"]


class StepMark:
    """Marks after which a step's jobs may access their blocks (B4.4).

    ``compute``: for copies by the worker. ``mark``: for copies by the server, or None if the worker
    makes all copies.
    """

    def __init__(self, compute: Any, mark: Mark | None, jobs: int) -> None:
        self.compute = compute
        self.mark = mark
        self._jobs = jobs
        self._lock = threading.Lock()

    def job_ended(self) -> None:
        """Called when a job ends. At the end of the last job, releases the server's event."""
        with self._lock:
            self._jobs -= 1
            over = not self._jobs
        if over and self.mark is not None:
            self.mark.release()


class DeviceRoute:
    """Route on which the server copies the blocks of one worker.

    `mark` is called on the worker's main thread, other methods on background threads.
    The constructor raises DeviceUnavailable if the memory cannot be shared.
    """

    def __init__(
        self, driver: Driver, layouts: Sequence[GroupLayout], stream: Callable[[], StreamId], log: RateLimitedLog
    ) -> None:
        groups = {layout.group.index: describe_layout(layout) for layout in layouts}
        self._buffers = KvBuffers(driver, groups)
        self._stream = stream
        self._log = log
        self._client: Client | None = None

    def register(self, client: Client) -> None:
        """Shares the KV buffers with the client's server, which may take seconds."""
        try:
            client.register_kv_buffers(self._buffers)
        except (DeviceUnavailable, InvalidRequest) as error:
            self._log.warn("device", f"the engine copies its KV blocks itself, because the server refused: {error}")
            return
        except KVTierError as error:
            # No server is connected yet. The client registers the blocks when it connects.
            self._log.warn("device", f"the engine copies its KV blocks itself until a server is connected: {error}")
        self._client = client

    def mark(self) -> Mark | None:
        """Marks the compute submitted so far. Returns None if the worker makes the copies."""
        if self._client is None:
            return None
        try:
            return self._buffers.mark(self._stream())
        except DeviceUnavailable as error:
            self._log.warn("device", f"the engine copies the blocks of a step itself, because marking failed: {error}")
            return None

    def store(
        self, client: Client, keys: Sequence[bytes], blocks: Sequence[int], after: StepMark, request_id: str
    ) -> bytes | None:
        """Returns a `StoreStatus` per key, or None if the worker must copy the blocks."""
        if client is not self._client or after.mark is None:
            return None
        try:
            return client.store_from_device(keys, blocks, after=after.mark, request_id=request_id)
        except DeviceUnavailable as error:
            self._log.warn("device", f"the server could not save blocks, so the engine copies them: {error}")
            return None

    def load(self, client: Client, lease_id: int, items: Sequence[int], blocks: Sequence[int], after: StepMark) -> bool:
        """Returns whether the server filled the blocks. If False, the worker must fill them."""
        if client is not self._client or after.mark is None:
            return False
        try:
            client.read_to_device(lease_id, items, blocks, after=after.mark)
        except DeviceUnavailable as error:
            self._log.warn("device", f"the server could not load blocks, so the engine copies them: {error}")
            return False
        return True

    def close(self) -> None:
        """Releases the events. No job may use the route afterwards."""
        self._client = None
        self._buffers.close()


def cuda_route(layouts: Sequence[GroupLayout], device: torch.device, limited_log: RateLimitedLog) -> DeviceRoute | None:
    """Returns the route for tensors on a GPU, or None (logged) if they cannot be shared."""
    if device.type != "cuda":
        return None
    try:
        driver = CudaDriver(device.index or 0)
        return DeviceRoute(
            driver, layouts, lambda: StreamId(torch.cuda.current_stream(device).cuda_stream), limited_log
        )
    except (DeviceError, DeviceUnavailable, LayoutError) as error:
        limited_log.warn(
            "device", f"the engine copies its KV blocks itself, because the server cannot use them: {error}"
        )
        return None


def describe_layout(layout: GroupLayout) -> tuple[BlockLayout, list[int]]:
    """Returns a run and a buffer per segment, and the buffers' addresses. Raises LayoutError."""
    runs = []
    for buffer, segment in enumerate(layout.segments):
        block_stride, layer_stride, _ = segment.pages.stride()
        _, layers, page_bytes = segment.pages.shape
        runs.append(LayoutRun(buffer, 0, block_stride, page_bytes, layers, layer_stride if layers > 1 else 0))
    addresses = [segment.pages.data_ptr() for segment in layout.segments]
    return BlockLayout(layout.segments[0].pages.shape[0], tuple(runs)), addresses
