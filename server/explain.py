"""How `kvtier explain` says what became of a request's blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..protos.v1.admin_pb2 import ExplainRequestResponse, KeySpan, LookupExplained, MissReason
from ..protos.v1.cache_pb2 import OffloadPolicy
from .inquiry import human_age, plain_console, seconds_of

__all__ = ["show", "to_json"]

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
}


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
    if answer.total_lookups > len(answer.lookups):
        console.print(f"  {answer.total_lookups} lookups, the last {len(answer.lookups)} of them:")
    for lookup in answer.lookups:
        console.print(f"  lookup {human_age(seconds_of(lookup.age))} ago:")
        for line in _lines(lookup):
            console.print(f"    {line}", markup=False)


def _lines(lookup: LookupExplained) -> Iterator[str]:
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
    return {
        "age_seconds": seconds_of(lookup.age),
        "spans": spans,
        "first_missed_key": lookup.first_missed_key.hex() or None,
    }


def _reason(number: int) -> str:
    names = {value.number: value.name for value in MissReason.DESCRIPTOR.values}
    return names.get(number, f"{number}").removeprefix("MISS_REASON_").lower()


def _policy(policy: OffloadPolicy) -> str:
    return OffloadPolicy.Name(policy).removeprefix("OFFLOAD_POLICY_").lower()
