"""What `kvtier status` asks of a server, and how it shows the answer."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..protos.endpoint import Endpoint
from ..protos.v1.admin_pb2 import GetStatusRequest, GetStatusResponse, SessionStatus, ShareStatus, TierStatus
from .inquiry import ask, human_age, plain_console, seconds_of
from .units import human_size

__all__ = ["fetch", "show", "to_json"]


def fetch(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    """Asks a server for its status, for at most `timeout` seconds. Raises `InquiryError`."""
    answer: GetStatusResponse = ask(endpoint, "GetStatus", GetStatusRequest(), timeout)
    return answer


def to_json(answer: GetStatusResponse) -> str:
    """Returns the status as JSON: fields as in `kvtier/v1/admin.proto`, durations in seconds, the epoch in hex."""
    status = {
        "server_version": answer.server_version,
        "epoch": f"{answer.epoch:016x}",
        "uptime_seconds": seconds_of(answer.uptime),
        "draining": answer.draining,
        "leases": answer.leases,
        "stores": answer.stores,
        "quarantined_bytes": answer.quarantined_bytes,
        "namespaces": answer.namespaces,
        "holds": answer.holds,
        "tiers": [_tier_values(tier) for tier in answer.tiers],
        "sessions": [_session_values(session) for session in answer.sessions],
    }
    return json.dumps(status, indent=2)


def show(answer: GetStatusResponse, endpoint: Endpoint, console: Console | None = None) -> None:
    """Prints the status for people."""
    console = console or plain_console()
    state = "draining" if answer.draining else f"up {human_age(seconds_of(answer.uptime))}"
    console.print(f"kvtier {answer.server_version} at {endpoint}, {state}, epoch {answer.epoch:016x}", markup=False)
    console.print(_tiers_table(answer))
    for tier in answer.tiers:
        if not tier.healthy:
            console.print(f"{tier.name}: {tier.trouble or 'in trouble'}", style="red", markup=False)
    if any(len(tier.shares) > 1 for tier in answer.tiers):
        console.print(_shares_table(answer))
    if answer.sessions:
        console.print(_sessions_table(answer))
    else:
        console.print("no sessions")
    quarantined = f", {human_size(answer.quarantined_bytes)} in quarantine" if answer.quarantined_bytes else ""
    console.print(
        f"{answer.leases} leases, {answer.stores} stores in flight, {answer.namespaces} namespaces{quarantined}"
    )


def _rate(tier: TierStatus) -> float | None:
    asked = tier.hits + tier.misses
    return tier.hits / asked if asked else None


def _tier_values(tier: TierStatus) -> dict[str, Any]:
    values = {field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields}
    return values | {
        "shares": [_share_values(share) for share in tier.shares],
        "fill": tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0,
        "hit_rate": _rate(tier),
    }


def _share_values(share: ShareStatus) -> dict[str, Any]:
    values = {field.name: getattr(share, field.name) for field in share.DESCRIPTOR.fields}
    return values | {"limit_bytes": share.limit_bytes if share.HasField("limit_bytes") else None}


def _session_values(session: SessionStatus) -> dict[str, Any]:
    shown = [field.name for field in session.DESCRIPTOR.fields if field.name not in ("age", "groups")]
    return {name: getattr(session, name) for name in shown} | {
        "groups": [{"block_tokens": group.block_tokens, "part_bytes": group.part_bytes} for group in session.groups],
        "rank": session.rank if session.HasField("rank") else None,
        "age_seconds": seconds_of(session.age),
    }


def _tiers_table(answer: GetStatusResponse) -> Table:
    table = Table("tier", "type", title="tiers", title_justify="left")
    for column in ("used", "of", "fill", "blocks", "hits", "misses", "hit rate", "evicted", "damaged", "jobs"):
        table.add_column(column, justify="right")
    table.add_column("health")
    for tier in answer.tiers:
        capacity = human_size(tier.capacity_bytes)
        if tier.available_bytes < tier.capacity_bytes:
            capacity += f" ({human_size(tier.available_bytes)} ready)"
        fill = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0
        rate = _rate(tier)
        table.add_row(
            Text(tier.name),
            Text(tier.type),
            human_size(tier.used_bytes),
            capacity,
            f"{fill:.1%}",
            f"{tier.blocks:,}",
            f"{tier.hits:,}",
            f"{tier.misses:,}",
            "-" if rate is None else f"{rate:.1%}",
            f"{tier.evictions:,}",
            f"{tier.damaged_blocks:,}",
            f"{tier.jobs:,}",
            "ok" if tier.healthy else "trouble",
        )
    return table


def _shares_table(answer: GetStatusResponse) -> Table:
    table = Table("tenant", "tier", title="tenants", title_justify="left")
    for column in ("used", "quota", "limit", "retained"):
        table.add_column(column, justify="right")
    for tier in answer.tiers:
        for share in tier.shares:
            table.add_row(
                Text(share.tenant or "(the rest)"),
                Text(tier.name),
                human_size(share.used_bytes),
                human_size(share.quota_bytes) if share.quota_bytes else "-",
                human_size(share.limit_bytes) if share.HasField("limit_bytes") else "-",
                human_size(share.retained_bytes),
            )
    return table


def _sessions_table(answer: GetStatusResponse) -> Table:
    columns = ("client", "engine", "rank", "transport", "model", "pid", "age", "region")
    table = Table(*columns, title="sessions", title_justify="left")
    for session in answer.sessions:
        table.add_row(
            Text(session.client_name),
            Text(session.engine_id),
            str(session.rank) if session.HasField("rank") else "scheduler",
            Text(session.transport),
            Text(session.model),
            str(session.pid),
            human_age(seconds_of(session.age)),
            "mapped" if session.attached else "-",
        )
    return table
