"""Status of a server as plain values, for `kvtier status --json` and the status page.

Field names are those of `kvtier/v1/admin.proto`. Durations are in seconds and end in `_seconds`;
ids are in hex.
"""

from __future__ import annotations

import json
from typing import Any

from ...protos.durations import seconds_of
from ...protos.v1.admin_pb2 import (
    GetStatusResponse,
    HandoffTotals,
    MissCount,
    MissReason,
    RegionStatus,
    SessionStatus,
    ShareStatus,
    TierStatus,
)
from ...protos.v1.handoff_pb2 import HandoffDirection

__all__ = ["enum_name", "hit_rate", "session_values", "tier_values", "to_json", "values"]


def to_json(answer: GetStatusResponse) -> str:
    return json.dumps(values(answer), indent=2)


def values(answer: GetStatusResponse) -> dict[str, Any]:
    return {
        "server_version": answer.server_version,
        "epoch": f"{answer.epoch:016x}",
        "uptime_seconds": seconds_of(answer.uptime),
        "pid": answer.pid,
        "protocol_versions": list(answer.protocol_versions),
        "draining": answer.draining,
        "leases": answer.leases,
        "stores": answer.stores,
        "quarantined_bytes": answer.quarantined_bytes,
        "namespaces": answer.namespaces,
        "holds": answer.holds,
        "held_bytes": answer.held_bytes,
        "handoffs": [_handoff_values(totals) for totals in answer.handoffs],
        "lookup_keys": answer.lookup_keys,
        "lookup_misses": answer.lookup_misses,
        "misses": [_miss_values(miss) for miss in answer.misses],
        "loop_lag_seconds": seconds_of(answer.loop_lag),
        "region": _region_values(answer.region),
        "tiers": [tier_values(tier) for tier in answer.tiers],
        "sessions": [session_values(session) for session in answer.sessions],
        "downgrades": [
            {"feature": each.feature, "cause": each.cause, "remedy": each.remedy} for each in answer.downgrades
        ],
    }


def hit_rate(tier: TierStatus) -> float | None:
    """Returns the fraction of looked-up keys that the tier had; None if there was no lookup."""
    asked = tier.hits + tier.misses
    return tier.hits / asked if asked else None


def tier_values(tier: TierStatus) -> dict[str, Any]:
    values = {field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields}
    return values | {
        "shares": [_share_values(share) for share in tier.shares],
        "estimates": [{"scale": it.scale, "hit_rate": it.hit_ratio} for it in tier.estimates],
        "free_disk_bytes": tier.free_disk_bytes if tier.HasField("free_disk_bytes") else None,
        "fill": tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0,
        "hit_rate": hit_rate(tier),
    }


def session_values(session: SessionStatus) -> dict[str, Any]:
    shown = [field.name for field in session.DESCRIPTOR.fields if field.name not in ("age", "idle", "groups")]
    return {name: getattr(session, name) for name in shown} | {
        "groups": [{"block_tokens": group.block_tokens, "part_bytes": group.part_bytes} for group in session.groups],
        "rank": session.rank if session.HasField("rank") else None,
        "namespace_id": session.namespace_id.hex(),
        "age_seconds": seconds_of(session.age),
        "idle_seconds": seconds_of(session.idle),
    }


def _share_values(share: ShareStatus) -> dict[str, Any]:
    values = {field.name: getattr(share, field.name) for field in share.DESCRIPTOR.fields}
    return values | {"limit_bytes": share.limit_bytes if share.HasField("limit_bytes") else None}


def _region_values(region: RegionStatus) -> dict[str, Any]:
    values = {field.name: getattr(region, field.name) for field in region.DESCRIPTOR.fields}
    return values | {"memory_nodes": list(region.memory_nodes)}


def _miss_values(miss: MissCount) -> dict[str, Any]:
    return {"reason": enum_name(MissReason.DESCRIPTOR, miss.reason), "keys": miss.keys}


def _handoff_values(totals: HandoffTotals) -> dict[str, Any]:
    shown = [field.name for field in totals.DESCRIPTOR.fields if field.name not in ("direction", "held_time")]
    return {"direction": enum_name(HandoffDirection.DESCRIPTOR, totals.direction)} | {
        **{name: getattr(totals, name) for name in shown},
        "held_time_seconds": seconds_of(totals.held_time),
    }


def enum_name(enum: Any, number: int) -> str:
    """Returns the name of a value of an `EnumDescriptor` as in metrics, its number if unknown.

    The prefix of the names is that of the value 0, which ends in UNSPECIFIED.
    """
    prefix: str = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return f"{number}" if value is None else value.name.removeprefix(prefix).lower()
