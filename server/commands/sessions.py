"""`kvtier sessions`: the engine processes that are connected, and what each holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.text import Text

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_age, human_size, seconds_of
from ..telemetry import status
from .admin_client import ask_status, inquire, plain_console
from .console import print_line
from .tables import ResponsiveTable

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Lists them; returns the exit code."""

    def display(answer: Any, _: Endpoint) -> None:
        if options.json:
            print_line(json.dumps({"sessions": status.values(answer)["sessions"]}, indent=2))
        elif answer.sessions:
            plain_console().print(_table(answer))
        else:
            print_line("no sessions")

    return inquire(options, ask_status, display)


def _table(answer: GetStatusResponse) -> ResponsiveTable:
    table = ResponsiveTable("client", "engine", "rank", "pid", "transport", "region", "model", "tenant")
    for column in ("age", "last heard", "calls", "leases", "pinned", "stores", "writing"):
        table.add_column(column, justify="right")
    for session in answer.sessions:
        table.add_row(
            Text(session.client_name),
            Text(session.engine_id),
            str(session.rank) if session.HasField("rank") else "scheduler",
            str(session.pid),
            Text(session.transport),
            "mapped" if session.attached else "-",
            Text(session.model),
            Text(session.tenant or "-"),
            human_age(seconds_of(session.age)),
            human_age(seconds_of(session.idle)),
            f"{session.calls:,}",
            f"{session.leases:,}",
            f"{session.leased_blocks:,} blocks",
            f"{session.stores:,}",
            human_size(session.storing_bytes),
        )
    return table
