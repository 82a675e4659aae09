"""`kvtier leases`: the leases that pin blocks, with owner and remaining time."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import LeaseKind, LeaseStatus, ListLeasesRequest, ListLeasesResponse
from ..config.units import human_age, human_size, seconds_of
from .admin_client import ask, plain_console, show_answer
from .console import EXIT_USAGE, print_line, refuse
from .tables import ResponsiveTable

__all__ = ["run", "show", "to_json"]

_KINDS = {LeaseKind.LEASE_KIND_READ: "read", LeaseKind.LEASE_KIND_WRITE: "write"}


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.most < 1 << 32:
        return refuse([f"--most {options.most}: must be 0 or more"], EXIT_USAGE)

    def fetch(endpoint: Endpoint, timeout: float) -> Any:
        return ask(endpoint, "ListLeases", ListLeasesRequest(max_leases=options.most), timeout)

    def display(answer: Any, _: Endpoint) -> None:
        print_line(to_json(answer)) if options.json else show(answer)

    return show_answer(options, fetch, display)


def to_json(answer: ListLeasesResponse) -> str:
    """Returns the leases as JSON, with the fields of `kvtier/v1/admin.proto`; times in seconds."""
    return json.dumps({"total": answer.total, "leases": [_values(lease) for lease in answer.leases]}, indent=2)


def show(answer: ListLeasesResponse, console: Console | None = None) -> None:
    console = console or plain_console()
    if not answer.leases:
        console.print("no leases")
        return
    numbers = ("age", "ends in", "blocks", "size", "pending")
    table = ResponsiveTable("lease", "for", "engine", "client", "pid", "request", numbers=numbers)
    for lease in answer.leases:
        table.add_plain_row(
            str(lease.lease_id),
            _KINDS.get(lease.kind, "?"),
            lease.engine_id,
            lease.client_name,
            str(lease.pid),
            lease.request_id or "-",
            human_age(seconds_of(lease.age)),
            human_age(seconds_of(lease.remaining)),
            f"{lease.blocks:,}",
            human_size(lease.bytes),
            f"{lease.pending_blocks:,}",
        )
    console.print(table)
    if answer.total > len(answer.leases):
        console.print(f"the oldest {len(answer.leases):,} of {answer.total:,}")


def _values(lease: LeaseStatus) -> dict[str, Any]:
    values = {
        field.name: getattr(lease, field.name)
        for field in lease.DESCRIPTOR.fields
        if field.name not in ("age", "remaining", "kind")
    }
    return values | {
        "kind": _KINDS.get(lease.kind, "unknown"),
        "age_seconds": seconds_of(lease.age),
        "remaining_seconds": seconds_of(lease.remaining),
    }
