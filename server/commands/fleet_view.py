"""Rows of the servers of a fleet, their totals, and the views of `kvtier fleet top`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from ..config.units import human_size
from .rates import Values
from .tables import ResponsiveTable
from .top_screen import TopScreen
from .top_views import SERVERS, VIEWS, Column, View, table_of

__all__ = ["FleetScreen", "fleet_values", "server_row", "servers_table", "troubles_of"]

_MOST_TROUBLES = 4
"""Lines of the screen for problems; the rows show the others."""
_UNKNOWN = dict.fromkeys(
    (
        *("version", "epoch", "uptime_seconds", "memory_used_bytes", "memory_capacity_bytes", "memory_fill"),
        *("lookup_keys", "lookup_misses", "lookup_keys_per_s", "hit_rate", "stored_bytes_per_s", "loaded_bytes_per_s"),
        *("engines", "sessions", "leases", "queued_bytes"),
    )
)
_SUMS = (
    *("memory_used_bytes", "memory_capacity_bytes", "lookup_keys", "lookup_misses", "lookup_keys_per_s"),
    *("stored_bytes_per_s", "loaded_bytes_per_s", "engines", "sessions", "leases", "queued_bytes"),
)


def server_row(server: str, answer: Values | None, sample: Values | None, *, live: bool, problem: Values) -> Values:
    """Returns the figures of one server; None for unknown figures.

    Args:
        server: address of the server.
        answer: values of its last status; None if it did not answer.
        sample: rates of the last interval; None if there are none.
        live: whether `hit_rate` is that of the interval; otherwise it is that since the start.
        problem: `state` and `reason` of a server that did not answer.
    """
    row: Values = {"server": server, **problem, **_UNKNOWN, "shared_tiers": []}
    if answer is None:
        return row
    memory = next(iter(answer["tiers"]), None) or dict.fromkeys(("used_bytes", "capacity_bytes", "fill"), 0)
    keys, misses = answer["lookup_keys"], answer["lookup_misses"]
    broken = [tier for tier in answer["tiers"] if not tier["healthy"]]
    row |= {
        "state": "draining" if answer["draining"] else "trouble" if broken else "ok",
        "reason": "; ".join(f"{tier['name']}: {tier['trouble'] or 'trouble'}" for tier in broken),
        "version": answer["server_version"],
        "epoch": answer["epoch"],
        "uptime_seconds": answer["uptime_seconds"],
        "memory_used_bytes": memory["used_bytes"],
        "memory_capacity_bytes": memory["capacity_bytes"],
        "memory_fill": memory["fill"],
        "lookup_keys": keys,
        "lookup_misses": misses,
        "hit_rate": None if live or not keys else 1 - misses / keys,
        "engines": len({session["engine_id"] for session in answer["sessions"]}),
        "sessions": len(answer["sessions"]),
        "leases": answer["leases"],
        "queued_bytes": sum(tier["queued_bytes"] for tier in answer["tiers"]),
        "shared_tiers": [
            {name: tier[name] for name in ("name", "type", "healthy", "trouble")}
            for tier in answer["tiers"]
            if tier["shared"]
        ],
    }
    if sample is not None and sample["tiers"]:
        moved = {name: sample["tiers"][0][name] for name in ("stored_bytes_per_s", "loaded_bytes_per_s")}
        row |= {"lookup_keys_per_s": sample["lookup_keys_per_s"], **moved}
        if live:
            row["hit_rate"] = sample["hit_rate"]
    return row


def fleet_values(rows: Sequence[Values], *, live: bool) -> Values:
    """Returns the rows of `server_row` and their total. `live` is as in the rows."""
    known = [row for row in rows if row["version"] is not None]
    total = {name: sum(row[name] for row in known if row[name] is not None) for name in _SUMS}
    if live:
        keys = total["lookup_keys_per_s"]
        hits = sum(row["lookup_keys_per_s"] * row["hit_rate"] for row in known if row["hit_rate"] is not None)
    else:
        keys = total["lookup_keys"]
        hits = keys - total["lookup_misses"]
    capacity = total["memory_capacity_bytes"]
    total |= {
        "servers": len(rows),
        "answering": len(known),
        "versions": sorted({row["version"] for row in known}),
        "memory_fill": total["memory_used_bytes"] / capacity if capacity else None,
        "hit_rate": hits / keys if keys else None,
    }
    return {"servers": list(rows), "total": total}


def servers_table(values: Values) -> ResponsiveTable:
    """Returns a table with a row for each server and one for the total, without the reasons."""
    total = values["total"]
    versions = total["versions"]
    last = {
        **total,
        "server": "total",
        "state": f"{total['answering']} of {total['servers']} answer",
        "reason": "",
        "version": f"{len(versions)} versions" if len(versions) > 1 else "".join(versions),
        "uptime_seconds": None,
        "shared_tiers": [],
    }
    view = replace(SERVERS, columns=tuple(column for column in SERVERS.columns if column.name != "reason"))
    return table_of(view, [*values["servers"], last], "servers")


def troubles_of(rows: Iterable[Values]) -> list[str]:
    """Returns a line for each server that did not answer or has a broken tier."""
    named = [(row["server"], row["reason"]) for row in rows if row["reason"]]
    return [reason if server in reason else f"{server}: {reason}" for server, reason in named]


def _of_each(view: View) -> View:
    """Returns a view of one server with the server's address as the first column."""
    return replace(
        view,
        columns=(Column("server", lambda row: row["server"], lambda row: row["server"]), *view.columns),
        rows=lambda sample: [
            row | {"server": server} for server, each in sample["samples"].items() for row in view.rows(each)
        ],
        key=("server", *view.key),
        sort="server" if view.name == "tiers" else view.sort,
    )


class FleetScreen(TopScreen):
    """Screen of `kvtier fleet top`: the servers, and the tiers and sessions of all of them.

    A sample is a result of `fleet_values`, with the sample of each server in `samples`.
    """

    views: ClassVar[Sequence[View]] = (
        SERVERS,
        *(_of_each(view) for view in VIEWS if view.name in ("tiers", "sessions")),
    )

    def headline(self, sample: Values) -> tuple[str, str]:
        total = sample["total"]
        versions = ", ".join(total["versions"]) or "none"
        all_answer = total["answering"] == total["servers"]
        text = f"{total['answering']} of {total['servers']} servers answer, {self.as_of}, versions: {versions}"
        return text, "bold" if all_answer else "yellow"

    def troubles(self, sample: Values) -> list[str]:
        found = [f"! {line}" for line in troubles_of(sample["servers"])]
        if len(found) > _MOST_TROUBLES:
            found[_MOST_TROUBLES - 1 :] = [f"! {len(found) - _MOST_TROUBLES + 1} more servers have problems"]
        return found

    def summary(self, sample: Values) -> str:
        total = sample["total"]
        hits = "-" if total["hit_rate"] is None else f"{total['hit_rate']:.1%}"
        return (
            f"{total['lookup_keys_per_s']:,.0f} keys/s looked up, {hits} hits, "
            f"{human_size(total['loaded_bytes_per_s'])}/s loaded, {human_size(total['stored_bytes_per_s'])}/s stored, "
            f"{total['engines']:,} engines"
        )
