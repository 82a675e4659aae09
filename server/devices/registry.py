"""Registry of the sessions' device memory. Starts copies between this memory and the slots."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...cuda.device.device_errors import Cause, DeviceError
from ...cuda.device.exports import DeviceExport, ExportedAllocation, Origin, other_host
from ...cuda.device.layout import BlockLayout, LayoutError, LayoutRun
from ...protos.v1 import devices_pb2, session_pb2, transfer_pb2
from ...tiers.types import EngineSession
from ..core_runtime import TierRuntime
from ..random_ids import random_ids
from ..refused import Refused
from ..rpc.sessions import SessionRegistry
from ..telemetry.logs import get_logger
from .copy_worker_client import CopyPlan, CopyWorkerClient

__all__ = ["DeviceRegistry", "Registration", "export_of", "has_gpu", "unavailable_reason"]

_log = get_logger(__name__)

_DEVICE_LIMIT = 1 << 63  # exclusive limit of addresses and sizes
_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux; Windows Subsystem for Linux
_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """Blocks of one session on one device, opened by the device's copy worker."""

    id: int
    session_id: bytes
    tenant: str
    worker: CopyWorkerClient
    export: DeviceExport
    events: int
    """Number of shared events. With 0, the engine must wait for its compute before a store."""

    def num_blocks(self, group: int) -> int:
        layout = self.export.layouts.get(group)
        return layout.num_blocks if layout is not None else 0


class DeviceRegistry:
    """Registry of device memory. All calls must come from the event loop.

    ``unavailable`` says why the server offers no device copies; "" if it offers them.
    """

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, *, driver: str, unavailable: str) -> None:
        self.unavailable = unavailable
        self._runtime = runtime
        self._sessions = sessions
        self._driver = driver
        self._workers: dict[str, CopyWorkerClient] = {}
        self._registered: dict[int, Registration] = {}
        self._new_ids = random_ids()
        self._opening: dict[bytes, asyncio.Lock] = {}
        """By session id: a lock that is held during a registration."""
        self._copies = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        sessions.on_close.append(self._session_closed)

    @property
    def capabilities(self) -> session_pb2.Devices:
        return session_pb2.Devices(offered=not self.unavailable, why_not=self.unavailable)

    async def register(self, session: EngineSession, export: DeviceExport) -> Registration:
        """Opens a session's blocks and closes the session's earlier registrations. Raises Refused.

        If the session has an identical registration, returns that one. If the call is cancelled,
        the work continues, and the client's next call uses the result. This is needed because the
        start of a device's first copy worker can take longer than a call.
        """
        if self.unavailable:
            raise Refused("DEVICE_UNAVAILABLE", self.unavailable)
        # Checked before a process is started for the device.
        if (host_error := other_host(export.origin, Origin.here())) is not None:
            raise Refused("DEVICE_UNAVAILABLE", f"{host_error.cause}: {host_error}")
        self._check_parts(session, export)
        registration: Registration = await self._shielded(self._register(session, export))
        return registration

    async def _register(self, session: EngineSession, export: DeviceExport) -> Registration:
        self._sessions.check(session)
        async with self._opening.setdefault(session.id, asyncio.Lock()):
            earlier = self._of_session(session.id)
            for one in earlier:
                if one.export == export:
                    return one
            worker = self._get_worker(export.device)
            number = next(new_id for new_id in self._new_ids if new_id not in self._registered)
            has_events = await worker.open(number, export)
            registration = Registration(
                number, session.id, session.tenant, worker, export, len(export.events) if has_events else 0
            )
            self._registered[number] = registration
            for one in earlier:
                self._drop(one)
            try:
                self._sessions.check(session)
            except Refused:
                self._drop(registration)
                raise
            return registration

    def get(self, session: EngineSession, number: int) -> Registration:
        registration = self._registered.get(number)
        if registration is None or registration.tenant != session.tenant:
            raise Refused("DEVICE_LOST", f"there is no registration {number}: register again")
        if registration.session_id != session.id:
            raise Refused("NOT_OWNER", f"registration {number} belongs to another session")
        return registration

    async def unregister(self, registration: Registration) -> None:
        del self._registered[registration.id]
        await self._shielded(registration.worker.close(registration.id))

    async def copy(self, registration: Registration, plan: CopyPlan, access: AbstractContextManager[None]) -> None:
        """Executes a plan. ``access``: context in which the copy may access slots. Raises Refused.

        If the call is cancelled, batches that have started still run to their end.
        """
        number = next(self._copies)
        held = ExitStack()
        # The copy accesses the slots before its task starts. Otherwise the store or lease could end
        # first, and the server could reuse the slots.
        held.enter_context(access)

        async def carry_out() -> None:
            with held:
                await registration.worker.copy(registration.id, number, plan)

        try:
            await self._shielded(carry_out())
        except asyncio.CancelledError:
            registration.worker.cancel(registration.id, number)
            raise

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _get_worker(self, device: str) -> CopyWorkerClient:
        worker = self._workers.get(device)
        if worker is None:
            if len(self._workers) >= _MAX_DEVICES:
                self._make_room()
            worker = CopyWorkerClient(device, self._driver, self._runtime.region, lambda: self._forget(device))
            self._workers[device] = worker
        return worker

    def _make_room(self) -> None:
        """Drops the client of a device without a process. Raises Refused if all have a process."""
        idle = next((device for device, worker in self._workers.items() if worker.idle), None)
        if idle is None:
            raise Refused("DEVICE_UNAVAILABLE", f"too_many: {_MAX_DEVICES} devices have a process")
        del self._workers[idle]

    def _check_parts(self, session: EngineSession, export: DeviceExport) -> None:
        """Raises Refused if blocks have different sizes on the device and in their slots."""
        parts = session.namespace.part_bytes
        for group, layout in export.layouts.items():
            if group >= len(parts):
                raise Refused("INVALID_ARGUMENT", f"there is no group {group}: the namespace has {len(parts)} groups")
            if layout.part_bytes != parts[group]:
                message = f"a block of group {group} has {layout.part_bytes} bytes, but {parts[group]} in the namespace"
                raise Refused("INVALID_ARGUMENT", message)

    def _of_session(self, session_id: bytes) -> list[Registration]:
        return [one for one in self._registered.values() if one.session_id == session_id]

    def _session_closed(self, session_id: bytes) -> None:
        self._opening.pop(session_id, None)
        for registration in self._of_session(session_id):
            self._drop(registration)

    def _drop(self, registration: Registration) -> None:
        if self._registered.pop(registration.id, None) is None:
            return  # its worker has ended
        _ = self._spawn(registration.worker.close(registration.id))

    def _forget(self, device: str) -> None:
        for number, registration in list(self._registered.items()):
            if registration.worker.device == device:
                del self._registered[number]

    async def _shielded(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refused):
            _log.error("unexpected error in work on a device", exc_info=error)


def export_of(request: transfer_pb2.RegisterDeviceBuffersRequest) -> DeviceExport:
    """Validates and converts a registration. Raises DeviceError (BAD_EXPORT)."""
    origin = request.origin
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


def _run_of(run: devices_pb2.DeviceRun) -> LayoutRun:
    sizes = (run.offset_bytes, run.block_stride_bytes, run.piece_bytes, run.piece_stride_bytes)
    if max(sizes) >= _DEVICE_LIMIT:
        raise LayoutError(f"offset or size of a run is too large: {sizes}")
    offset, block_stride, piece_bytes, piece_stride = sizes
    return LayoutRun(run.allocation_index, offset, block_stride, piece_bytes, run.pieces, piece_stride)


def has_gpu(devices: tuple[Path, ...] = _NVIDIA) -> bool:
    return any(path.exists() for path in devices)


def unavailable_reason(driver: str, devices: tuple[Path, ...] = _NVIDIA) -> str:
    """Returns why the server offers no device copies, as "cause: text"; "" if it offers them."""
    if driver == "off":
        return 'switched_off: the setting devices.driver is "off"'
    if driver != "auto":
        return ""
    if not has_gpu(devices):
        return f"{Cause.NO_DRIVER}: {DeviceError(Cause.NO_DRIVER)}"
    try:
        metadata.distribution("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"{Cause.NO_BINDINGS}: {DeviceError(Cause.NO_BINDINGS)}"
    return ""
