"""`kvtier leases`: leases and running stores, with owner and remaining time."""

from __future__ import annotations

import argparse
import json

from ...protos.durations import seconds_of
from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import LeaseKind, ListLeasesRequest, ListLeasesResponse
from ..config.units import human_age, human_size
from ..telemetry.status import enum_name
from .admin_client import ask, json_values, plain_console, show_answer
from .tables import ResponsiveTable

__all__ = ["run", "to_json"]


def run(options: argparse.Namespace) -> int:
    request = ListLeasesRequest(max_leases=options.most)
    return show_answer(options, lambda endpoint, timeout: ask(endpoint, "ListLeases", request, timeout), to_json, _show)


def to_json(answer: ListLeasesResponse) -> str:
    """Returns the leases as JSON, with the fields of `kvtier/v1/admin.proto`; times in seconds."""
    leases = [json_values(lease) for lease in answer.leases]
    return json.dumps({"total": answer.total, "leases": leases}, indent=2)


def _show(answer: ListLeasesResponse, _: Endpoint) -> None:
    console = plain_console()
    if not answer.leases:
        console.print("no leases")
        return
    numbers = ("age", "ends in", "blocks", "size", "pending")
    table = ResponsiveTable("lease", "for", "engine", "client", "pid", "request", numbers=numbers)
    for lease in answer.leases:
        table.add_row(
            str(lease.lease_id),
            enum_name(LeaseKind.DESCRIPTOR, lease.kind),
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
