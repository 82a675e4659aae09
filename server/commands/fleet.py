"""`kvtier fleet`: status, live rates and rolling drain of many servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console

from ...client.errors import KVTierError
from ...client.transport.sync_transport import ServiceTransport
from ...protos.endpoint import Endpoint
from .admin_client import connect, plain_console
from .console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, print_line, refuse
from .feed import StatusFeed
from .fleet_drain import drain_fleet
from .fleet_servers import FleetError, Lookup, find_servers
from .fleet_view import FleetScreen, fleet_values, server_row, servers_table, troubles_of
from .live_screen import run_screen, wants_screen
from .rates import Values
from .top_screen import TopScreen

__all__ = ["Fleet", "exit_code", "run"]

_POLL_SECONDS = 0.02
_REFRESH_SECONDS = 10.0
"""Time between two readings of the file or the name in DNS by `kvtier fleet top`."""


class _Server:
    """One server: its feed, and the last figures."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.sample: Values | None = None
        self.holds: Values | None = None
        self.problem = ""
        self.as_of = ""
        self._name = f"{endpoint}"
        self._state = "waiting"
        self._connection: ServiceTransport | None = None
        self._feed: StatusFeed | None = None
        try:
            self._connection = connect(endpoint)
            self._feed = StatusFeed(self._connection, endpoint, timeout)
        except KVTierError as error:  # the credentials cannot be used for this address
            self._state, self.problem = "refused", f"{error}"

    def ask(self) -> None:
        if self._feed is not None:
            self._feed.ask(holds=False)

    @property
    def waiting(self) -> bool:
        return self._feed is not None and self._feed.waiting

    @property
    def settled(self) -> bool:
        """Whether there are rates, or a reason why there are none."""
        return bool(self.problem) or self.sample is not None

    def take(self) -> bool:
        """Takes the answer if there is one; returns whether there was."""
        if self._feed is None:
            return False
        try:
            taken = self._feed.take(self)
            if self.problem:
                self._state, self.sample = "unreachable", None
        except KVTierError as error:
            self._state, self.problem, self.sample = "refused", f"{error}", None
            return True
        return taken

    @property
    def rates(self) -> Values | None:
        """The sample, if it is of the process that answered last."""
        answer = self._feed.answer if self._feed is not None else None
        if answer is None or self.sample is None or self.sample["epoch"] != answer["epoch"]:
            return None
        return self.sample

    def row(self, *, live: bool) -> Values:
        answer = None if self.problem or self._feed is None else self._feed.answer
        problem = {"state": self._state, "reason": self.problem}
        return server_row(self._name, answer, self.rates, live=live, problem=problem)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Fleet:
    """Figures of all servers. Calls run at the same time; each has its own time limit.

    It is also the feed of the screen of `kvtier fleet top`.
    """

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float, *, live: bool = False) -> None:
        self.samples = 0
        """Number of intervals that have ended for all servers."""
        self.waiting = False
        """Always False: a server that does not answer does not delay the others."""
        self._timeout = timeout
        self._live = live
        self._servers: dict[Endpoint, _Server] = {}
        self._found: Sequence[Endpoint] | None = None
        self.replace(endpoints)

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Makes these the servers. Servers that stay keep their figures."""
        before = self._servers
        self._servers = {each: before[each] if each in before else _Server(each, self._timeout) for each in endpoints}
        for endpoint, server in before.items():
            if endpoint not in self._servers:
                server.close()

    def follow(self, options: argparse.Namespace, lookup: Lookup = socket.getaddrinfo) -> None:
        """Starts a thread that reads the file or the name again at intervals."""

        def watch() -> None:
            while True:
                time.sleep(_REFRESH_SECONDS)
                with contextlib.suppress(FleetError):  # the last servers stay
                    self._found = find_servers(options, lookup)

        if not options.servers:
            threading.Thread(target=watch, daemon=True).start()

    def ask(self, *, holds: bool = False) -> None:
        """Starts a call to each server that has none. `holds` is ignored."""
        found, self._found = self._found, None
        if found is not None:
            self.replace(found)
        self.samples += all(server.settled for server in self._servers.values())
        for server in self._servers.values():
            server.ask()

    def ask_again(self) -> None:
        """Starts a call to each server that has answered the last one."""
        for server in self._servers.values():
            if not server.problem:
                server.ask()

    def take(self, target: TopScreen) -> bool:
        """Passes the figures to the screen if they have changed; returns whether they have."""
        taken = [server.take() for server in self._servers.values()]
        if any(taken):
            target.sample = self.values()
            target.as_of = time.strftime("%H:%M:%S")
        return any(taken)

    def wait(self) -> None:
        """Waits until each running call has ended."""
        while any(server.waiting for server in self._servers.values()):
            time.sleep(_POLL_SECONDS)
            for server in self._servers.values():
                server.take()

    def values(self) -> Values:
        """Returns the rows, their total, and in `samples` the rates per server."""
        rows = [server.row(live=self._live) for server in self._servers.values()]
        rates = {f"{endpoint}": server.rates for endpoint, server in self._servers.items()}
        samples = {name: sample for name, sample in rates.items() if sample is not None}
        return {**fleet_values(rows, live=self._live), "samples": samples}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.replace([])


def run(options: argparse.Namespace) -> int:
    try:
        endpoints = find_servers(options)
    except FleetError as error:
        return refuse([f"{error}"], EXIT_USAGE)
    action = {"status": _status, "top": _top, "drain": _drain}[options.action]
    try:
        return action(options, endpoints)
    except KeyboardInterrupt:
        return refuse(["interrupted"], EXIT_FAILURE)


def exit_code(values: Values) -> int:
    """Returns 0 if all servers answer, 1 if some do not, 2 if none does."""
    total = values["total"]
    if total["answering"] == total["servers"]:
        return 0
    return EXIT_FAILURE if total["answering"] else EXIT_UNREACHABLE


def _status(options: argparse.Namespace, endpoints: Sequence[Endpoint]) -> int:
    with Fleet(endpoints, options.timeout) as fleet:
        fleet.ask()
        fleet.wait()
        time.sleep(options.interval)
        fleet.ask_again()
        fleet.wait()
        values = fleet.values()
    _show(values, plain_console(), as_json=options.json)
    return exit_code(values)


def _drain(options: argparse.Namespace, endpoints: Sequence[Endpoint]) -> int:
    if not options.undo:
        with Fleet(endpoints, options.timeout) as fleet:
            fleet.ask()
            fleet.wait()
            values = fleet.values()
        if code := exit_code(values):
            problems = troubles_of(row for row in values["servers"] if row["version"] is None)
            return refuse([*problems, "no server was drained, because not all of them answer"], code)
    return drain_fleet(options, endpoints)


def _top(options: argparse.Namespace, endpoints: Sequence[Endpoint]) -> int:
    console = plain_console()
    count = 1 if options.once else options.count
    with Fleet(endpoints, options.timeout, live=True) as fleet, contextlib.suppress(KeyboardInterrupt):
        fleet.follow(options)
        if wants_screen(console, options):
            run_screen(console, FleetScreen(console, f"{len(endpoints)} servers"), fleet, options)
            return 0
        fleet.ask()
        fleet.wait()
        shown = 0
        while True:
            time.sleep(options.interval)
            fleet.ask()
            fleet.wait()
            values = fleet.values()
            _show(values, console, as_json=options.json, indent=None)
            shown += 1
            if shown == count:
                return exit_code(values)
    return 0


def _show(values: Values, console: Console, *, as_json: bool, indent: int | None = 2) -> None:
    if as_json:
        print_line(json.dumps({name: values[name] for name in ("servers", "total")}, indent=indent))
        return
    console.print(servers_table(values))
    for line in troubles_of(values["servers"]):
        console.print(line, style="red")
