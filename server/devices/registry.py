"""What sessions have registered of devices, and the copies between that and slots."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...cuda.device.device_errors import Cause, DeviceError, advice
from ...cuda.device.exports import DeviceExport, ExportedAllocation, Origin, other_host
from ...cuda.device.layout import BlockLayout, LayoutError, LayoutRun
from ...protos.v1 import devices_pb2, session_pb2, transfer_pb2
from ...tiers.core.stores import Store
from ...tiers.types import Session
from ..refused import Refused
from ..rpc.sessions import SessionRegistry
from ..rpc.writers import Writers
from ..runtime import TierRuntime
from ..telemetry.logs import get_logger
from .mover_client import CopyPlan, DeviceMover

__all__ = ["DeviceRegistry", "Registration", "export_of", "unavailable_reason"]


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


def _run_of(run: devices_pb2.DeviceRun) -> LayoutRun:
    sizes = (run.offset_bytes, run.block_stride_bytes, run.piece_bytes, run.piece_stride_bytes)
    if max(sizes) >= _MOST:
        raise LayoutError(f"sizes of a run go beyond a device: {sizes}")
    offset, block_stride, piece_bytes, piece_stride = sizes
    return LayoutRun(run.allocation_index, offset, block_stride, piece_bytes, run.pieces, piece_stride)


_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux; Windows' subsystem for it


def unavailable_reason(driver: str, devices: tuple[Path, ...] = _NVIDIA) -> str:
    """Returns why devices are not offered, as "cause: text"; empty where they are. ``driver`` is the setting."""
    if driver == "off":
        return "switched_off: the setting devices.driver is off"
    if driver != "auto":
        return ""
    if not any(path.exists() for path in devices):
        return f"{Cause.NO_DRIVER}: {advice(Cause.NO_DRIVER)}"
    try:
        metadata.distribution("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"{Cause.NO_BINDINGS}: {advice(Cause.NO_BINDINGS)}"
    return ""


_log = get_logger(__name__)


_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """Blocks of one session on one device, open in that device's mover."""

    id: int
    session_id: bytes
    mover: DeviceMover
    export: DeviceExport
    events: int
    """How many events can be named; 0 where the caller has to wait itself."""

    def num_blocks(self, group: int) -> int:
        """How many blocks of a group there are."""
        layout = self.export.layouts.get(group)
        return layout.num_blocks if layout is not None else 0


class DeviceRegistry:
    """Lives on the event loop. ``driver`` is the setting; ``unavailable`` is empty where devices are offered."""

    def __init__(
        self, runtime: TierRuntime, sessions: SessionRegistry, writers: Writers, *, driver: str, unavailable: str
    ) -> None:
        self.unavailable = unavailable
        self._runtime = runtime
        self._sessions = sessions
        self._writers = writers
        self._driver = driver
        self._movers: dict[str, DeviceMover] = {}
        self._registered: dict[int, Registration] = {}
        self._next_id = secrets.randbits(62)
        self._opening: dict[bytes, asyncio.Lock] = {}
        """By session: one registration at a time."""
        self._copies = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        sessions.on_close.append(self._session_closed)

    @property
    def capabilities(self) -> session_pb2.Devices:
        """What clients are told."""
        return session_pb2.Devices(offered=not self.unavailable, why_not=self.unavailable)

    async def register(self, session: Session, export: DeviceExport) -> Registration:
        """Opens a session's blocks, in place of what it had registered before; what is open already stays. Raises Refused.

        Goes on when the caller is cancelled: a device's first process may take longer than a call, and is there for the next.
        """
        if self.unavailable:
            raise Refused("DEVICE_UNAVAILABLE", self.unavailable)
        if (elsewhere := other_host(export.origin, Origin.here())) is not None:  # no process is started for that
            raise Refused("DEVICE_UNAVAILABLE", f"{elsewhere.cause}: {elsewhere}")
        self._check_parts(session, export)
        registration: Registration = await self._to_its_end(self._register(session, export))
        return registration

    async def _register(self, session: Session, export: DeviceExport) -> Registration:
        self._sessions.check(session)
        async with self._opening.setdefault(session.id, asyncio.Lock()):
            earlier = self._of_session(session.id)
            for one in earlier:
                if one.export == export:
                    return one
            mover = self._mover_of(export.device)
            number = self._next_id = self._next_id + 1
            has_events = await mover.open(number, export)
            registration = Registration(number, session.id, mover, export, len(export.events) if has_events else 0)
            self._registered[number] = registration
            for one in earlier:
                self._drop(one)
            try:
                self._sessions.check(session)
            except Refused:
                self._drop(registration)
                raise
            return registration

    def get(self, session: Session, number: int) -> Registration:
        """Returns a registration of this session, or raises Refused."""
        registration = self._registered.get(number)
        if registration is None:
            raise Refused("DEVICE_LOST", f"there is no registration {number}: register again")
        if registration.session_id != session.id:
            raise Refused("NOT_OWNER", f"registration {number} belongs to another session")
        return registration

    async def unregister(self, registration: Registration) -> None:
        """Closes blocks; returns when they are."""
        del self._registered[registration.id]
        await self._to_its_end(registration.mover.close(registration.id))

    async def copy(self, registration: Registration, plan: CopyPlan, store: Store | None) -> None:
        """Carries out a plan, which fills slots of ``store`` if there is one. Raises Refused.

        The copy goes on to its end when the caller is cancelled; only nothing more is begun then.
        """
        number = next(self._copies)
        writing = ExitStack()
        if (
            store is not None
        ):  # now, not when the task comes to it: the store may have ended by then, and its slots be others'
            writing.enter_context(self._writers.writing(store))

        async def carry_out() -> None:
            with writing:
                await registration.mover.copy(registration.id, number, plan)

        try:
            await self._to_its_end(carry_out())
        except asyncio.CancelledError:
            registration.mover.call_off(registration.id, number)
            raise

    async def close(self) -> None:
        """Ends the movers."""
        await asyncio.gather(*(mover.stop() for mover in self._movers.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _mover_of(self, device: str) -> DeviceMover:
        mover = self._movers.get(device)
        if mover is None:
            if len(self._movers) >= _MAX_DEVICES:
                self._make_room()
            mover = DeviceMover(device, self._driver, self._runtime.region, lambda: self._forget(device))
            self._movers[device] = mover
        return mover

    def _make_room(self) -> None:
        """Forgets a device that has no process, the one asked for first: none that is not there keeps a place. Raises Refused."""
        idle = next((device for device, mover in self._movers.items() if mover.idle), None)
        if idle is None:
            raise Refused("DEVICE_UNAVAILABLE", f"too_many: {_MAX_DEVICES} devices have a process")
        del self._movers[idle]

    def _check_parts(self, session: Session, export: DeviceExport) -> None:
        """What a block has on the device must be what it has in its slot."""
        parts = session.namespace.part_bytes
        for group, layout in export.layouts.items():
            if group >= len(parts):
                raise Refused("INVALID_ARGUMENT", f"group {group} is none of the namespace's {len(parts)}")
            if layout.part_bytes != parts[group]:
                message = f"a block of group {group} has {layout.part_bytes} bytes, in the namespace {parts[group]}"
                raise Refused("INVALID_ARGUMENT", message)

    def _of_session(self, session_id: bytes) -> list[Registration]:
        return [one for one in self._registered.values() if one.session_id == session_id]

    def _session_closed(self, session_id: bytes) -> None:
        self._opening.pop(session_id, None)
        for registration in self._of_session(session_id):
            self._drop(registration)

    def _drop(self, registration: Registration) -> None:
        if self._registered.pop(registration.id, None) is None:
            return  # its mover has ended meanwhile
        _ = self._spawn(registration.mover.close(registration.id))

    def _forget(self, device: str) -> None:
        """The mover of a device has ended."""
        for number, registration in list(self._registered.items()):
            if registration.mover.device == device:
                del self._registered[number]

    async def _to_its_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refused):
            _log.error("a copy of a device failed", exc_info=error)
