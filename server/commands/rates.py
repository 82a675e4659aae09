"""What a server did between two looks at its status. Pure."""

from __future__ import annotations

from typing import Any

__all__ = ["rates"]

_TIER_COUNTERS = ("hits", "misses", "evictions", "expired", "dropped_blocks", "damaged_blocks", "used_bytes")
_TIER_VALUES = ("name", "type", "used_bytes", "capacity_bytes", "fill", "jobs", "queued_bytes", "healthy", "trouble")
_SESSION_VALUES = (
    "client_name",
    "engine_id",
    "rank",
    "pid",
    "transport",
    "model",
    "tenant",
    "leases",
    "leased_blocks",
    "stores",
    "storing_bytes",
    "idle_seconds",
)
_VALUES = ("server_version", "epoch", "uptime_seconds", "draining", "leases", "stores", "holds", "loop_lag_seconds")


def rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns figures per second, named `…_per_s`, beside those of the later look, of two looks (`status.values`) of one epoch.

    A hit ratio is of the interval, and None where nothing was asked. Sessions are in the order of their calls.
    """
    keys, misses = (after[name] - before[name] for name in ("lookup_keys", "lookup_misses"))
    return {name: after[name] for name in _VALUES} | {
        "interval_seconds": seconds,
        "lookup_keys_per_s": keys / seconds,
        "hit_ratio": 1 - misses / keys if keys else None,
        "tiers": [_tier(old, new, seconds) for old, new in zip(before["tiers"], after["tiers"], strict=True)],
        "tenants": list(_tenants(before, after, seconds)),
        "sessions": sorted(_sessions(before, after, seconds), key=lambda session: -session["calls_per_s"]),
    }


def _tier(old: dict[str, Any], new: dict[str, Any], seconds: float) -> dict[str, Any]:
    hits, misses = new["hits"] - old["hits"], new["misses"] - old["misses"]
    per_second = {f"{name}_per_s": (new[name] - old[name]) / seconds for name in _TIER_COUNTERS}
    ratio = {"hit_ratio": hits / (hits + misses) if hits + misses else None}
    return {name: new[name] for name in _TIER_VALUES} | per_second | ratio


def _tenants(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Returns who has what of each tier, those that have most first."""
    had = {(tier["name"], share["tenant"]): share["used_bytes"] for tier in before["tiers"] for share in tier["shares"]}
    shares = [
        {"tenant": share["tenant"], "tier": tier["name"]}
        | {name: share[name] for name in ("used_bytes", "quota_bytes", "retained_bytes")}
        | {"used_bytes_per_s": (share["used_bytes"] - had.get((tier["name"], share["tenant"]), 0)) / seconds}
        for tier in after["tiers"]
        for share in tier["shares"]
    ]
    return sorted(shares, key=lambda share: -share["used_bytes"])


def _sessions(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    had = {_name(session): session["calls"] for session in before["sessions"]}
    return [
        {name: session[name] for name in _SESSION_VALUES}
        | {"calls_per_s": max(0, session["calls"] - had.get(_name(session), 0)) / seconds}
        for session in after["sessions"]
    ]


def _name(session: dict[str, Any]) -> tuple[Any, ...]:
    return session["namespace_id"], session["engine_id"], session["rank"], session["pid"], session["client_name"]
