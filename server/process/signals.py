"""Signals of the server process. Its children block them (`tiers.storage.service_signals`).

| signal | effect |
|---|---|
| SIGTERM, SIGINT, SIGQUIT | the server drains and ends |
| SIGHUP | the same; ignored if it was ignored before the start, as by `nohup` |
| SIGUSR1, SIGUSR2 | the server logs a warning |
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from types import FrameType

from ..telemetry.logs import get_logger

__all__ = ["handle_signals"]

_log = get_logger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_UNUSED = (signal.SIGUSR1, signal.SIGUSR2)


def handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Handles the signals until the process has ended. The first that ends the server sets `stop`.

    `loop.add_signal_handler` would restore the default action when the loop closes, and a further
    signal would then kill the process before it has returned its exit code.
    """

    def on_ending(number: int) -> None:
        if not stop.is_set():
            _log.info("the server ends because of a signal", signal=signal.Signals(number).name)
            stop.set()

    def on_unused(number: int) -> None:
        _log.warning("a signal without a meaning for the server is ignored", signal=signal.Signals(number).name)

    for numbers, callback in ((_ENDING, on_ending), (_UNUSED, on_unused)):
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _deferring(loop, callback))


def _deferring(
    loop: asyncio.AbstractEventLoop, callback: Callable[[int], object]
) -> Callable[[int, FrameType | None], None]:
    """Returns a handler that runs `callback` on the loop.

    A handler interrupts the main thread anywhere, so it must not log: the thread may hold the lock
    of the log's queue.
    """

    def handle(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(callback, number)

    return handle
