"""Views of `kvtier top`: the columns of tiers, tenants, sessions and hand-offs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ..config.units import human_age, human_size
from ..printable import printable
from .rates import Values
from .tables import ResponsiveTable

__all__ = ["SERVERS", "VIEWS", "Column", "View", "handoff_lines", "summary", "table_of"]

_BAD, _WARNING = "red", "yellow"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the text of a cell, and the value that rows are sorted by; None sorts last."""

    name: str
    text: Callable[[Values], str]
    value: Callable[[Values], Any]
    is_number: bool = False
    style: Callable[[Values], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class View:
    """A table of rows; `rows` takes them from a sample.

    Attributes:
        key: fields that identify a row.
        sort: name of the column that rows are sorted by at first.
        empty: text without rows.
    """

    name: str
    columns: tuple[Column, ...]
    rows: Callable[[Values], Sequence[Values]]
    key: tuple[str, ...]
    sort: str
    empty: str


def _name(header: str, field: str, default: str = "-") -> Column:
    return Column(header, lambda row: row[field] or default, lambda row: row[field])


def _number(header: str, field: str, form: Callable[[Any], str], style: str = "") -> Column:
    """A column of numbers. `style` is the style of numbers above 0."""
    return Column(
        header,
        lambda row: "-" if row[field] is None else form(row[field]),
        lambda row: row[field],
        is_number=True,
        style=lambda row: style if row[field] else "",
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _change(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else '+'}{human_size(abs(nbytes))}/s"


def _throughput(nbytes: float) -> str:
    return f"{human_size(nbytes)}/s"


def _rank(rank: int | None) -> str:
    return "scheduler" if rank is None else f"{rank}"


def _shared_tiers(row: Values) -> str:
    """Returns the name and health of each tier that the servers share."""
    return ", ".join(f"{it['name']} {'ok' if it['healthy'] else 'trouble'}" for it in row["shared_tiers"]) or "-"


_TIERS = View(
    "tiers",
    (
        Column("tier", lambda row: row["name"], lambda row: row["position"]),
        Column(
            "health",
            lambda row: "ok" if row["healthy"] else row["trouble"] or "trouble",
            lambda row: row["healthy"],
            style=lambda row: "" if row["healthy"] else _BAD,
        ),
        _number("used", "used_bytes", human_size),
        _number("fill", "fill", _percent),
        _number("hit rate", "hit_rate", _percent),
        _number("stored", "stored_bytes_per_s", _throughput),
        _number("loaded", "loaded_bytes_per_s", _throughput),
        _number("hits/s", "hits_per_s", _count),
        _number("misses/s", "misses_per_s", _count),
        _number("change", "used_bytes_per_s", _change),
        _number("evicted/s", "evictions_per_s", _count),
        _number("expired/s", "expired_per_s", _count),
        _number("dropped/s", "dropped_blocks_per_s", _count, _WARNING),
        _number("damaged/s", "damaged_blocks_per_s", _count, _BAD),
        _number("jobs", "jobs", _count),
        _number("queued", "queued_bytes", human_size),
        _number("size", "capacity_bytes", human_size),
        _number("disk free", "free_disk_bytes", human_size),
    ),
    lambda sample: [tier | {"position": number} for number, tier in enumerate(sample["tiers"])],
    ("name",),
    "tier",
    "no tiers",
)
_TENANTS = View(
    "tenants",
    (
        _name("tenant", "tenant", "(the rest)"),
        _name("tier", "tier"),
        Column(
            "used",
            lambda row: human_size(row["used_bytes"]),
            lambda row: row["used_bytes"],
            is_number=True,
            style=lambda row: _WARNING if row["limit_bytes"] and row["used_bytes"] >= row["limit_bytes"] else "",
        ),
        _number("change", "used_bytes_per_s", _change),
        _number("quota", "quota_bytes", lambda nbytes: human_size(nbytes) if nbytes else "-"),
        _number("limit", "limit_bytes", human_size),
        _number("retained", "retained_bytes", human_size),
    ),
    lambda sample: sample["tenants"],
    ("tenant", "tier"),
    "used",
    "no tenants",
)
_SESSIONS = View(
    "sessions",
    (
        _name("client", "client_name"),
        _name("engine", "engine_id"),
        Column("rank", lambda row: _rank(row["rank"]), lambda row: row["rank"]),
        _number("calls/s", "calls_per_s", lambda calls: f"{calls:,.1f}"),
        _number("leases", "leases", _count),
        _number("pinned", "leased_blocks", lambda blocks: f"{blocks:,} blocks"),
        _number("stores", "stores", _count),
        _number("writing", "storing_bytes", human_size),
        _name("transport", "transport"),
        _name("tenant", "tenant"),
        _name("model", "model"),
        _name("namespace", "namespace_id"),
        _number("last heard", "idle_seconds", human_age),
        _number("age", "age_seconds", human_age),
        _number("pid", "pid", str),
    ),
    lambda sample: sample["sessions"],
    ("namespace_id", "engine_id", "rank", "pid", "client_name"),
    "calls/s",
    "no sessions",
)
_HANDOFFS = View(
    "hand-offs",
    (
        _name("engine", "engine_id"),
        _name("request", "request_id"),
        Column("direction", lambda row: row["direction"].replace("_", " "), lambda row: row["direction"]),
        _number("size", "bytes", human_size),
        _number("claims", "claims", _count),
        _number("age", "age_seconds", human_age),
        _number("ends in", "remaining_seconds", human_age),
        _number("tokens", "num_tokens", _count),
        _number("blocks", "blocks", _count),
        _number("pending", "pending_blocks", _count),
        _name("tenant", "tenant"),
    ),
    lambda sample: sample.get("held", ()),
    ("engine_id", "direction", "request_id"),
    "age",
    "no request is held",
)
SERVERS = View(
    "servers",
    (
        Column("server", lambda row: row["server"], lambda row: row["position"]),
        Column(
            "state",
            lambda row: row["state"],
            lambda row: row["state"],
            style=lambda row: _BAD if row["reason"] else _WARNING if row["state"] == "draining" else "",
        ),
        _number("memory", "memory_used_bytes", human_size),
        _number("fill", "memory_fill", _percent),
        _number("hit rate", "hit_rate", _percent),
        _number("stored", "stored_bytes_per_s", _throughput),
        _number("loaded", "loaded_bytes_per_s", _throughput),
        _number("engines", "engines", _count),
        Column(
            "shared tiers",
            _shared_tiers,
            _shared_tiers,
            style=lambda row: _BAD if "trouble" in _shared_tiers(row) else "",
        ),
        _name("version", "version"),
        _number("keys/s", "lookup_keys_per_s", _count),
        _number("leases", "leases", _count),
        _number("queued", "queued_bytes", human_size),
        _number("up", "uptime_seconds", human_age),
        _name("reason", "reason"),
    ),
    lambda sample: [row | {"position": number} for number, row in enumerate(sample["servers"])],
    ("server",),
    "server",
    "no servers",
)
"""View of the servers of a fleet, with the rows of `fleet_view`."""
VIEWS = (_TIERS, _TENANTS, _SESSIONS, _HANDOFFS)
"""The views in the order of their keys, 1 to 4. Rows of hand-offs are in `held` of a sample."""


def summary(sample: Values) -> str:
    """Returns the figures of the whole server."""
    return (
        f"{sample['lookup_keys_per_s']:,.0f} keys/s looked up, {_percent(sample['hit_rate'])} hits, "
        f"loop lag {sample['loop_lag_seconds'] * 1e3:.1f} ms, {sample['leases']:,} leases, {sample['stores']:,} stores"
    )


def handoff_lines(sample: Values) -> list[str]:
    """Returns the rates of each direction in which hand-offs are open or happened."""
    return [
        f"{totals['direction'].replace('_', ' ')}: {totals['open']:,} held, {totals['published_per_s']:,.1f} published/s, "
        f"{totals['claimed_per_s']:,.1f} claims/s ({_throughput(totals['claimed_bytes_per_s'])}), "
        f"{totals['declined_per_s']:,.1f} declined/s, {totals['expired_per_s']:,.1f} expired/s"
        for totals in sample["handoffs"]
        if totals["open"] or any(value for name, value in totals.items() if name.endswith("_per_s"))
    ]


def table_of(view: View, rows: Sequence[Values], title: str) -> ResponsiveTable:
    """Returns a table with all columns of a view, for output without a screen."""
    table = ResponsiveTable(title=title)
    for column in view.columns:
        table.add_column(column.name, justify="right" if column.is_number else "left")
    for row in rows:
        table.add_row(*(Text(printable(column.text(row)), style=column.style(row)) for column in view.columns))
    return table
