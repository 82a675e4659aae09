"""Rates per second, computed from two successive statuses of a server."""

from __future__ import annotations

from typing import Any

__all__ = ["Values", "rates"]

Values = dict[str, Any]
"""One sample, or one tier, tenant, session or direction of a sample."""

_VALUES = (
    *("server_version", "epoch", "uptime_seconds", "draining", "loop_lag_seconds"),
    *("leases", "stores", "holds", "held_bytes", "quarantined_bytes"),
)
_TIER_VALUES = (
    *("name", "type", "used_bytes", "capacity_bytes", "fill", "blocks", "jobs", "queued_bytes"),
    *("free_disk_bytes", "healthy", "trouble"),
)
_TIER_COUNTERS = (
    *("hits", "misses", "evictions", "expired", "dropped_blocks", "damaged_blocks"),
    *("used_bytes", "stored_bytes", "loaded_bytes"),
)
_SHARE_VALUES = ("used_bytes", "quota_bytes", "limit_bytes", "retained_bytes")
_SESSION_VALUES = (
    *("client_name", "engine_id", "rank", "pid", "transport", "model", "namespace_id", "tenant"),
    *("leases", "leased_blocks", "stores", "storing_bytes", "age_seconds", "idle_seconds"),
)
_HANDOFF_COUNTERS = ("published", "declined", "claimed", "claimed_bytes", "released", "expired", "dropped")


def rates(before: Values, after: Values, seconds: float) -> Values:
    """Returns the values of `after`, and rates (`…_per_s`) since `before`.

    Both arguments are results of `status.values` with the same epoch. Hit rates are those of the
    interval, None without lookups. Sessions are sorted by calls per second.
    """
    keys, misses = (after[name] - before[name] for name in ("lookup_keys", "lookup_misses"))
    return {name: after[name] for name in _VALUES} | {
        "interval_seconds": seconds,
        "lookup_keys_per_s": keys / seconds,
        "hit_rate": 1 - misses / keys if keys else None,
        "tiers": [_tier(old, new, seconds) for old, new in zip(before["tiers"], after["tiers"], strict=True)],
        "tenants": list(_tenants(before, after, seconds)),
        "sessions": sorted(_sessions(before, after, seconds), key=lambda session: -session["calls_per_s"]),
        "handoffs": _handoffs(before, after, seconds),
    }


def _tier(old: Values, new: Values, seconds: float) -> Values:
    hits, misses = new["hits"] - old["hits"], new["misses"] - old["misses"]
    rate = {"hit_rate": hits / (hits + misses) if hits + misses else None}
    return {name: new[name] for name in _TIER_VALUES} | _per_second(_TIER_COUNTERS, old, new, seconds) | rate


def _tenants(before: Values, after: Values, seconds: float) -> list[Values]:
    had = {(tier["name"], share["tenant"]): share["used_bytes"] for tier in before["tiers"] for share in tier["shares"]}
    shares = [
        {"tenant": share["tenant"], "tier": tier["name"]}
        | {name: share[name] for name in _SHARE_VALUES}
        | {"used_bytes_per_s": (share["used_bytes"] - had.get((tier["name"], share["tenant"]), 0)) / seconds}
        for tier in after["tiers"]
        for share in tier["shares"]
    ]
    return sorted(shares, key=lambda share: -share["used_bytes"])


def _sessions(before: Values, after: Values, seconds: float) -> list[Values]:
    had = {_identity(session): session["calls"] for session in before["sessions"]}
    return [
        {name: session[name] for name in _SESSION_VALUES}
        | {"calls_per_s": max(0, session["calls"] - had.get(_identity(session), 0)) / seconds}
        for session in after["sessions"]
    ]


def _identity(session: Values) -> tuple[Any, ...]:
    return session["namespace_id"], session["engine_id"], session["rank"], session["pid"], session["client_name"]


def _handoffs(before: Values, after: Values, seconds: float) -> list[Values]:
    had = {totals["direction"]: totals for totals in before["handoffs"]}
    return [
        {"direction": totals["direction"], "open": totals["open"]}
        | _per_second(_HANDOFF_COUNTERS, had.get(totals["direction"], {}), totals, seconds)
        for totals in after["handoffs"]
    ]


def _per_second(names: tuple[str, ...], old: Values, new: Values, seconds: float) -> Values:
    return {f"{name}_per_s": (new[name] - old.get(name, 0)) / seconds for name in names}
