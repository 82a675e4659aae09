"""Requests and results of each client operation: every field, with values that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import xxhash
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from harness.payloads import key_of
from harness.scripted import PART, TIMEOUTS, Script

from kvtier.client.effects import Call, Pull
from kvtier.client.operations.arguments import LeaseOptions
from kvtier.client.operations.conversation_actions import ConversationOperations
from kvtier.client.operations.lookups import lookup_result
from kvtier.client.results import (
    BlocksInTier,
    ConversationAction,
    ConversationInfo,
    ConversationPage,
    ConversationResult,
    HandoffDirection,
    HoldInfo,
    HoldName,
    KeyStatus,
    LeaseSlots,
    Medium,
    NotClaimedReason,
    OffloadPolicy,
    Prefetched,
    Publication,
    PublishStatus,
    RequestOutcome,
    SourceOutcome,
    TierFilter,
    TierVote,
)
from kvtier.protos.v1 import cache_pb2, common_pb2, conversation_pb2, events_pb2, handoff_pb2, transfer_pb2
from kvtier.protos.wire.block_contents import BlockContent, pack_contents
from kvtier.protos.wire.packed_keys import pack_offsets

KEYS = [key_of(1), key_of(2)]
PACKED = common_pb2.PackedKeys(keys=b"".join(KEYS), key_bytes=len(KEYS[0]))
EXCLUDE = TierFilter(names=frozenset({"far"}), media=frozenset({Medium.DISK}), remote=True)
EXCLUDED = cache_pb2.TierFilter(names=["far"], media=[cache_pb2.TIER_MEDIUM_DISK], remote=True)
LOOKUP_OPTIONS: LeaseOptions = {
    "wait": 9.0,
    "prefix": False,
    "lease": 10.0,
    "exclude": EXCLUDE,
    "min_hits": 11,
    "retain_for": 12.0,
    "source": "peer",
}
HOLD = HoldName("engine", "request")
HOLD_REF = handoff_pb2.HoldRef(engine_id="engine", request_id="request")
CONTENTS = [BlockContent(KEYS[1], bytes(8), "lora"), BlockContent(KEYS[0], bytes(range(8)), "lora")]
EACH = cache_pb2.LOOKUP_MODE_EACH


def seconds(number: int) -> Duration:
    return Duration(seconds=number)


@dataclass(frozen=True)
class Case:
    """An operation, its call, the server's response, and the result.

    `wait`: for how long the server may wait.
    """

    run: Callable[[Any], Any]
    method: str
    request: Message
    answer: Message
    result: Any
    wait: float = 0.0


def summary(found: Any) -> dict[str, Any]:
    """Returns the attributes of a `LookupResult`, without the session."""
    names = "id statuses prefix_hits request_id keys source_indices slots policy votes not_retained hold source_outcome"
    return {name: getattr(found, name) for name in names.split()}


LOOKUP = cache_pb2.LookupResponse(
    statuses=bytes([1, 2]),
    prefix_hits=1,
    sources=bytes([3, 4]),
    lease_id=5,
    slot_offsets=pack_offsets([64]),
    not_retained_blocks=6,
    source_outcome=cache_pb2.SOURCE_OUTCOME_ABSENT,
)
FOUND = {
    "id": 5,
    "statuses": bytes([1, 2]),
    "prefix_hits": 1,
    "request_id": "r",
    "keys": KEYS,
    "source_indices": bytes([3, 4]),
    "slots": LeaseSlots(0, KEYS[0][-1:], pack_offsets([64])),
    "policy": None,
    "votes": (),
    "not_retained": 6,
    "hold": None,
    "source_outcome": SourceOutcome.ABSENT,
}
VOTES = [
    cache_pb2.TierVote(tier="a", policy=cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL, why="x"),
    cache_pb2.TierVote(tier="b", policy=cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL, why="y"),
]

CASES = {
    "begin_request": Case(
        lambda do: do.begin_request(
            "r",
            KEYS,
            {
                "prompt_tokens": 7,
                "priority": 8,
                "kv_transfer_params": {"a": 1},
                "wait": 9.0,
                "prefix": False,
                "lease": 10.0,
                "exclude": EXCLUDE,
                "min_hits": 11,
                "retain_for": 12.0,
                "source": "peer",
                "conversation_id": "talk",
                "slots": True,
            },
        ),
        "CacheService/BeginRequest",
        cache_pb2.BeginRequestRequest(
            request_id="r",
            keys=PACKED,
            mode=EACH,
            prompt_tokens=7,
            priority=8,
            kv_transfer_params_json='{"a": 1}',
            wait=seconds(9),
            lease_duration=seconds(10),
            exclude=EXCLUDED,
            min_hits=11,
            retain_for=seconds(12),
            source="peer",
            conversation_id="talk",
            grant_id=1,
            want_slots=True,
        ),
        cache_pb2.BeginRequestResponse(policy=cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL, votes=VOTES, lookup=LOOKUP),
        FOUND
        | {
            "policy": OffloadPolicy.BLOCK_LEVEL,
            "votes": (
                TierVote("a", OffloadPolicy.REQUEST_LEVEL, "x"),
                TierVote("b", OffloadPolicy.BLOCK_LEVEL, "y"),
            ),
        },
        wait=9.0,
    ),
    "lookup": Case(
        lambda do: do.lookup(
            KEYS,
            {
                "request_id": "r",
                "wait": 9.0,
                "prefix": False,
                "lease": 10.0,
                "exclude": EXCLUDE,
                "min_hits": 11,
                "retain_for": 12.0,
                "source": "peer",
                "slots": True,
            },
        ),
        "CacheService/Lookup",
        cache_pb2.LookupRequest(
            request_id="r",
            keys=PACKED,
            mode=EACH,
            wait=seconds(9),
            lease_duration=seconds(10),
            exclude=EXCLUDED,
            min_hits=11,
            retain_for=seconds(12),
            source="peer",
            grant_id=1,
            want_slots=True,
        ),
        LOOKUP,
        FOUND,
        wait=9.0,
    ),
    "prefetch": Case(
        lambda do: do.prefetch(
            KEYS, {"request_id": "r", "wait": 9.0, "exclude": EXCLUDE, "retain_for": 12.0, "source": "peer"}
        ),
        "CacheService/Prefetch",
        cache_pb2.PrefetchRequest(
            request_id="r",
            keys=PACKED,
            wait=seconds(9),
            exclude=EXCLUDED,
            retain_for=seconds(12),
            source="peer",
        ),
        cache_pb2.PrefetchResponse(
            present_blocks=1,
            started_blocks=2,
            missing_blocks=3,
            no_room_blocks=4,
            unanswered_blocks=5,
            not_retained_blocks=6,
            source_outcome=cache_pb2.SOURCE_OUTCOME_BUSY,
        ),
        Prefetched(
            present=1,
            started=2,
            missing=3,
            no_room=4,
            unanswered=5,
            not_retained=6,
            source_outcome=SourceOutcome.BUSY,
        ),
        wait=9.0,
    ),
    "release": Case(
        lambda do: do.release([3, 4]),
        "CacheService/ReleaseLease",
        cache_pb2.ReleaseLeaseRequest(lease_ids=[3, 4]),
        cache_pb2.ReleaseLeaseResponse(),
        None,
    ),
    "touch": Case(
        lambda do: do.touch([3, 4], lease=10.0),
        "CacheService/Touch",
        cache_pb2.TouchRequest(lease_ids=[3, 4], lease_duration=seconds(10)),
        cache_pb2.TouchResponse(missing_lease_ids=[4]),
        [4],
    ),
    "finish_request": Case(
        lambda do: do.finish_request("r", wait=9.0),
        "CacheService/FinishRequest",
        cache_pb2.FinishRequestRequest(request_id="r", wait=seconds(9)),
        cache_pb2.FinishRequestResponse(settled=True, incomplete_blocks=3),
        RequestOutcome(settled=True, incomplete_blocks=3),
        wait=9.0,
    ),
    "flush": Case(
        lambda do: do.flush(KEYS, wait=9.0),
        "CacheService/Flush",
        cache_pb2.FlushRequest(keys=PACKED, wait=seconds(9)),
        cache_pb2.FlushResponse(statuses=bytes([2, 1])),
        bytes([2, 1]),
        wait=9.0,
    ),
    "reset": Case(
        lambda do: do.reset(wait=9.0, retire=True),
        "CacheService/Reset",
        cache_pb2.ResetRequest(wait=seconds(9), retire=True),
        cache_pb2.ResetResponse(pending_blocks=3),
        3,
        wait=9.0,
    ),
    "describe": Case(
        lambda do: do.describe(KEYS, CONTENTS),
        "EventService/DescribeBlocks",
        events_pb2.DescribeBlocksRequest(
            keys=PACKED,
            contents=pack_contents(CONTENTS, len(KEYS[0])),
        ),
        events_pb2.DescribeBlocksResponse(kept=True),
        True,
    ),
    "publish": Case(
        lambda do: do.publish(
            "r", KEYS, [3, 4], num_tokens=9, direction=HandoffDirection.DECODE_TO_PREFILL, hold_for=2.0
        ),
        "HandoffService/PublishHold",
        handoff_pb2.PublishHoldRequest(
            request_id="r",
            keys=PACKED,
            positions=[3, 4],
            num_tokens=9,
            direction=handoff_pb2.HANDOFF_DIRECTION_DECODE_TO_PREFILL,
            duration=seconds(2),
        ),
        handoff_pb2.PublishHoldResponse(
            status=handoff_pb2.PUBLISH_STATUS_PUBLISHED, remaining=seconds(3), pending_blocks=1
        ),
        Publication(PublishStatus.PUBLISHED, 3.0, 1),
    ),
    "claim": Case(
        lambda do: do.claim(HOLD, "r", [1, 2], wait=9.0, min_blocks=3, lease=10.0),
        "HandoffService/ClaimHold",
        handoff_pb2.ClaimHoldRequest(
            hold=HOLD_REF,
            request_id="r",
            first_positions=[1, 2],
            wait=seconds(9),
            min_blocks=3,
            lease_duration=seconds(10),
            grant_id=1,
        ),
        handoff_pb2.ClaimHoldResponse(
            keys=PACKED,
            positions=[6, 7],
            statuses=bytes([1, 0]),
            lease_id=5,
            num_tokens=8,
            direction=handoff_pb2.HANDOFF_DIRECTION_PREFILL_TO_DECODE,
            remaining=seconds(3),
            settled_blocks=2,
        ),
        FOUND
        | {
            "statuses": bytes([1, 0]),
            "source_indices": bytes(2),
            "slots": None,
            "not_retained": 0,
            "source_outcome": SourceOutcome.NONE,
            "hold": HoldInfo([6, 7], 8, HandoffDirection.PREFILL_TO_DECODE, 3.0, 2),
        },
        wait=9.0,
    ),
    "renew_holds": Case(
        lambda do: do.renew_holds([HOLD], extension=4.0),
        "HandoffService/RenewHolds",
        handoff_pb2.RenewHoldsRequest(holds=[HOLD_REF], extension=seconds(4)),
        handoff_pb2.RenewHoldsResponse(missing_holds=[0]),
        [HOLD],
    ),
    "release_holds": Case(
        lambda do: do.release_holds([HOLD]),
        "HandoffService/ReleaseHolds",
        handoff_pb2.ReleaseHoldsRequest(holds=[HOLD_REF]),
        handoff_pb2.ReleaseHoldsResponse(),
        None,
    ),
    "report_not_claimed": Case(
        lambda do: do.report_not_claimed(HOLD, request_id="r", reason=NotClaimedReason.NOTHING_HELD),
        "HandoffService/ReportNotClaimed",
        handoff_pb2.ReportNotClaimedRequest(
            hold=HOLD_REF, request_id="r", reason=handoff_pb2.NOT_CLAIMED_REASON_NOTHING_HELD
        ),
        handoff_pb2.ReportNotClaimedResponse(),
        None,
    ),
}


def set_fields(message: Message) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


def all_fields(message: Message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_sends_each_argument_and_returns_each_field(name: str) -> None:
    """A case sets each field of the request, so that the operation cannot lack one."""
    case, script = CASES[name], Script()
    result = script.perform(case.run(script.operations), case.answer)
    [call] = script.effects
    wanted: Any = type(case.request)()
    wanted.CopyFrom(case.request)
    wanted.session.CopyFrom(script.session.ref)  # type: ignore[attr-defined]
    assert all_fields(wanted) == set_fields(wanted), "a field without a case"
    assert (call.method, call.request, call.timeout) == (case.method, wanted, TIMEOUTS.call + case.wait)
    if isinstance(case.result, dict):
        assert result.session is script.session
        result = summary(result)
    assert result == case.result


def converse(script: Script, answer: Message, **options: Any) -> Any:
    """Performs an action, or lists conversations, as a tenant."""
    do = ConversationOperations("tenant", 6.0)
    act = isinstance(answer, conversation_pb2.ActOnConversationResponse)
    return script.perform(do.act(**options) if act else do.list(**options), answer)


def test_an_action_on_a_conversation() -> None:
    script = Script()
    answer = conversation_pb2.ActOnConversationResponse(
        changed_blocks=1, shared_blocks=2, kept_blocks=3, missing_blocks=4
    )
    options = {"action": ConversationAction.RETAIN, "conversation_id": "talk", "last_key": KEYS[1]}
    result = converse(script, answer, **options, retain_for=5.0, namespace_id=b"n", keys=KEYS)
    assert result == ConversationResult(changed=1, shared=2, kept=3, missing=4)
    wanted = conversation_pb2.ActOnConversationRequest(
        tenant="tenant",
        action=conversation_pb2.CONVERSATION_ACTION_RETAIN,
        conversation_id="talk",
        retain_for=seconds(5),
        last_key=KEYS[1],
        namespace_id=b"n",
        keys=PACKED,
    )
    assert set_fields(wanted) == all_fields(wanted)
    assert script.effects == [Call("ConversationService/ActOnConversation", wanted, 6.0)]


def test_a_list_of_conversations() -> None:
    script = Script()
    tiers = [conversation_pb2.ConversationTier(tier="cpu", blocks=1, bytes=2, retained_blocks=3)]
    status = conversation_pb2.ConversationStatus(
        conversation_id="talk",
        tenant="tenant",
        namespace_id=b"n",
        requests=4,
        blocks=5,
        tiers=tiers,
        age=seconds(6),
        idle=seconds(7),
        retained_for=seconds(8),
        pinned=True,
    )
    other = conversation_pb2.ConversationStatus(conversation_id="other")
    answer = conversation_pb2.ListConversationsResponse(conversations=[status, other], total=9, next_page=10)
    page = converse(script, answer, conversation_id="talk", page=11, most=12)
    infos = (
        ConversationInfo("talk", "tenant", b"n", 4, 5, (BlocksInTier("cpu", 1, 2, 3),), 6.0, 7.0, 8.0, pinned=True),
        ConversationInfo("other", "", b"", 0, 0, (), 0.0, 0.0, None, pinned=False),
    )
    assert page == ConversationPage(infos, total=9, next_page=10)
    wanted = conversation_pb2.ListConversationsRequest(
        tenant="tenant", conversation_id="talk", page=11, max_conversations=12
    )
    assert set_fields(wanted) == all_fields(wanted)
    assert script.effects == [Call("ConversationService/ListConversations", wanted, 6.0)]


@pytest.mark.parametrize("kept", [[True, True], [True, False], [False, True]])
def test_blocks_are_described_per_group(kept: list[bool]) -> None:
    """The keys and contents of a call belong together; the server must keep those of each call."""
    script = Script()
    keys = [key_of(1), key_of(2, group=1), key_of(3)]
    contents = [BlockContent(None, bytes([number] * 4)) for number in range(3)]
    answers = [events_pb2.DescribeBlocksResponse(kept=each) for each in kept]
    assert script.perform(script.operations.describe(keys, contents), *answers) is all(kept)
    for call, numbers in zip(script.effects, ([0, 2], [1]), strict=True):
        assert call.request.keys.keys == b"".join(keys[number] for number in numbers)
        assert call.request.contents == pack_contents([contents[number] for number in numbers], len(keys[0]))


@pytest.mark.parametrize("one", ["key_bytes", "group", "token_ids", "lora_name"])
def test_blocks_of_different_shapes_are_described_apart(one: str) -> None:
    """A call has keys and token ids of one length, and one adapter."""
    script = Script()
    keys = [key_of(1), b"long" + key_of(2) if one == "key_bytes" else key_of(2, group=one == "group")]
    tokens, lora = bytes(8 if one == "token_ids" else 4), "lora" if one == "lora_name" else ""
    contents = [BlockContent(None, bytes(4)), BlockContent(None, tokens, lora)]
    answer = events_pb2.DescribeBlocksResponse(kept=True)
    script.perform(script.operations.describe(keys, contents), answer, answer)


@pytest.mark.parametrize("named", [True, False])
def test_items_of_a_lease_are_read(*, named: bool) -> None:
    """Over a stream, whose parts arrive in the order of the items, for a lease or its id."""
    script = Script()
    lease: Any = 5
    if named:
        lookup = cache_pb2.LookupResponse(statuses=bytes([KeyStatus.HIT] * 2), lease_id=5)
        lease = lookup_result(lookup, "r", KEYS, script.session)

    def send(pull: Pull) -> None:
        assert pull.timeout == TIMEOUTS.transfer
        payload = bytes([1] * PART + [2] * PART)
        pull.sink.take(transfer_pb2.PullResponse(payload=payload, xxh3_64=xxhash.xxh3_64_intdigest(payload)))

    answer = cache_pb2.PrepareLoadResponse(
        slot_offsets=pack_offsets([0, 64]), part_sizes_bytes=pack_offsets([PART] * 2)
    )
    with script.operations.held() as held:
        reading = script.perform(script.operations.begin_read(held, lease, [1, 0]), answer, send)
        assert [bytes(view) for view in reading.batch.views()] == [bytes([1] * PART), bytes([2] * PART)]
        ending = script.operations.end_read(reading, release=True)
        script.perform(ending, cache_pb2.CompleteLoadResponse())
    prepare, pull, complete = (each.request for each in script.effects)
    session = script.session.ref
    assert prepare == cache_pb2.PrepareLoadRequest(session=session, lease_id=5, items=[1, 0])
    assert pull == transfer_pb2.PullRequest(session=session, lease_id=5, items=[1, 0])
    assert complete == cache_pb2.CompleteLoadRequest(session=session, lease_id=5, release=True)
    assert script.calls() == ["CacheService/PrepareLoad", "Pull", "CacheService/CompleteLoad"]


def test_a_store_names_its_keys_and_retention() -> None:
    """The statuses and the number of blocks without retention are in the batch."""
    script = Script()
    answer = cache_pb2.PrepareStoreResponse(statuses=bytes([2, 1]), store_id=6, not_retained_blocks=1)
    done = cache_pb2.CompleteStoreResponse()
    with script.operations.held() as held:
        writing = script.perform(
            script.operations.begin_write(held, KEYS, {"request_id": "r", "retain_for": 4.0}), answer
        )
        assert (writing.batch.statuses, list(writing.batch.wanted)) == (bytes([2, 1]), [1])
        assert (writing.batch.not_retained, list(writing.batch.sizes)) == (1, [PART])
        pushed = transfer_pb2.PushResponse(received_bytes=PART)
        script.perform(script.operations.end_write(writing), pushed, done)
    prepare, push, complete = script.effects
    wanted = cache_pb2.PrepareStoreRequest(
        session=script.session.ref, request_id="r", keys=PACKED, retain_for=seconds(4), grant_id=1
    )
    assert all_fields(wanted) == set_fields(wanted)
    assert (prepare.method, prepare.request) == ("CacheService/PrepareStore", wanted)
    assert (push.start, push.complete, push.timeout) == (0, True, TIMEOUTS.transfer)
    assert complete.request == cache_pb2.CompleteStoreRequest(session=script.session.ref, store_id=6)
