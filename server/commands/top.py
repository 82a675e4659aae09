"""`kvtier top`: rates of tiers, tenants, sessions and hand-offs, live on a terminal.

On a terminal the command draws one view at a time and reads keys. Otherwise it prints the tables of
each interval, or with --json one line per interval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group

from ...client.errors import KVTierError
from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ..config.units import human_age
from ..telemetry import status
from .admin_client import ask_status, connect, plain_console, refuse_error
from .console import print_line
from .feed import StatusFeed
from .live_screen import run_screen, wants_screen
from .rates import Values, rates
from .top_screen import TopScreen
from .top_views import VIEWS, handoff_lines, summary, table_of

__all__ = ["run"]

_MOST_SESSIONS = 20


def run(options: argparse.Namespace) -> int:
    count = 1 if options.once else options.count
    console = plain_console()
    try:
        endpoint = client_endpoint(options.endpoint)
        with contextlib.suppress(KeyboardInterrupt):
            if wants_screen(console, options):
                screen = TopScreen(console, f"{endpoint}")
                with connect(endpoint) as server:
                    run_screen(console, screen, StatusFeed(server, endpoint, options.timeout), options)
            else:
                for sample in _samples(endpoint, options, count):
                    print_line(json.dumps(sample)) if options.json else console.print(_tables(sample, endpoint))
    except (EndpointError, KVTierError) as error:
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
