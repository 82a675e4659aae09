"""Signals of the server process: which end it, and which have no meaning for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

from ..telemetry.logs import get_logger

__all__ = ["handle_signals"]

_log = get_logger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_UNUSED = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Handles the signals. The first that ends the server sets `stop`.

    The handlers stay until the process has ended. In the context each signal wakes the loop.

    Children block the signals (`tiers.storage.service_signals`). SIGHUP is ignored if it was
    ignored before the start, as by `nohup`.

    `loop.add_signal_handler` would restore the default action when the loop closes, and a further
    signal would then kill the process before it has returned its exit code.

    A handler runs only when the main thread executes Python code. If a signal arrives just before
    the thread waits for events, only a byte on a socket that the loop reads ends the wait.
    """

    def on_ending(number: int) -> None:
        if not stop.is_set():
            _log.info("the server ends because of a signal", signal=signal.Signals(number).name)
            stop.set()

    def on_unused(number: int) -> None:
        _log.warning("a signal without a meaning for the server is ignored", signal=signal.Signals(number).name)

    wakes, wake = socket.socketpair()
    with wakes, wake:
        for end in (wakes, wake):
            end.setblocking(False)
        loop.add_reader(wakes, wakes.recv, 4096)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            for numbers, callback in ((_ENDING, on_ending), (_UNUSED, on_unused)):
                for number in numbers:
                    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                        signal.signal(number, _deferring(loop, callback))
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(wakes)


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
