"""`kvtier explain`: what became of a request's blocks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import (
    ClaimOutcome,
    ExplainRequestRequest,
    ExplainRequestResponse,
    HoldEnd,
    HoldExplained,
    KeySpan,
    LookupExplained,
    MissReason,
)
from ...protos.v1.cache_pb2 import OffloadPolicy
from ...protos.v1.handoff_pb2 import PublishStatus
from ..config.units import human_age, seconds_of
from .admin_client import ask, inquire, plain_console
from .console import print_line
from .handoffs import DIRECTIONS

__all__ = ["run", "show", "to_json"]

_WHY = {
    "never_stored": "nobody stored them, as far as is remembered",
    "evicted": "they had to make room",
    "store_failed": "they were offered and could not be written: no room, a writer that failed, a tier that was too busy",
    "policy": "a rule kept them out",
    "below_threshold": "the prefix that was found is shorter than what the lookup called worth having",
    "format_mismatch": "they are there in another format (revision, dtype, layout, parallelism)",
    "expired": "their time was over",
    "load_failed": "a tier had them and could not give them back",
    "no_room": "a tier has them, and every slot of the CPU tier was in use",
    "reset": "the CPU tier was emptied on demand",
    "pending": "they were on their way, and had not come when the wait of the claim was over",
}

_CLAIMED = {
    "held": "it was held",
    "not_held": "nobody held it: not published in time, or ended; explain that request of that engine to see",
    "expired": "its time was over, or nearly so",
    "other_namespace": "it is held in another namespace (model, revision, dtype, layout, parallelism, tenant)",
}

_DECLINED = {
    "no_room": "holds have as much of the CPU tier as they may (handoff.part)",
    "too_many": "the tenant has as many holds as it may (handoff.max_holds)",
}

_ENDED = {
    "released": "was released",
    "expired": "expired",
    "replaced": "was replaced by another publication of its name",
    "reset": "ended with a reset",
}


def run(options: argparse.Namespace) -> int:
    """Explains a request; returns the exit code."""
    request_id: str = options.request

    def fetch(endpoint: Endpoint, timeout: float) -> Any:
        request = ExplainRequestRequest(request_id=request_id, engine_id=options.engine)
        return ask(endpoint, "ExplainRequest", request, timeout)

    def display(answer: Any, _: Endpoint) -> None:
        print_line(to_json(answer, request_id)) if options.json else show(answer, request_id)

    return inquire(options, fetch, display)


def to_json(answer: ExplainRequestResponse, request_id: str) -> str:
    """Returns the explanation as JSON."""
    return json.dumps(
        {
            "request_id": request_id,
            "engine_id": answer.engine_id,
            "age_seconds": seconds_of(answer.age),
            "finished": answer.finished,
            "incomplete_blocks": answer.incomplete_blocks,
            "policy": _policy(answer.policy) if answer.votes else None,
            "votes": [{"tier": vote.tier, "policy": _policy(vote.policy), "why": vote.why} for vote in answer.votes],
            "holds": [_hold_values(hold) for hold in answer.holds],
            "total_lookups": answer.total_lookups,
            "lookups": [_lookup_values(lookup) for lookup in answer.lookups],
        },
        indent=2,
    )


def show(answer: ExplainRequestResponse, request_id: str, console: Console | None = None) -> None:
    """Prints the explanation for people."""
    console = console or plain_console()
    state = "finished" if answer.finished else "not finished"
    heard = f"heard of {human_age(seconds_of(answer.age))} ago"
    console.print(f"request {request_id} of engine {answer.engine_id}: {state}, {heard}", markup=False)
    for vote in answer.votes:
        console.print(f"  {vote.tier} wants it {_policy(vote.policy)}: {vote.why}", markup=False)
    if answer.incomplete_blocks:
        console.print(f"  {answer.incomplete_blocks} blocks did not get where a request_level tier wanted them")
    for hold in answer.holds:
        console.print(f"  {_publication(hold)}", markup=False)
    if answer.total_lookups > len(answer.lookups):
        console.print(f"  {answer.total_lookups} lookups, the last {len(answer.lookups)} of them:")
    for lookup in answer.lookups:
        console.print(f"  {_asked(lookup)} {human_age(seconds_of(lookup.age))} ago:", markup=False)
        for line in _lines(lookup):
            console.print(f"    {line}", markup=False)


def _publication(hold: HoldExplained) -> str:
    when = f"{human_age(seconds_of(hold.age))} ago"
    what = f"{DIRECTIONS.get(hold.direction, '?')}, {hold.blocks} blocks of {hold.num_tokens} tokens"
    status = _name(PublishStatus, "PUBLISH_STATUS_", hold.status)
    if status != "published":
        return f"declined {when} ({what}): {_DECLINED.get(status, status)}"
    pending = f", {hold.pending_blocks} of them on their way" if hold.pending_blocks else ""
    claims = f"claimed {hold.claims} times, {hold.claimed_blocks} blocks" if hold.claims else "never claimed"
    end = "is held"
    if hold.end:
        name = _name(HoldEnd, "HOLD_END_", hold.end)
        end = f"{_ENDED.get(name, name)} {human_age(seconds_of(hold.end_age))} ago"
    return f"published {when} ({what}{pending}): {claims}, {end}"


def _asked(lookup: LookupExplained) -> str:
    if not lookup.claim_outcome:
        return "lookup"
    return f"claim of request {lookup.hold.request_id} of engine {lookup.hold.engine_id}"


def _lines(lookup: LookupExplained) -> Iterator[str]:
    if lookup.claim_outcome:
        outcome = _name(ClaimOutcome, "CLAIM_OUTCOME_", lookup.claim_outcome)
        yield _CLAIMED.get(outcome, outcome)
        if outcome != "held":
            return
    if lookup.unwanted_blocks:
        yield f"{lookup.unwanted_blocks} blocks of it were not wanted; of the others,"
    start = 0
    for span in lookup.spans:
        end = start + span.keys
        blocks = f"block {start}" if span.keys == 1 else f"blocks {start}-{end - 1}"
        yield f"{blocks}: {_met(span)}"
        start = end
    if lookup.first_missed_key:
        yield f"the first miss has the key {lookup.first_missed_key.hex()}"
    if not lookup.spans:
        yield "it asked for nothing"


def _met(span: KeySpan) -> str:
    match span.WhichOneof("met"):
        case "hit_tier":
            return f"hit in {span.hit_tier}"
        case "miss_reason":
            reason = _reason(span.miss_reason)
            return f"miss, {reason}: {_WHY.get(reason, 'for a reason that this kvtier does not know')}"
        case _:
            return "a tier had been asked and had not answered yet"


def _lookup_values(lookup: LookupExplained) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for span in lookup.spans:
        kind = span.WhichOneof("met")
        met: dict[str, Any] = {"deferred": True}
        if kind == "hit_tier":
            met = {"hit_tier": span.hit_tier}
        elif kind == "miss_reason":
            met = {"miss_reason": _reason(span.miss_reason)}
        spans.append({"keys": span.keys} | met)
    values = {
        "age_seconds": seconds_of(lookup.age),
        "spans": spans,
        "first_missed_key": lookup.first_missed_key.hex() or None,
    }
    return values | {"claim": _claim_values(lookup) if lookup.claim_outcome else None}


def _claim_values(lookup: LookupExplained) -> dict[str, Any]:
    return {
        "engine_id": lookup.hold.engine_id,
        "request_id": lookup.hold.request_id,
        "outcome": _name(ClaimOutcome, "CLAIM_OUTCOME_", lookup.claim_outcome),
        "unwanted_blocks": lookup.unwanted_blocks,
    }


def _hold_values(hold: HoldExplained) -> dict[str, Any]:
    names = ("num_tokens", "blocks", "pending_blocks", "claims", "claimed_blocks")
    return {
        "age_seconds": seconds_of(hold.age),
        "direction": DIRECTIONS.get(hold.direction, "unknown"),
        "status": _name(PublishStatus, "PUBLISH_STATUS_", hold.status),
        **{name: getattr(hold, name) for name in names},
        "end": _name(HoldEnd, "HOLD_END_", hold.end) if hold.end else None,
        "end_age_seconds": seconds_of(hold.end_age) if hold.end else None,
    }


def _reason(number: int) -> str:
    return _name(MissReason, "MISS_REASON_", number)


def _name(enum: Any, prefix: str, number: int) -> str:
    """Returns an enum's value in words; its number where a newer server knows more of them."""
    names: dict[int, str] = {value.number: value.name for value in enum.DESCRIPTOR.values}
    return names.get(number, f"{number}").removeprefix(prefix).lower()


def _policy(policy: OffloadPolicy) -> str:
    return OffloadPolicy.Name(policy).removeprefix("OFFLOAD_POLICY_").lower()
