"""What `kvtier status` asks of a server, and how it shows the answer."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines would stand beside ours

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..protos.endpoint import Endpoint
from ..protos.reasons import reason_of
from ..protos.v1.admin_pb2 import GetStatusRequest, GetStatusResponse, SessionStatus, TierStatus
from ..protos.v1.admin_pb2_grpc import AdminServiceStub
from .units import human_size

__all__ = ["StatusError", "UnreachableError", "explain", "fetch", "show", "to_json"]

_PLAIN_WIDTH = 140


class StatusError(Exception):
    """A server answered, but not with its status; one line."""


class UnreachableError(StatusError):
    """No server answered in time; one line."""


def fetch(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    """Asks a server for its status, for at most `timeout` seconds. Raises `StatusError`."""
    # A proxy that is meant for the web has no business between us and the server.
    with grpc.insecure_channel(endpoint.target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            stub = AdminServiceStub(channel)
            answer: GetStatusResponse = stub.GetStatus(GetStatusRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise explain(error, endpoint, timeout) from None
        return answer


def to_json(answer: GetStatusResponse) -> str:
    """Returns the status as JSON: fields as in `kvtier/v1/admin.proto`, durations in seconds, the epoch in hex."""
    status = {
        "server_version": answer.server_version,
        "epoch": f"{answer.epoch:016x}",
        "uptime_seconds": _seconds(answer.uptime),
        "draining": answer.draining,
        "leases": answer.leases,
        "stores": answer.stores,
        "quarantined_bytes": answer.quarantined_bytes,
        "namespaces": answer.namespaces,
        "tiers": [_tier_values(tier) for tier in answer.tiers],
        "sessions": [_session_values(session) for session in answer.sessions],
    }
    return json.dumps(status, indent=2)


def show(answer: GetStatusResponse, endpoint: Endpoint, console: Console | None = None) -> None:
    """Prints the status for people."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
    state = "draining" if answer.draining else f"up {_age(_seconds(answer.uptime))}"
    console.print(f"kvtier {answer.server_version} at {endpoint}, {state}, epoch {answer.epoch:016x}", markup=False)
    console.print(_tiers_table(answer))
    for tier in answer.tiers:
        if not tier.healthy:
            console.print(f"{tier.name}: {tier.trouble or 'in trouble'}", style="red", markup=False)
    if answer.sessions:
        console.print(_sessions_table(answer))
    else:
        console.print("no sessions")
    quarantined = f", {human_size(answer.quarantined_bytes)} in quarantine" if answer.quarantined_bytes else ""
    console.print(
        f"{answer.leases} leases, {answer.stores} stores in flight, {answer.namespaces} namespaces{quarantined}"
    )


def explain(error: grpc.RpcError, endpoint: Endpoint, timeout: float) -> StatusError:
    """Returns what to say of a call that failed."""
    code, details = error.code(), (error.details() or "").partition("\n")[0]
    if reason_of(error.trailing_metadata()) is not None:
        return StatusError(f"{endpoint}: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"no answer from {endpoint} within {timeout:g} s")
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(f"no server answers at {endpoint}; is `kvtier serve` running there?")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return StatusError(f"{endpoint} is a gRPC server, but not kvtier's")
    return StatusError(f"{endpoint}: {code.name}: {details}")


def _seconds(duration: Any) -> float:
    return float(duration.seconds) + float(duration.nanos) / 1e9


def _rate(tier: TierStatus) -> float | None:
    asked = tier.hits + tier.misses
    return tier.hits / asked if asked else None


def _tier_values(tier: TierStatus) -> dict[str, Any]:
    values = {field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields}
    return values | {
        "fill": tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0,
        "hit_rate": _rate(tier),
    }


def _session_values(session: SessionStatus) -> dict[str, Any]:
    values = {field.name: getattr(session, field.name) for field in session.DESCRIPTOR.fields if field.name != "age"}
    return values | {
        "rank": session.rank if session.HasField("rank") else None,
        "age_seconds": _seconds(session.age),
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
            _age(_seconds(session.age)),
            "mapped" if session.attached else "-",
        )
    return table


def _age(seconds: float) -> str:
    """Returns a time span in its two largest units: "2 h 5 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
