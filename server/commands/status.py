"""`kvtier status`: the server at a glance."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_age, human_size, seconds_of
from ..telemetry import status
from . import tables
from .admin_client import ask_status, inquire, plain_console
from .console import print_line

__all__ = ["run", "show"]


def run(options: argparse.Namespace) -> int:
    """Shows it; returns the exit code."""

    def display(answer: Any, endpoint: Endpoint) -> None:
        print_line(status.to_json(answer)) if options.json else show(answer, endpoint)

    return inquire(options, ask_status, display)


def show(answer: GetStatusResponse, endpoint: Endpoint, console: Console | None = None) -> None:
    """Prints the status for people."""
    console = console or plain_console()
    state = "draining" if answer.draining else f"up {human_age(seconds_of(answer.uptime))}"
    console.print(f"kvtier {answer.server_version} at {endpoint}, {state}, epoch {answer.epoch:016x}", markup=False)
    console.print(tables.tiers(answer))
    tables.print_troubles(answer, console)
    if any(len(tier.shares) > 1 for tier in answer.tiers):
        console.print(tables.shares(answer))
    if answer.sessions:
        console.print(tables.sessions(answer))
    else:
        console.print("no sessions")
    quarantined = f", {human_size(answer.quarantined_bytes)} in quarantine" if answer.quarantined_bytes else ""
    console.print(
        f"{answer.leases} leases, {answer.stores} stores in flight, {answer.namespaces} namespaces{quarantined}"
    )
