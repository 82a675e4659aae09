"""Copy worker: child process that copies between the blocks of one device and the region.

The server tells the copy worker where an engine's memory is and which blocks to copy to which
slots. The copy worker knows neither keys nor sessions. If the device's context is lost, the copy
worker exits. The exit ends all work of this process on the device. The next registration starts a
new process, which gets a new context.

Messages from the server: `open`, `copy`, `cancel`, `close`. Messages to the server: first `ready`
or `failed`, then `opened`, `done`, `closed`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ...cuda.device.copies import CopyDirection, EngineBlocks
from ...cuda.device.cuda_driver import CudaDriver
from ...cuda.device.device_errors import Cause, CopyCancelled, DeviceError
from ...cuda.device.driver_contract import Driver
from ...cuda.device.exports import DeviceExport
from ...cuda.device.handles import OpenHandles
from ...cuda.device.layout import LayoutError
from ...cuda.host.pinning import Pinning
from ...cuda.host.region import HostRegion, RegionError
from ...cuda.host.warmup import warm_up
from ..process.child_main import Channel, connect
from .plan_codec import unpack_plan

__all__ = ["EXIT_BROKEN", "main"]

_log = logging.getLogger(__name__)

EXIT_BROKEN: Final = 70
"""Exit code after the device's context is lost."""


class _Engine:
    """One registration: the opened blocks of an engine, and a thread per direction."""

    def __init__(self, number: int) -> None:
        self.blocks: EngineBlocks | None = None
        self.cancelled: set[int] = set()
        names = {out: f"kvtier-{'out' if out else 'in'}-{number}" for out in (True, False)}
        self.threads = {out: ThreadPoolExecutor(1, thread_name_prefix=name) for out, name in names.items()}


class CopyWorker:
    def __init__(self, channel: Channel, driver: Driver, region: HostRegion) -> None:
        self._channel = channel
        self._driver = driver
        self._region = region
        self._handles = OpenHandles(driver)
        self._engines: dict[int, _Engine] = {}

    def serve(self) -> None:
        for header, payload in self._channel:
            number = header["buffers"]
            match header["op"]:
                case "open":
                    self._engines[number] = engine = _Engine(number)
                    self._on_thread(engine.threads[True], self._open, number, engine, payload)
                case "copy" if number not in self._engines:  # the engine's session has just ended
                    error = DeviceError(Cause.CLOSED)
                    answer = {"op": "done", "copy": header["copy"], "cause": error.cause, "message": str(error)}
                    self._channel.send(answer)
                case "copy":
                    engine = self._engines[number]
                    self._on_thread(engine.threads[header["out"]], self._copy, engine, header, payload)
                case "cancel" if number in self._engines:
                    self._engines[number].cancelled.add(header["copy"])
                case "close" if number in self._engines:
                    engine = self._engines.pop(number)
                    if engine.blocks is not None:
                        engine.blocks.cancel()
                    self._on_thread(engine.threads[True], self._close, number, engine)

    def _on_thread(self, thread: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        thread.submit(self._guarded, work, *arguments)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except OSError:  # the server has ended; `serve` then returns and this process exits
            return
        except BaseException:  # noqa: BLE001 - the server would wait for an answer forever
            _log.exception("unexpected error in the copy worker")
            os._exit(1)

    def _open(self, number: int, engine: _Engine, payload: bytes) -> None:
        answer: dict[str, Any] = {"op": "opened", "buffers": number}
        try:
            export = DeviceExport.from_bytes(payload)
            engine.blocks = EngineBlocks(self._driver, self._handles, self._region, export)
            answer["events"] = engine.blocks.has_events
        except DeviceError as error:
            self._end_if_broken(error)
            answer |= {"cause": error.cause, "message": str(error)}
        self._channel.send(answer)

    def _copy(self, engine: _Engine, header: dict[str, Any], payload: bytes) -> None:
        answer = {"op": "done", "copy": header["copy"]}

        def cancelled() -> bool:
            return header["copy"] in engine.cancelled or time.monotonic_ns() >= header["deadline"]

        try:
            self._move(engine.blocks, header, payload, cancelled)
        except (DeviceError, LayoutError, CopyCancelled, RegionError) as error:
            if isinstance(error, DeviceError):
                self._end_if_broken(error)
            answer |= {"cause": _cause_of(error), "message": str(error)}
        engine.cancelled.discard(header["copy"])
        self._channel.send(answer)

    @staticmethod
    def _move(
        blocks: EngineBlocks | None, header: dict[str, Any], payload: bytes, cancelled: Callable[[], bool]
    ) -> None:
        if blocks is None:
            raise DeviceError(Cause.CLOSED)
        after = None if header["after"] is None else blocks.after_event(header["after"])
        direction = CopyDirection.OUT if header["out"] else CopyDirection.IN
        for group, ids, offsets in unpack_plan(header["groups"], payload):
            blocks.copy(direction, group, ids, offsets, after, cancelled)
            after = None  # the copies of the first group have waited for the event

    def _close(self, number: int, engine: _Engine) -> None:
        if engine.blocks is not None:
            try:
                engine.blocks.close()
            except DeviceError as error:
                self._end_if_broken(error)
                _log.warning("memory of an engine was not closed cleanly: %s", error)
        for thread in engine.threads.values():
            thread.shutdown(wait=False)
        self._channel.send({"op": "closed", "buffers": number})

    @staticmethod
    def _end_if_broken(error: DeviceError) -> None:
        if error.cause is Cause.BROKEN:
            _log.error("the context of the device is lost: %s", error)
            sys.stderr.flush()
            os._exit(EXIT_BROKEN)


def _cause_of(error: Exception) -> str:
    if isinstance(error, DeviceError):
        return error.cause
    return "cancelled" if isinstance(error, CopyCancelled) else "bad_plan"


def make_driver(setting: str, device: str) -> Driver:
    """Returns the CUDA driver, or the result of a setting "module:callable". Raises DeviceError."""
    if ":" not in setting:
        return CudaDriver(device)
    module, _, name = setting.partition(":")
    make: Callable[[str], Driver] = getattr(importlib.import_module(module), name)
    return make(device)


def main(arguments: list[str]) -> int:
    fd, pools, region_bytes, setting, device = arguments
    sys.setswitchinterval(1e-4)  # shortens the wait for the GIL after each block
    channel = connect(int(fd))
    try:
        driver = make_driver(setting, device)
        region = HostRegion.inherit(pools, int(region_bytes))
    except DeviceError as error:
        channel.send({"op": "failed", "cause": error.cause, "message": str(error)})
        return 1
    channel.send({"op": "ready"})
    pinning = Pinning(region, driver, allowed=lambda: True)
    threading.Thread(target=warm_up, args=(region, pinning, lambda: False), name="kvtier-warmup", daemon=True).start()
    try:
        CopyWorker(channel, driver, region).serve()
    except BaseException:  # noqa: BLE001 - threads that still run would keep the process alive
        _log.exception("unexpected error in the copy worker")
        os._exit(1)
    os._exit(0)  # ends running copies; the server frees the slots only after the exit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
