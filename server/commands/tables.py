"""What several commands show of a server's status."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_age, human_size, seconds_of
from ..telemetry.status import hit_rate
from .table import Sheet

__all__ = ["print_troubles", "sessions", "shares", "tiers"]


def print_troubles(answer: GetStatusResponse, console: Console) -> None:
    """Prints a line for each tier with which not all is well."""
    for tier in answer.tiers:
        if not tier.healthy:
            console.print(f"{tier.name}: {tier.trouble or 'in trouble'}", style="red", markup=False)


def tiers(answer: GetStatusResponse) -> Sheet:
    """Returns the tiers, a line each."""
    table = Sheet("tier", "type", title="tiers", title_justify="left")
    for column in ("used", "of", "fill", "blocks", "hits", "misses", "hit rate", "evicted", "damaged", "jobs"):
        table.add_column(column, justify="right")
    table.add_column("health")
    for tier in answer.tiers:
        capacity = human_size(tier.capacity_bytes)
        if tier.available_bytes < tier.capacity_bytes:
            capacity += f" ({human_size(tier.available_bytes)} ready)"
        fill = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0
        rate = hit_rate(tier)
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


def shares(answer: GetStatusResponse) -> Sheet:
    """Returns who has what of each tier."""
    table = Sheet("tenant", "tier", title="tenants", title_justify="left")
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


def sessions(answer: GetStatusResponse) -> Sheet:
    """Returns who is there, a line each."""
    columns = ("client", "engine", "rank", "transport", "model", "pid", "age", "region")
    table = Sheet(*columns, title="sessions", title_justify="left")
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
