"""Client of a device's copy worker: starts the process on demand and sends copies to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...cuda.device.exports import DeviceExport
from ...cuda.host.region import HostRegion
from ...protos.backoff import Backoff
from ..process.child import Child
from ..refused import Refused
from ..telemetry.logs import get_logger
from .plan_codec import Groups, pack_plan

__all__ = ["CopyPlan", "CopyWorkerClient"]

_log = get_logger(__name__)

_START_SECONDS = 60.0
_GOOD_SECONDS = 60.0
"""After such a run, the next start has the first delay again."""
_PATIENCE_SECONDS = 1.0
"""Maximum time that a registration waits for the restart of a copy worker."""
_OVERDUE_SECONDS = 30.0
"""If a copy has not ended this long after its deadline, the worker counts as hung and is killed."""
_HANDLES_SECONDS = 60.0
"""Maximum time for opening or closing memory. After this time the worker is killed."""
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class CopyPlan:
    """Blocks by group, and the offsets of their slots in the region.

    ``out`` means from the device to the slots. No copy begins after ``deadline``, in nanoseconds
    of the host's monotonic clock.
    """

    out: bool
    groups: Groups
    nbytes: int
    after_event: int | None
    deadline: int


class CopyWorkerClient:
    """Calls ``ended`` after the process has ended. All calls must come from the event loop."""

    def __init__(self, device: str, driver: str, region: HostRegion, ended: Callable[[], None]) -> None:
        self.device = device
        self._driver = driver
        self._region = region
        self._on_ended = ended
        self._backoff = Backoff(0.1, 30.0)
        self._starting = asyncio.Lock()
        self._process: Child | None = None
        self._child: Child | None = None  # set when the process is ready
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._answers: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._last_error = "DEVICE_LOST"
        self._start_waiters = 0

    @property
    def idle(self) -> bool:
        """Whether there is no process and no caller waits for one."""
        return self._child is None and not self._start_waiters and (self._watch is None or self._watch.done())

    async def open(self, number: int, export: DeviceExport) -> bool:
        """Opens blocks; returns whether copies can wait for the engine's events. Raises Refused."""
        child = await self._ensure_running()
        header = {"op": "open", "buffers": number}
        answer = await self._request(child, ("opened", number), header, export.to_bytes(), seconds=_HANDLES_SECONDS)
        if "cause" in answer:
            child.send({"op": "close", "buffers": number})  # without waiting for the answer
            raise Refused("DEVICE_UNAVAILABLE", f"{answer['cause']}: {answer['message']}")
        return bool(answer["events"])

    async def copy(self, buffers: int, number: int, plan: CopyPlan) -> None:
        """Executes a plan. After the call no copy accesses the plan's memory. Raises Refused."""
        child = self._running_child()
        groups, payload = pack_plan(plan.groups)
        header = {
            "op": "copy",
            "buffers": buffers,
            "copy": number,
            "out": plan.out,
            "after": plan.after_event,
            "deadline": plan.deadline,
            "groups": groups,
        }
        seconds = max(0.0, (plan.deadline - time.monotonic_ns()) / 1e9) + _OVERDUE_SECONDS
        answer = await self._request(child, ("done", number), header, payload, seconds=seconds)
        if "cause" in answer:
            raise Refused("DEVICE_LOST", f"{answer['cause']}: {answer['message']}")

    def cancel(self, buffers: int, number: int) -> None:
        """Cancels a copy: the worker starts no more batches of this copy."""
        if self._child is not None:
            self._child.send({"op": "cancel", "buffers": buffers, "copy": number})

    async def close(self, number: int) -> None:
        """Closes an engine's blocks. Returns when no copy uses the blocks any more."""
        child = self._child
        if child is not None:
            header = {"op": "close", "buffers": number}
            with contextlib.suppress(Refused):  # the process has ended, which closes the blocks
                await self._request(child, ("closed", number), header, seconds=_HANDLES_SECONDS)

    async def stop(self) -> None:
        self._child = None
        if self._process is not None:
            await self._process.close(_CLOSE_SECONDS)
        if self._watch is not None:
            await self._watch

    def _running_child(self) -> Child:
        if self._child is None:
            raise Refused("DEVICE_LOST", "the device copy worker has ended: register again")
        return self._child

    async def _ensure_running(self) -> Child:
        self._start_waiters += 1
        try:
            async with self._starting:
                if self._child is None:
                    await self._start()
                return self._running_child()
        finally:
            self._start_waiters -= 1

    async def _start(self) -> None:
        pause = self._backoff.remaining(time.monotonic())
        if pause > _PATIENCE_SECONDS:
            raise Refused(
                "DEVICE_UNAVAILABLE", f"the device copy worker is restarted in {pause:.0f} s: {self._last_error}"
            )
        await asyncio.sleep(pause)
        pools, inherited = self._region.for_child
        arguments = [pools, str(self._region.size_bytes), self._driver, self.device]
        try:
            child = self._process = await Child.start("kvtier.server.devices.copy_worker", arguments, inherited)
        except OSError as error:
            raise Refused("DEVICE_UNAVAILABLE", f"the device copy worker cannot be started: {error}") from error
        self._ready = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._read_messages(child))
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), _START_SECONDS)
        except (Refused, TimeoutError) as error:
            child.kill()
            await self._watch  # returns when the process has ended
            raise (
                error
                if isinstance(error, Refused)
                else Refused("DEVICE_UNAVAILABLE", "the device copy worker does not start in time")
            ) from error

    async def _read_messages(self, child: Child) -> None:
        started = time.monotonic()
        async for header, _ in child.messages():
            try:
                self._handle(header)
            except (KeyError, asyncio.InvalidStateError) as error:
                _log.error("invalid message of a device copy worker", device=self.device, exc_info=error)
                child.kill()
        await child.close(_CLOSE_SECONDS)
        code = await child.ended()
        if self._child is child:
            self._child = None
            _log.error("device copy worker has ended", device=self.device, pid=child.pid, exit_code=code)
        now = time.monotonic()
        self._backoff.ended(now, was_good=now - started >= _GOOD_SECONDS)
        self._on_ended()
        lost = Refused("DEVICE_LOST", "the device copy worker has ended: register again")
        for future in (*self._answers.values(), *([self._ready] if self._ready is not None else ())):
            if not future.done():
                future.set_exception(Refused(lost.reason, str(lost)))
        self._answers.clear()

    def _handle(self, header: dict[str, Any]) -> None:
        match header["op"]:
            case "ready" if self._ready is not None:
                self._child = self._process
                self._ready.set_result(None)
            case "failed" if self._ready is not None:
                self._last_error = f"{header['cause']}: {header['message']}"
                self._ready.set_exception(Refused("DEVICE_UNAVAILABLE", self._last_error))
            case "done":
                self._answer(("done", header["copy"]), header)
            case other:
                self._answer((other, header["buffers"]), header)

    def _answer(self, key: tuple[str, int], header: dict[str, Any]) -> None:
        future = self._answers.pop(key, None)
        if future is not None and not future.done():
            future.set_result(header)

    async def _request(
        self, child: Child, key: tuple[str, int], header: dict[str, Any], payload: bytes = b"", *, seconds: float
    ) -> dict[str, Any]:
        """Sends a message at once (before any other task runs), then waits for the answer.

        Kills the worker if it has no answer after ``seconds``. Raises Refused if the process ends.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        child.send(header, payload)
        done, _ = await asyncio.wait([answer], timeout=seconds)
        if not done:
            _log.error("device copy worker hangs and is killed", device=self.device, operation=header["op"])
            child.kill()
        return await answer
