"""One device's mover, as the server sees it: started when it is needed, and again after its end; asked, and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...cuda.device.exports import DeviceExport
from ...cuda.host.region import HostRegion
from ..process.child import Child, RestartBackoff
from ..refused import Refused
from ..telemetry.logs import get_logger
from .plan_codec import Groups, pack_plan

__all__ = ["CopyPlan", "DeviceMover"]

_log = get_logger(__name__)

_START_SECONDS = 60.0
_PATIENCE_SECONDS = 1.0
"""How long a registration waits for a mover that is about to be started again."""
_OVERDUE_SECONDS = 30.0
"""How much longer than it may a copy takes before its mover is taken to hang, and killed."""
_HANDLES_SECONDS = 60.0
"""The same for opening an engine's memory and for closing it: one that hangs holds up everybody's on that device."""
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class CopyPlan:
    """What is to be copied: per group blocks, and the slots' offsets in the region; ``out`` of the device, or into it.

    At ``give_up_at`` (nanoseconds of the host's monotonic clock) the last of it is begun.
    """

    out: bool
    groups: Groups
    nbytes: int
    after_event: int | None
    give_up_at: int


class DeviceMover:
    """See the module. Lives on the event loop.

    ``ended`` is called when the process has ended: whatever was open there is not any more.
    """

    def __init__(self, device: str, driver: str, region: HostRegion, ended: Callable[[], None]) -> None:
        self.device = device
        self._driver = driver
        self._region = region
        self._tell_end = ended
        self._backoff = RestartBackoff()
        self._starting = asyncio.Lock()
        self._process: Child | None = None
        self._child: Child | None = None  # once it is ready
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._answers: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._trouble = "DEVICE_LOST"
        self._asked_to_run = 0

    @property
    def idle(self) -> bool:
        """Whether there is no process, not any more, and nobody waits for one."""
        return self._child is None and not self._asked_to_run and (self._watch is None or self._watch.done())

    async def open(self, number: int, export: DeviceExport) -> bool:
        """Opens an engine's blocks; returns whether its events can be waited for. Raises Refused."""
        child = await self._running()
        asking = self._ask(child, ("opened", number), {"op": "open", "buffers": number}, export.to_bytes())
        answer = await self._answered(child, asking, _HANDLES_SECONDS, "opening an engine's memory")
        if "cause" in answer:
            child.send({"op": "close", "buffers": number})  # nobody waits for that
            raise Refused("DEVICE_UNAVAILABLE", f"{answer['cause']}: {answer['message']}")
        return bool(answer["events"])

    async def copy(self, buffers: int, number: int, plan: CopyPlan) -> None:
        """Returns when everything is copied. When it returns or raises, nothing is going on any more. Raises Refused."""
        child = self._alive()
        groups, payload = pack_plan(plan.groups)
        header = {
            "op": "copy",
            "buffers": buffers,
            "copy": number,
            "out": plan.out,
            "after": plan.after_event,
            "give_up_at": plan.give_up_at,
            "groups": groups,
        }
        asking = self._ask(child, ("done", number), header, payload)
        answer = await self._answered(child, asking, _overdue(plan), "a copy")
        if "cause" in answer:
            raise Refused("DEVICE_LOST", f"{answer['cause']}: {answer['message']}")

    def call_off(self, buffers: int, number: int) -> None:
        """Has a copy begin nothing more."""
        if self._child is not None:
            self._child.send({"op": "call_off", "buffers": buffers, "copy": number})

    async def close(self, number: int) -> None:
        """Closes an engine's blocks; returns when nothing is copied from or to them and they are closed."""
        child = self._child
        if child is not None:
            asking = self._ask(child, ("closed", number), {"op": "close", "buffers": number})
            with contextlib.suppress(Refused):  # the process has ended: so they are
                await self._answered(child, asking, _HANDLES_SECONDS, "closing an engine's memory")

    async def stop(self) -> None:
        """Ends the process, at once if nothing is under way."""
        self._child = None
        if self._process is not None:
            await self._process.close(_CLOSE_SECONDS)
        if self._watch is not None:
            await self._watch

    def _alive(self) -> Child:
        if self._child is None:
            raise Refused("DEVICE_LOST", "the process that moves the device's bytes has ended: register again")
        return self._child

    async def _running(self) -> Child:
        self._asked_to_run += 1
        try:
            async with self._starting:
                if self._child is None:
                    await self._start()
                return self._alive()
        finally:
            self._asked_to_run -= 1

    async def _start(self) -> None:
        pause = self._backoff.remaining()
        if pause > _PATIENCE_SECONDS:
            raise Refused(
                "DEVICE_UNAVAILABLE", f"the device's mover is started again in {pause:.0f} s: {self._trouble}"
            )
        await asyncio.sleep(pause)
        arguments = [str(self._region.fd), str(self._region.size_bytes), self._driver, self.device]
        try:
            child = self._process = await Child.start("kvtier.server.devices.mover", arguments, [self._region.fd])
        except OSError as error:
            raise Refused("DEVICE_UNAVAILABLE", f"the device's mover cannot be started: {error}") from error
        self._ready = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._attend(child))
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), _START_SECONDS)
        except (Refused, TimeoutError) as error:
            child.kill()
            await self._watch  # until it is gone: the next one has nothing to do with it
            raise (
                error
                if isinstance(error, Refused)
                else Refused("DEVICE_UNAVAILABLE", "the device's mover does not come up")
            ) from error

    async def _attend(self, child: Child) -> None:
        """Takes what a child sends, until it has ended."""
        started = time.monotonic()
        async for header, _ in child.messages():
            try:
                self._take(header)
            except (KeyError, asyncio.InvalidStateError) as error:
                _log.error("a device's mover says what makes no sense", device=self.device, exc_info=error)
                child.kill()
        await child.close(_CLOSE_SECONDS)
        code = await child.ended()
        if self._child is child:
            self._child = None
            _log.error("a device's mover has ended", device=self.device, pid=child.pid, exit_code=code)
        self._backoff.ended(time.monotonic() - started)
        self._tell_end()
        lost = Refused("DEVICE_LOST", "the process that moves the device's bytes has ended: register again")
        for future in (*self._answers.values(), *([self._ready] if self._ready is not None else ())):
            if not future.done():
                future.set_exception(Refused(lost.reason, str(lost)))
        self._answers.clear()

    def _take(self, header: dict[str, Any]) -> None:
        match header["op"]:
            case "ready" if self._ready is not None:
                self._child = self._process
                self._ready.set_result(None)
            case "failed" if self._ready is not None:
                self._trouble = f"{header['cause']}: {header['message']}"
                self._ready.set_exception(Refused("DEVICE_UNAVAILABLE", self._trouble))
            case "done":
                self._answer(("done", header["copy"]), header)
            case other:
                self._answer((other, header["buffers"]), header)

    def _answer(self, key: tuple[str, int], header: dict[str, Any]) -> None:
        future = self._answers.pop(key, None)
        if future is not None and not future.done():
            future.set_result(header)

    def _ask(
        self, child: Child, key: tuple[str, int], header: dict[str, Any], payload: bytes = b""
    ) -> asyncio.Future[dict[str, Any]]:
        """Sends a message; returns what its answer will be, or Refused if the process ends before.

        No coroutine: between the moment that somebody sees a child alive and this one nothing else may happen on the loop.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        child.send(header, payload)
        return future

    async def _answered(
        self, child: Child, asking: asyncio.Future[dict[str, Any]], seconds: float, work: str
    ) -> dict[str, Any]:
        """Returns the answer. A mover that has none after ``seconds`` is killed, and when it is gone this raises Refused."""
        done, _ = await asyncio.wait([asking], timeout=seconds)
        if not done:
            _log.error("a device's mover does not come back and is killed", device=self.device, work=work)
            child.kill()
        return await asking


def _overdue(plan: CopyPlan) -> float:
    """In how many seconds a copy is overdue."""
    return max(0.0, (plan.give_up_at - time.monotonic_ns()) / 1e9) + _OVERDUE_SECONDS
