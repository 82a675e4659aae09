"""`kvtier top`: rates of tiers, tenants, sessions and hand-offs, live on a terminal.

On a terminal the command draws one view at a time and reads keys. Otherwise it prints the tables of
each interval, or with --json one line per interval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from typing import Any

import grpc
from rich.console import Console, Group
from rich.live import Live

from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.v1.admin_pb2 import GetStatusRequest, ListHandoffsRequest
from ...protos.v1.admin_pb2_grpc import AdminServiceStub
from ..config.units import human_age
from ..telemetry import status
from .admin_client import (
    AdminClientError,
    UnreachableError,
    ask_status,
    channel_to,
    error_of,
    plain_console,
    refuse_error,
)
from .console import print_line
from .handoffs import values as handoff_values
from .rates import Values, rates
from .top_screen import TopScreen
from .top_views import VIEWS, handoff_lines, summary, table_of

__all__ = ["run"]

_MOST_SESSIONS = 20
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # After a restart of the server, the screen shows it within a second.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_POLL_SECONDS = 0.05
"""Time between two looks at a running call, the keys and the size of the terminal."""
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


def run(options: argparse.Namespace) -> int:
    count = 1 if options.once else options.count
    console = plain_console()
    is_live = console.is_terminal and not console.is_dumb_terminal and not options.json and count != 1
    try:
        endpoint = client_endpoint(options.endpoint)
        with contextlib.suppress(KeyboardInterrupt):
            if is_live:
                _run_screen(console, endpoint, options)
            else:
                for sample in _samples(endpoint, options, count):
                    print_line(json.dumps(sample)) if options.json else console.print(_tables(sample, endpoint))
    except (EndpointError, AdminClientError) as error:
        return refuse_error(error)
    return 0


def _samples(endpoint: Endpoint, options: argparse.Namespace, count: int) -> Iterator[Values]:
    """Yields the rates of `count` intervals; 0 means no limit."""
    before, at, shown = None, 0.0, 0
    while not count or shown < count:
        now, answer = time.monotonic(), status.values(ask_status(endpoint, options.timeout))
        if before is not None and before["epoch"] == answer["epoch"]:
            shown += 1
            yield rates(before, answer, now - at)
        before, at = answer, now
        if not count or shown < count:
            time.sleep(options.interval)


def _tables(sample: Values, endpoint: Endpoint) -> Group:
    state = "draining" if sample["draining"] else f"up {human_age(sample['uptime_seconds'])}"
    tiers, tenants, sessions, _ = VIEWS
    pieces: list[Any] = [
        f"kvtier {sample['server_version']} at {endpoint}, {state}; {summary(sample)}",
        table_of(tiers, tiers.rows(sample), "tiers"),
        table_of(tenants, sample["tenants"], "tenants"),
        *handoff_lines(sample),
    ]
    if sample["sessions"]:
        busiest = sample["sessions"][:_MOST_SESSIONS]
        title = f"sessions, the busiest first: {len(busiest)} of {len(sample['sessions']):,}"
        pieces.append(table_of(sessions, busiest, title))
    return Group(*pieces)


class _Feed:
    """Calls of one server that do not block: at most one status and one list of holds at a time."""

    def __init__(self, channel: grpc.Channel, endpoint: Endpoint, timeout: float) -> None:
        self._stub = AdminServiceStub(channel)
        self._endpoint = endpoint
        self._timeout = timeout
        self._calls: dict[str, tuple[float, Any]] = {}
        self._before: tuple[float, Values] | None = None
        self.samples = 0
        """Number of samples that the screen got."""

    def ask(self, *, holds: bool) -> None:
        """Starts the calls that are not running."""
        if "status" not in self._calls:
            call = self._stub.GetStatus.future(GetStatusRequest(), timeout=self._timeout)
            self._calls["status"] = time.monotonic(), call
        if holds and "holds" not in self._calls:
            call = self._stub.ListHandoffs.future(ListHandoffsRequest(), timeout=self._timeout)
            self._calls["holds"] = time.monotonic(), call

    @property
    def waiting(self) -> bool:
        return bool(self._calls)

    def take(self, screen: TopScreen) -> bool:
        """Passes the answers of ended calls to the screen; returns whether there were any.

        Raises `AdminClientError` if the server refuses a call.
        """
        ended = [name for name, (_, call) in self._calls.items() if call.done()]
        for name in ended:
            asked, call = self._calls.pop(name)
            try:
                if name == "holds":
                    screen.holds = handoff_values(call.result())
                else:
                    self._take_status(screen, asked, status.values(call.result()))
            except grpc.RpcError as error:
                self._take_error(screen, error)
        return bool(ended)

    def _take_status(self, screen: TopScreen, asked: float, answer: Values) -> None:
        before, self._before = self._before, (asked, answer)
        screen.problem = ""
        if before is not None and before[1]["epoch"] == answer["epoch"]:
            screen.sample = rates(before[1], answer, asked - before[0])
            screen.as_of = time.strftime("%H:%M:%S")
            self.samples += 1

    def _take_error(self, screen: TopScreen, error: grpc.RpcError) -> None:
        problem = error_of(error, self._endpoint, self._timeout)
        if not isinstance(problem, UnreachableError):
            raise problem
        self._before = None
        screen.problem = f"{problem}"


def _run_screen(console: Console, endpoint: Endpoint, options: argparse.Namespace) -> None:
    """Draws the screen until the user quits, or until `options.count` intervals are shown.

    Ctrl-Z restores the terminal and suspends the command. Then `fg` draws the screen again.
    """
    screen = TopScreen(console, f"{endpoint}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that the terminal is restored
    suspended = threading.Event()
    with channel_to(endpoint, _CHANNEL_OPTIONS) as channel:
        feed = _Feed(channel, endpoint, options.timeout)
        while True:
            before = signal.signal(signal.SIGTSTP, lambda *_: suspended.set())
            _draw(screen, feed, console, options, suspended)
            if not suspended.is_set():
                return
            signal.signal(signal.SIGTSTP, before)
            os.kill(os.getpid(), signal.SIGTSTP)  # returns at SIGCONT
            suspended.clear()


def _draw(
    screen: TopScreen, feed: _Feed, console: Console, options: argparse.Namespace, suspended: threading.Event
) -> None:
    """Sets up the terminal, draws until the end or a suspension, and restores the terminal."""
    with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        next_call, size, keys = 0.0, None, list[str]()
        while not suspended.is_set() and (not options.count or feed.samples < options.count):
            if time.monotonic() >= next_call and not feed.waiting:
                feed.ask(holds=screen.wants_holds)
                next_call = time.monotonic() + options.interval
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
