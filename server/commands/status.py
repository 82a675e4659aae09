"""`kvtier status`, `kvtier tiers` and `kvtier sessions`: three views of a server's status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from ...protos.durations import seconds_of
from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_age, human_size
from ..telemetry import status
from .admin_client import ask_status, plain_console, show_answer
from .tables import ResponsiveTable

__all__ = ["run", "show"]


def run(options: argparse.Namespace) -> int:
    if options.command == "status":
        return show_answer(options, ask_status, status.to_json, show)
    if options.command == "tiers":
        return show_answer(
            options, ask_status, partial(_to_json, ("tiers", "region", "quarantined_bytes")), _show_tiers
        )
    return show_answer(options, ask_status, partial(_to_json, ("sessions",)), _show_sessions)


def _to_json(names: Sequence[str], answer: GetStatusResponse) -> str:
    values = status.values(answer)
    return json.dumps({name: values[name] for name in names}, indent=2)


def show(answer: GetStatusResponse, endpoint: Endpoint, console: Console | None = None) -> None:
    console = console or plain_console()
    state = "draining" if answer.draining else f"up {human_age(seconds_of(answer.uptime))}"
    console.print(f"kvtier {answer.server_version} at {endpoint}, {state}, epoch {answer.epoch:016x}")
    console.print(_tiers(answer))
    _print_troubles(answer, console)
    if any(len(tier.shares) > 1 for tier in answer.tiers):
        console.print(_shares(answer))
    console.print(_session_summary(answer) if answer.sessions else "no sessions")
    counts = f"{answer.leases} leases, {answer.stores} stores in flight, {answer.namespaces} namespaces"
    console.print(f"{counts}{_quarantined(', ', answer)}")


def _print_troubles(answer: GetStatusResponse, console: Console) -> None:
    for tier in answer.tiers:
        if not tier.healthy:
            console.print(f"{tier.name}: {tier.trouble or 'in trouble'}", style="red")
    for each in answer.downgrades:
        console.print(f"warning: {each.feature}: {each.cause}", style="yellow")
        if each.remedy:
            console.print(f"         do: {each.remedy}")


def _tiers(answer: GetStatusResponse) -> ResponsiveTable:
    numbers = ("used", "of", "fill", "blocks", "hits", "misses", "hit rate", "evicted", "damaged", "jobs")
    table = ResponsiveTable("tier", "type", numbers=numbers, title="tiers")
    table.add_column("health")
    for tier in answer.tiers:
        capacity = human_size(tier.capacity_bytes)
        if tier.available_bytes < tier.capacity_bytes:
            capacity += f" ({human_size(tier.available_bytes)} ready)"
        fill = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0
        rate = status.hit_rate(tier)
        table.add_row(
            tier.name,
            tier.type,
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


def _shares(answer: GetStatusResponse) -> ResponsiveTable:
    """Returns the space of each tenant in each tier."""
    table = ResponsiveTable("tenant", "tier", numbers=("used", "quota", "limit", "retained"), title="tenants")
    for tier in answer.tiers:
        for share in tier.shares:
            table.add_row(
                share.tenant or "(the rest)",
                tier.name,
                human_size(share.used_bytes),
                human_size(share.quota_bytes) if share.quota_bytes else "-",
                human_size(share.limit_bytes) if share.HasField("limit_bytes") else "-",
                human_size(share.retained_bytes),
            )
    return table


def _session_summary(answer: GetStatusResponse) -> ResponsiveTable:
    columns = ("client", "engine", "rank", "transport", "model", "pid", "age", "region")
    table = ResponsiveTable(*columns, title="sessions")
    for session in answer.sessions:
        table.add_row(
            session.client_name,
            session.engine_id,
            str(session.rank) if session.HasField("rank") else "scheduler",
            session.transport,
            session.model,
            str(session.pid),
            human_age(seconds_of(session.age)),
            "mapped" if session.attached else "-",
        )
    return table


def _show_tiers(answer: GetStatusResponse, _: Endpoint) -> None:
    console = plain_console()
    console.print(_tiers(answer))
    console.print(_queues(answer))
    console.print(_traffic(answer))
    _print_troubles(answer, console)
    console.print(_shares(answer))
    console.print(_placement(answer))


def _queues(answer: GetStatusResponse) -> ResponsiveTable:
    numbers = ("jobs", "queued", "dropped", "declined", "expired", "not retained")
    table = ResponsiveTable(
        "tier", numbers=numbers, title="queues, and blocks that were refused, expired or not retained"
    )
    for tier in answer.tiers:
        counts = (tier.dropped_blocks, tier.declined, tier.expired, tier.not_retained)
        table.add_row(tier.name, f"{tier.jobs:,}", human_size(tier.queued_bytes), *(f"{n:,}" for n in counts))
    return table


def _traffic(answer: GetStatusResponse) -> ResponsiveTable:
    table = ResponsiveTable("tier", numbers=("stored", "loaded", "disk free"), title="bytes since start, and free disk")
    for tier in answer.tiers:
        free = human_size(tier.free_disk_bytes) if tier.HasField("free_disk_bytes") else "-"
        table.add_row(tier.name, human_size(tier.stored_bytes), human_size(tier.loaded_bytes), free)
    return table


def _placement(answer: GetStatusResponse) -> str:
    """Returns a line about the region's memory: backing, huge pages and NUMA nodes."""
    region = answer.region
    huge = region.huge_bytes / region.backed_bytes if region.backed_bytes else 0
    nodes = ", ".join(map(str, region.memory_nodes))
    where = f"spread over memory nodes {nodes}" if nodes else "not spread (one memory node, or numa = off)"
    if region.misplaced:
        where = f"placed by the kernel, because the request for memory nodes failed: {region.misplaced}"
    backed = f"{human_size(region.backed_bytes)} of {human_size(region.size_bytes)} backed"
    return f"memory: {backed}, {huge:.0%} of it on huge pages, {where}{_quarantined('; ', answer)}"


def _quarantined(separator: str, answer: GetStatusResponse) -> str:
    return f"{separator}{human_size(answer.quarantined_bytes)} in quarantine" if answer.quarantined_bytes else ""


def _show_sessions(answer: GetStatusResponse, _: Endpoint) -> None:
    plain_console().print(_sessions(answer) if answer.sessions else "no sessions")


def _sessions(answer: GetStatusResponse) -> ResponsiveTable:
    names = ("client", "engine", "rank", "pid", "transport", "region", "model", "tenant")
    table = ResponsiveTable(*names, numbers=("age", "last heard", "calls", "leases", "pinned", "stores", "writing"))
    for session in answer.sessions:
        table.add_row(
            session.client_name,
            session.engine_id,
            str(session.rank) if session.HasField("rank") else "scheduler",
            str(session.pid),
            session.transport,
            "mapped" if session.attached else "-",
            session.model,
            session.tenant or "-",
            human_age(seconds_of(session.age)),
            human_age(seconds_of(session.idle)),
            f"{session.calls:,}",
            f"{session.leases:,}",
            f"{session.leased_blocks:,} blocks",
            f"{session.stores:,}",
            human_size(session.storing_bytes),
        )
    return table
