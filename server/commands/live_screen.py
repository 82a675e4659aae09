"""Live screen on a terminal: draws a `TopScreen`, reads keys, and restores the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.live import Live

from .top_screen import TopScreen

__all__ = ["ScreenFeed", "run_screen", "wants_screen"]

_POLL_SECONDS = 0.05
"""Time between two looks at a running call, the keys and the size of the terminal."""
_FIRST_SECONDS = 0.3
"""Most seconds of the first interval: until it ends, there are no rates to show."""
_SEQUENCES = {
    name: [prefix + code for prefix in (b"\x1b[", b"\x1bO") for code in codes.split()]
    for name, codes in {
        "up": b"A",
        "down": b"B",
        "right": b"C",
        "left": b"D",
        "home": b"H 1~ 7~",
        "end": b"F 4~ 8~",
        "pageup": b"5~",
        "pagedown": b"6~",
        "backtab": b"Z",
    }.items()
} | {"tab": [b"\t"], "enter": [b"\r", b"\n"], "backspace": [b"\x7f", b"\x08"], "escape": [b"\x1b"]}
"""Bytes that terminals send for each key, besides characters."""
_NAMES = {sequence: name for name, sequences in _SEQUENCES.items() for sequence in sequences}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_PARTIAL_KEY = re.compile(rb"\x1b[\[O]?[0-9;]*\Z")


class ScreenFeed(Protocol):
    """Source of the figures of a screen. No method blocks."""

    samples: int
    """Number of samples that the screen got."""

    @property
    def waiting(self) -> bool: ...

    def ask(self, *, holds: bool) -> None: ...

    def take(self, target: TopScreen) -> bool: ...


def wants_screen(console: Console, options: argparse.Namespace) -> bool:
    """Whether the command draws a screen; otherwise it prints tables or JSON."""
    is_one = options.once or options.count == 1
    return console.is_terminal and not console.is_dumb_terminal and not options.json and not is_one


def run_screen(console: Console, screen: TopScreen, feed: ScreenFeed, options: argparse.Namespace) -> None:
    """Draws the screen until the user quits, or until `options.count` intervals are shown.

    Ctrl-Z restores the terminal and suspends the command. Then `fg` draws the screen again.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that the terminal is restored
    suspended = threading.Event()
    while True:
        before = signal.signal(signal.SIGTSTP, lambda *_: suspended.set())
        _draw(screen, feed, console, options, suspended)
        if not suspended.is_set():
            return
        signal.signal(signal.SIGTSTP, before)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns at SIGCONT
        suspended.clear()


def _draw(
    screen: TopScreen, feed: ScreenFeed, console: Console, options: argparse.Namespace, suspended: threading.Event
) -> None:
    """Sets up the terminal, draws until the end or a suspension, and restores the terminal."""
    with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        next_call, size, keys, seconds = 0.0, None, list[str](), min(_FIRST_SECONDS, options.interval)
        while not suspended.is_set() and (not options.count or feed.samples < options.count):
            if time.monotonic() >= next_call and not feed.waiting:
                feed.ask(holds=screen.wants_holds)
                next_call, seconds = time.monotonic() + seconds, options.interval
            if feed.take(screen) or keys or size != console.size:
                size = console.size
                live.update(screen.render(*size), refresh=True)
            keys = _pressed(keyboard)
            if any(screen.press(key) for key in keys):
                return
            if screen.wants_holds and screen.holds is None:
                feed.ask(holds=True)


@contextlib.contextmanager
def _keyboard() -> Iterator[int | None]:
    """Makes the terminal pass each key at once, without echo. Yields None without a keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    attributes = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)


def _pressed(keyboard: int | None) -> list[str]:
    """Waits briefly for keys; returns their names. A closed terminal counts as the key `q`."""
    if keyboard is None:
        time.sleep(_POLL_SECONDS)
        return []
    if not select.select([keyboard], [], [], _POLL_SECONDS)[0]:
        return []
    data = os.read(keyboard, 1024)
    if _PARTIAL_KEY.search(data) and select.select([keyboard], [], [], _POLL_SECONDS)[0]:
        data += os.read(keyboard, 1024)
    return [_NAMES.get(key) or key.decode("ascii", "replace") for key in _KEY.findall(data)] if data else ["q"]
