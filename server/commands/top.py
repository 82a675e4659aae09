"""`kvtier top`: rates per second, computed from two successive statuses of a server."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ..config.units import human_age, human_size
from ..printable import printable
from ..telemetry import status
from .admin_client import AdminClientError, UnreachableError, ask_status, plain_console, refuse_error
from .console import EXIT_USAGE, print_line, refuse
from .tables import ResponsiveTable

__all__ = ["rates", "run"]

_TIER_COUNTERS = ("hits", "misses", "evictions", "expired", "dropped_blocks", "damaged_blocks", "used_bytes")
_TIER_VALUES = ("name", "type", "used_bytes", "capacity_bytes", "fill", "jobs", "queued_bytes", "healthy", "trouble")
_SESSION_VALUES = (
    *("client_name", "engine_id", "rank", "pid", "transport", "model", "tenant"),
    *("leases", "leased_blocks", "stores", "storing_bytes", "idle_seconds"),
)
_VALUES = ("server_version", "epoch", "uptime_seconds", "draining", "leases", "stores", "holds", "loop_lag_seconds")
_MOST_SESSIONS = 20


def rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns the values of `after`, and rates (`…_per_s`) since `before`.

    Both arguments are results of `status.values` with the same epoch. Hit ratios are those of the
    interval, None without lookups. Sessions are sorted by calls per second.
    """
    keys, misses = (after[name] - before[name] for name in ("lookup_keys", "lookup_misses"))
    return {name: after[name] for name in _VALUES} | {
        "interval_seconds": seconds,
        "lookup_keys_per_s": keys / seconds,
        "hit_ratio": 1 - misses / keys if keys else None,
        "tiers": [_tier(old, new, seconds) for old, new in zip(before["tiers"], after["tiers"], strict=True)],
        "tenants": list(_tenant_rates(before, after, seconds)),
        "sessions": sorted(_session_rates(before, after, seconds), key=lambda session: -session["calls_per_s"]),
    }


def _tier(old: dict[str, Any], new: dict[str, Any], seconds: float) -> dict[str, Any]:
    hits, misses = new["hits"] - old["hits"], new["misses"] - old["misses"]
    per_second = {f"{name}_per_s": (new[name] - old[name]) / seconds for name in _TIER_COUNTERS}
    ratio = {"hit_ratio": hits / (hits + misses) if hits + misses else None}
    return {name: new[name] for name in _TIER_VALUES} | per_second | ratio


def _tenant_rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    had = {(tier["name"], share["tenant"]): share["used_bytes"] for tier in before["tiers"] for share in tier["shares"]}
    shares = [
        {"tenant": share["tenant"], "tier": tier["name"]}
        | {name: share[name] for name in ("used_bytes", "quota_bytes", "retained_bytes")}
        | {"used_bytes_per_s": (share["used_bytes"] - had.get((tier["name"], share["tenant"]), 0)) / seconds}
        for tier in after["tiers"]
        for share in tier["shares"]
    ]
    return sorted(shares, key=lambda share: -share["used_bytes"])


def _session_rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    had = {_name(session): session["calls"] for session in before["sessions"]}
    return [
        {name: session[name] for name in _SESSION_VALUES}
        | {"calls_per_s": max(0, session["calls"] - had.get(_name(session), 0)) / seconds}
        for session in after["sessions"]
    ]


def _name(session: dict[str, Any]) -> tuple[Any, ...]:
    return session["namespace_id"], session["engine_id"], session["rank"], session["pid"], session["client_name"]


def run(options: argparse.Namespace) -> int:
    if not 0 < options.interval <= 3600 or options.count < 0:
        return refuse(["--interval must be more than 0 and at most 3600, --count must be 0 or more"], EXIT_USAGE)
    count = 1 if options.once else options.count
    console = plain_console()
    is_live = console.is_terminal and not options.json and count != 1
    try:
        endpoint = client_endpoint(options.endpoint)
        samples = _samples(endpoint, options, count, keep_on=is_live)
        with contextlib.suppress(KeyboardInterrupt):
            if is_live:
                with Live(console=console, screen=True, auto_refresh=False) as live:
                    for sample in samples:
                        live.update(_view(sample, endpoint), refresh=True)
            else:
                for sample in samples:
                    print_line(json.dumps(sample)) if options.json else console.print(_view(sample, endpoint))
    except (EndpointError, AdminClientError) as error:
        return refuse_error(error)
    return 0


def _samples(
    endpoint: Endpoint, options: argparse.Namespace, count: int, *, keep_on: bool
) -> Iterator[dict[str, Any] | str]:
    """Yields the rates of each interval, or with `keep_on` the error text if no server answers."""
    before, at, shown = None, 0.0, 0
    while not count or shown < count:
        try:
            now, answer = time.monotonic(), status.values(ask_status(endpoint, options.timeout))
        except UnreachableError as error:
            if not keep_on:
                raise
            yield f"{error}"
            before = None
        else:
            if before is not None and before["epoch"] == answer["epoch"]:
                shown += 1
                yield rates(before, answer, now - at)
            before, at = answer, now
        if not count or shown < count:
            time.sleep(options.interval)


def _view(sample: dict[str, Any] | str, endpoint: Endpoint) -> Group | Text:
    if isinstance(sample, str):
        return Text(printable(sample), style="red")
    state = "draining" if sample["draining"] else f"up {human_age(sample['uptime_seconds'])}"
    head = (
        f"kvtier {sample['server_version']} at {endpoint}, {state}; {sample['lookup_keys_per_s']:,.0f} keys/s looked up, "
        f"{_percent(sample['hit_ratio'])} hits; event loop lag up to {sample['loop_lag_seconds'] * 1e3:.1f} ms; "
        f"{sample['leases']} leases, {sample['stores']} stores in flight"
    )
    pieces: list[Any] = [head, _tiers(sample), _tenants(sample)]
    if sample["sessions"]:
        pieces.append(_sessions(sample))
    return Group(*pieces)


def _tiers(sample: dict[str, Any]) -> ResponsiveTable:
    counters = ("hits", "misses", "hit ratio", "evicted", "expired", "dropped")
    numbers = ("used", "fill", "change", *counters, "jobs", "queued")
    table = ResponsiveTable("tier", numbers=numbers, title="tiers, per second")
    table.add_column("health")
    for tier in sample["tiers"]:
        rows = [f"{tier[f'{name}_per_s']:,.0f}" for name in ("evictions", "expired", "dropped_blocks")]
        table.add_row(
            tier["name"],
            human_size(tier["used_bytes"]),
            f"{tier['fill']:.1%}",
            _change(tier["used_bytes_per_s"]),
            f"{tier['hits_per_s']:,.0f}",
            f"{tier['misses_per_s']:,.0f}",
            _percent(tier["hit_ratio"]),
            *rows,
            f"{tier['jobs']:,}",
            human_size(tier["queued_bytes"]),
            "ok" if tier["healthy"] else Text(printable(tier["trouble"] or "trouble"), style="red"),
        )
    return table


def _tenants(sample: dict[str, Any]) -> ResponsiveTable:
    table = ResponsiveTable("tenant", "tier", numbers=("used", "change", "retained"), title="tenants")
    for share in sample["tenants"]:
        table.add_row(
            share["tenant"] or "(the rest)",
            share["tier"],
            human_size(share["used_bytes"]),
            _change(share["used_bytes_per_s"]),
            human_size(share["retained_bytes"]),
        )
    return table


def _sessions(sample: dict[str, Any]) -> ResponsiveTable:
    names = ("client", "engine", "rank", "transport")
    numbers = ("calls/s", "leases", "pinned", "stores", "writing", "last heard")
    table = ResponsiveTable(*names, numbers=numbers, title="sessions, the busiest first")
    for session in sample["sessions"][:_MOST_SESSIONS]:
        table.add_row(
            session["client_name"],
            session["engine_id"],
            "scheduler" if session["rank"] is None else str(session["rank"]),
            session["transport"],
            f"{session['calls_per_s']:,.1f}",
            f"{session['leases']:,}",
            f"{session['leased_blocks']:,} blocks",
            f"{session['stores']:,}",
            human_size(session["storing_bytes"]),
            human_age(session["idle_seconds"]),
        )
    return table


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _change(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else '+'}{human_size(abs(nbytes))}/s"
