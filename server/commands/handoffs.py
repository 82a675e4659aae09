"""`kvtier handoffs`: the requests held for another engine, and totals since the server's start."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...protos.durations import seconds_of
from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import ClaimOutcome, ListHandoffsRequest, ListHandoffsResponse, MissedClaims
from ...protos.v1.handoff_pb2 import HandoffDirection
from ..config.units import human_age, human_size
from ..telemetry.status import enum_name
from .admin_client import ask, json_values, plain_console, show_answer
from .tables import ResponsiveTable

__all__ = ["direction_text", "run", "to_json", "values"]


_NOT_PULLED = {
    "not_held": "without a hold",
    "expired": "with an expired hold",
    "other_namespace": "held in another namespace (tensor parallelism, dtype or revision differs)",
    "peer_not_listed": "held by a server that the engine's `peers` do not name",
    "nothing_held": "of which the other engine holds nothing",
}
"""Why requests were computed instead of pulled, by outcome of the claim."""


def run(options: argparse.Namespace) -> int:
    request = ListHandoffsRequest(max_handoffs=options.most)
    return show_answer(
        options, lambda endpoint, timeout: ask(endpoint, "ListHandoffs", request, timeout), to_json, _show
    )


def direction_text(direction: HandoffDirection) -> str:
    """Returns the direction for people: "prefill to decode"."""
    return enum_name(HandoffDirection.DESCRIPTOR, direction).replace("_", " ")


def to_json(answer: ListHandoffsResponse) -> str:
    return json.dumps(values(answer), indent=2)


def values(answer: ListHandoffsResponse) -> dict[str, Any]:
    """Returns the holds with the fields of `kvtier/v1/admin.proto`; times in seconds."""
    return {
        "total": answer.total,
        "held_bytes": answer.held_bytes,
        "handoffs": [json_values(hold) for hold in answer.handoffs],
        "missed_claims": {_outcome(missed): missed.claims for missed in answer.missed_claims},
        "totals": [json_values(totals) for totals in answer.totals],
    }


def _show(answer: ListHandoffsResponse, _: Endpoint) -> None:
    console = plain_console()
    console.print(_holds(answer) if answer.handoffs else "no request is held")
    if answer.total > len(answer.handoffs):
        console.print(f"the oldest {len(answer.handoffs):,} of {answer.total:,}")
    if any(totals.published or totals.declined for totals in answer.totals):
        console.print(_totals(answer))
        console.print(f"holds pin {human_size(answer.held_bytes)} of the CPU tier")
    if answer.missed_claims:
        console.print(f"computed instead of pulled since start: {_missed(answer)}", soft_wrap=True)


def _holds(answer: ListHandoffsResponse) -> ResponsiveTable:
    numbers = ("tokens", "blocks", "size", "pending", "claims", "age", "ends in")
    table = ResponsiveTable("engine", "request", "direction", "tenant", numbers=numbers)
    for hold in answer.handoffs:
        table.add_row(
            hold.engine_id,
            hold.request_id,
            direction_text(hold.direction),
            hold.tenant or "-",
            f"{hold.num_tokens:,}",
            f"{hold.blocks:,}",
            human_size(hold.bytes),
            f"{hold.pending_blocks:,}",
            f"{hold.claims:,}",
            human_age(seconds_of(hold.age)),
            human_age(seconds_of(hold.remaining)),
        )
    return table


def _missed(answer: ListHandoffsResponse) -> str:
    claims = sorted(answer.missed_claims, key=lambda missed: -missed.claims)
    return ", ".join(f"{missed.claims:,} {_NOT_PULLED.get(_outcome(missed), _outcome(missed))}" for missed in claims)


def _outcome(missed: MissedClaims) -> str:
    return enum_name(ClaimOutcome.DESCRIPTOR, missed.outcome)


def _totals(answer: ListHandoffsResponse) -> ResponsiveTable:
    numbers = ("held", "declined", "claims", "bytes claimed", "released", "expired", "dropped")
    table = ResponsiveTable("since start", numbers=numbers)
    for totals in answer.totals:
        table.add_row(
            direction_text(totals.direction),
            f"{totals.published:,}",
            f"{totals.declined:,}",
            f"{totals.claimed:,}",
            human_size(totals.claimed_bytes),
            f"{totals.released:,}",
            f"{totals.expired:,}",
            f"{totals.dropped:,}",
        )
    return table
