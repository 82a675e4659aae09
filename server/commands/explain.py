"""`kvtier explain`: why blocks of a recent request were hits or misses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ...protos.durations import seconds_of
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
from ...protos.v1.handoff_pb2 import HandoffDirection, PublishStatus
from ..config.units import human_age
from ..telemetry.status import enum_name
from .admin_client import ask, plain_console, show_answer
from .handoffs import direction_text

__all__ = ["run", "to_json"]

_WHY = {
    "never_stored": "the server has no record of a store of these blocks",
    "evicted": "the blocks were evicted to make room",
    "store_failed": "the store failed: no free space, a failed writer, or an overloaded tier",
    "policy": "a rule excluded the blocks, or the tier declined them because its eviction policy valued others more",
    "below_threshold": "the prefix found is shorter than the minimum that the lookup asked for",
    "format_mismatch": "the blocks are stored in another format (revision, dtype, layout, parallelism)",
    "expired": "the blocks were unused for longer than the tier's ttl",
    "load_failed": "a tier had the blocks, but the load failed",
    "no_room": "a tier has the blocks, but every slot of the CPU tier was in use",
    "reset": "the CPU tier was reset",
    "damaged": "the bytes in memory did not match their digest, so the server removed the blocks",
    "pending": "a store of the blocks was still running when the claim stopped waiting, or the lookup's lease had ended",
}

_CLAIMED = {
    "held": "the hold was found",
    "not_held": "there was no hold: it was not published in time, or had ended; run kvtier explain for the claimed request",
    "expired": "the hold had expired, or was about to expire",
    "other_namespace": "the hold is in another namespace (model, revision, dtype, layout, parallelism, tenant)",
    "peer_not_listed": "not claimed: the engine's settings (`peers`) do not name the server of the hold",
    "nothing_held": "not claimed: the other engine holds no blocks of the request",
}


_DECLINED = {
    "no_room": "the holds have reached their fraction of the CPU tier (handoff.part)",
    "too_many": "the tenant has reached its limit of holds (handoff.max_holds)",
}

_ENDED = {
    "released": "was released",
    "expired": "expired",
    "replaced": "was replaced by a later publication of the request",
    "reset": "was ended by a reset",
}


def run(options: argparse.Namespace) -> int:
    request = ExplainRequestRequest(request_id=options.request, engine_id=options.engine)
    return show_answer(
        options,
        lambda endpoint, timeout: ask(endpoint, "ExplainRequest", request, timeout),
        lambda answer: to_json(answer, options.request),
        lambda answer, _: _show(answer, options.request),
    )


def to_json(answer: ExplainRequestResponse, request_id: str) -> str:
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


def _show(answer: ExplainRequestResponse, request_id: str) -> None:
    console = plain_console()
    state = "finished" if answer.finished else "not finished"
    heard = f"last seen {human_age(seconds_of(answer.age))} ago"
    console.print(f"request {request_id} of engine {answer.engine_id}: {state}, {heard}")
    for vote in answer.votes:
        console.print(f"  {vote.tier} votes for {_policy(vote.policy)}: {vote.why}")
    if answer.incomplete_blocks:
        console.print(f"  {answer.incomplete_blocks} blocks did not reach a request_level tier")
    for hold in answer.holds:
        console.print(f"  {_publication(hold)}")
    if answer.total_lookups > len(answer.lookups):
        console.print(f"  the last {len(answer.lookups)} of {answer.total_lookups} lookups:")
    for lookup in answer.lookups:
        claimed = f"claim of request {lookup.hold.request_id} of engine {lookup.hold.engine_id}"
        kind = claimed if lookup.claim_outcome else "lookup"
        console.print(f"  {kind} {human_age(seconds_of(lookup.age))} ago:")
        for line in _lines(lookup):
            console.print(f"    {line}")


def _publication(hold: HoldExplained) -> str:
    when = f"{human_age(seconds_of(hold.age))} ago"
    what = f"{direction_text(hold.direction)}, {hold.blocks} blocks of {hold.num_tokens} tokens"
    status = enum_name(PublishStatus.DESCRIPTOR, hold.status)
    if status != "published":
        return f"declined {when} ({what}): {_DECLINED.get(status, status)}"
    pending = f", {hold.pending_blocks} of them not yet stored" if hold.pending_blocks else ""
    claims = f"claimed {hold.claims} times, {hold.claimed_blocks} blocks" if hold.claims else "never claimed"
    end = "is still held"
    if hold.end:
        name = enum_name(HoldEnd.DESCRIPTOR, hold.end)
        end = f"{_ENDED.get(name, name)} {human_age(seconds_of(hold.end_age))} ago"
    return f"published {when} ({what}{pending}): {claims}, {end}"


def _lines(lookup: LookupExplained) -> Iterator[str]:
    if lookup.claim_outcome:
        outcome = enum_name(ClaimOutcome.DESCRIPTOR, lookup.claim_outcome)
        yield _CLAIMED.get(outcome, outcome)
        if outcome != "held":
            return
    if lookup.unwanted_blocks:
        yield f"{lookup.unwanted_blocks} blocks were not requested; the other blocks:"
    start = 0
    for span in lookup.spans:
        end = start + span.keys
        blocks = f"block {start}" if span.keys == 1 else f"blocks {start}-{end - 1}"
        yield f"{blocks}: {_outcome(span)}"
        start = end
    if lookup.first_missed_key:
        yield f"the first miss has the key {lookup.first_missed_key.hex()}"
    if not lookup.spans:
        yield "no blocks were requested"


def _outcome(span: KeySpan) -> str:
    match span.WhichOneof("met"):
        case "hit_tier":
            return f"hit in {span.hit_tier}"
        case "miss_reason":
            reason = enum_name(MissReason.DESCRIPTOR, span.miss_reason)
            return f"miss, {reason}: {_WHY.get(reason, 'a reason that this version of kvtier does not know')}"
        case _:
            return "a tier had not answered yet"


def _lookup_values(lookup: LookupExplained) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for span in lookup.spans:
        kind = span.WhichOneof("met")
        met: dict[str, Any] = {"deferred": True}
        if kind == "hit_tier":
            met = {"hit_tier": span.hit_tier}
        elif kind == "miss_reason":
            met = {"miss_reason": enum_name(MissReason.DESCRIPTOR, span.miss_reason)}
        spans.append({"keys": span.keys} | met)
    claim = {
        "engine_id": lookup.hold.engine_id,
        "request_id": lookup.hold.request_id,
        "outcome": enum_name(ClaimOutcome.DESCRIPTOR, lookup.claim_outcome),
        "unwanted_blocks": lookup.unwanted_blocks,
    }
    return {
        "age_seconds": seconds_of(lookup.age),
        "spans": spans,
        "first_missed_key": lookup.first_missed_key.hex() or None,
        "claim": claim if lookup.claim_outcome else None,
    }


def _hold_values(hold: HoldExplained) -> dict[str, Any]:
    names = ("num_tokens", "blocks", "pending_blocks", "claims", "claimed_blocks")
    return {
        "age_seconds": seconds_of(hold.age),
        "direction": enum_name(HandoffDirection.DESCRIPTOR, hold.direction),
        "status": enum_name(PublishStatus.DESCRIPTOR, hold.status),
        **{name: getattr(hold, name) for name in names},
        "end": enum_name(HoldEnd.DESCRIPTOR, hold.end) if hold.end else None,
        "end_age_seconds": seconds_of(hold.end_age) if hold.end else None,
    }


def _policy(policy: OffloadPolicy) -> str:
    return enum_name(OffloadPolicy.DESCRIPTOR, policy)
