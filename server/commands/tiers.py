"""`kvtier tiers`: what the tiers hold, for whom, what waits for them, and where the CPU tier's memory is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.text import Text

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_size
from ..telemetry import status
from . import tables
from .admin_client import ask_status, inquire, plain_console
from .console import print_line
from .tables import ResponsiveTable

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Shows them; returns the exit code."""

    def display(answer: Any, _: Endpoint) -> None:
        if options.json:
            values = status.values(answer)
            print_line(json.dumps({name: values[name] for name in ("tiers", "region", "quarantined_bytes")}, indent=2))
            return
        console = plain_console()
        console.print(tables.tiers(answer))
        console.print(_behind(answer))
        tables.print_troubles(answer, console)
        console.print(tables.shares(answer))
        console.print(_placement(answer), markup=False)

    return inquire(options, ask_status, display)


def _behind(answer: GetStatusResponse) -> ResponsiveTable:
    table = ResponsiveTable("tier", title="what waits, and what was left out", title_justify="left")
    for column in ("jobs", "queued", "dropped", "declined", "expired", "not retained"):
        table.add_column(column, justify="right")
    for tier in answer.tiers:
        counts = (tier.dropped_blocks, tier.declined, tier.expired, tier.not_retained)
        table.add_row(
            Text(tier.name), f"{tier.jobs:,}", human_size(tier.queued_bytes), *(f"{count:,}" for count in counts)
        )
    return table


def _placement(answer: GetStatusResponse) -> str:
    """Returns where the memory is, in a line."""
    region = answer.region
    huge = region.huge_bytes / region.backed_bytes if region.backed_bytes else 0
    nodes = ", ".join(map(str, region.memory_nodes))
    where = f"spread over memory nodes {nodes}" if nodes else "on one memory node, or as the kernel likes"
    if region.misplaced:
        where = f"as the kernel likes: {region.misplaced}"
    backed = f"{human_size(region.backed_bytes)} of {human_size(region.size_bytes)} backed"
    quarantined = f"; {human_size(answer.quarantined_bytes)} in quarantine" if answer.quarantined_bytes else ""
    return f"memory: {backed}, {huge:.0%} of it on huge pages, {where}{quarantined}"
