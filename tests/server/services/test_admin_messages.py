"""Messages of the AdminService: each field comes from the value of its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvtier.protos.v1 import admin_pb2, cache_pb2, common_pb2, handoff_pb2
from kvtier.server.services import admin_messages as messages
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.secondary_tier import OffloadPolicy, Vote
from kvtier.tiers.stats.miss_ratio_curve import HitRatio
from kvtier.tiers.stats.request_log import ClaimOutcome, LookupRecord, OutcomeRun
from kvtier.tiers.stats.snapshots import HandoffStats, TierStats
from kvtier.tiers.types import HandoffDirection, HoldEnd, MissReason, Owner, PublishStatus, ShareStats

NOW = 100.0
ENGINE = (b"n" * 32, "e")
DIRECTION = HandoffDirection.DECODE_TO_PREFILL
BLOCK: Any = SimpleNamespace(nbytes=64, part_bytes=16, ready=True)


def seconds(number: int) -> Duration:
    return Duration(seconds=number)


def numbered(kind: type, **fields: Any) -> Any:
    """Returns a value whose numbers all differ."""
    numbers = {field.name: n for n, field in enumerate(kind.__dataclass_fields__.values(), 1) if field.type == "int"}  # type: ignore[attr-defined]
    return kind(**(numbers | fields))


def test_a_tier() -> None:
    share = numbered(ShareStats, tenant="alice", limit_bytes=77)
    tier = numbered(
        TierStats,
        name="near",
        type="lmdb",
        shares=(share,),
        estimates=(HitRatio(2.0, 0.5),),
        free_disk_bytes=99,
        healthy=False,
        last_error="full",
        shared=True,
    )
    status = messages._tier_status(tier)
    renamed = {"trouble": "last_error", "damaged_blocks": "damaged", "dropped_blocks": "dropped"}
    for field in status.DESCRIPTOR.fields:
        if field.name not in ("estimates", "shares"):
            assert getattr(status, field.name) == getattr(tier, renamed.get(field.name, field.name)), field.name
    assert [(each.scale, each.hit_ratio) for each in status.estimates] == [(2.0, 0.5)]
    [shown] = status.shares
    for field in shown.DESCRIPTOR.fields:
        assert getattr(shown, field.name) == getattr(share, field.name), field.name


def test_the_totals_of_handoffs() -> None:
    stats = numbered(HandoffStats, held_seconds=50.0)
    totals = messages.handoff_totals(DIRECTION, stats)
    assert (totals.direction, totals.held_time) == (handoff_pb2.HANDOFF_DIRECTION_DECODE_TO_PREFILL, seconds(50))
    for field in totals.DESCRIPTOR.fields:
        if field.name not in ("direction", "held_time"):
            assert getattr(totals, field.name) == getattr(stats, field.name), field.name


@pytest.mark.parametrize("calls", [0, 3])
def test_a_session(calls: int) -> None:
    """A session without a call is idle since it was opened."""
    namespace, groups = SimpleNamespace(world_size=4, id=b"n" * 32), [common_pb2.Group(part_bytes=5)]
    session: Any = SimpleNamespace(
        client_name="c",
        core=SimpleNamespace(engine_id="e", rank=2, namespace=namespace, tenant="alice"),
        pid=7,
        transport="shm",
        model="m",
        attachments=[1],
        groups=groups,
        opened_at=NOW - 20,
        heard_at=NOW - 6,
        calls=calls,
    )
    held: Any = SimpleNamespace(leases=8, leased_blocks=9, stores=10, storing_bytes=11)
    assert messages._session_status(session, held, NOW) == admin_pb2.SessionStatus(
        client_name="c",
        engine_id="e",
        rank=2,
        pid=7,
        transport="shm",
        model="m",
        attached=True,
        groups=groups,
        world_size=4,
        age=seconds(20),
        tenant="alice",
        namespace_id=b"n" * 32,
        leases=8,
        leased_blocks=9,
        stores=10,
        storing_bytes=11,
        idle=seconds(6 if calls else 20),
        calls=calls,
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lease(*, is_known: bool) -> None:
    """Its session may have ended."""
    owner = Owner(ENGINE, b"s", "r")  # type: ignore[arg-type]
    lease: Any = BlockLease(3, owner, NOW + 5, [BLOCK, None, BLOCK], 4, bytes(3), None, NOW - 9, pending=1, hits=2)  # type: ignore[arg-type]
    session: Any = SimpleNamespace(client_name="c", pid=7) if is_known else None
    assert messages.lease_status(lease, session, NOW) == admin_pb2.LeaseStatus(
        lease_id=3,
        engine_id="e",
        request_id="r",
        remaining=seconds(5),
        client_name="c" if is_known else "",
        pid=7 if is_known else 0,
        kind=admin_pb2.LEASE_KIND_READ,
        age=seconds(9),
        blocks=2,
        bytes=128,
        pending_blocks=1,
    )
    store: Any = SimpleNamespace(id=4, owner=owner, expires_at=NOW + 6, begun_at=NOW - 8, blocks=[BLOCK] * 3)
    assert messages.lease_status(store, None, NOW) == admin_pb2.LeaseStatus(
        lease_id=4,
        engine_id="e",
        request_id="r",
        remaining=seconds(6),
        kind=admin_pb2.LEASE_KIND_WRITE,
        age=seconds(8),
        blocks=3,
        bytes=48,
        pending_blocks=3,
    )


def test_a_hold() -> None:
    hold: Any = SimpleNamespace(
        engine=ENGINE,
        name=(*ENGINE, "r"),
        direction=DIRECTION,
        tenant="alice",
        num_tokens=3,
        items=[BLOCK, None, BLOCK, BLOCK],
        nbytes=5,
        pending=2,
        claims=6,
        published_at=NOW - 7,
        expires_at=NOW + 8,
    )
    assert messages.handoff_status(hold, NOW) == admin_pb2.HandoffStatus(
        engine_id="e",
        request_id="r",
        direction=handoff_pb2.HANDOFF_DIRECTION_DECODE_TO_PREFILL,
        tenant="alice",
        num_tokens=3,
        blocks=3,
        bytes=5,
        pending_blocks=2,
        claims=6,
        age=seconds(7),
        remaining=seconds(8),
    )


@pytest.mark.parametrize("is_claim", [True, False])
@pytest.mark.parametrize("has_ended", [True, False])
def test_a_request(*, is_claim: bool, has_ended: bool) -> None:
    """The explanation of its lookups and holds, with the names of tiers."""
    runs = (OutcomeRun(1, 1), OutcomeRun(2, MissReason.EVICTED), OutcomeRun(3, None))
    lookup = LookupRecord(NOW - 4, runs, b"missed")
    if is_claim:
        claim = SimpleNamespace(engine_id="p", request_id="q", outcome=ClaimOutcome.EXPIRED, unwanted=5)
        lookup.claim = claim  # type: ignore[assignment]
    hold = SimpleNamespace(
        at=NOW - 6,
        direction=DIRECTION,
        status=PublishStatus.PUBLISHED,
        num_tokens=7,
        blocks=8,
        pending=9,
        claims=10,
        hits=11,
        end=HoldEnd.RELEASED if has_ended else None,
        ended_at=NOW - 1,
    )
    votes = [("near", Vote(OffloadPolicy.REQUEST_LEVEL, "x"))]
    record: Any = SimpleNamespace(
        engine_id="e",
        at=NOW - 12,
        finished=True,
        incomplete=13,
        lookups=[lookup],
        holds=[hold],
        asked=14,
        negotiation=SimpleNamespace(policy=OffloadPolicy.REQUEST_LEVEL, votes=votes),
    )
    request_level = cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL
    ended = {"end": admin_pb2.HOLD_END_RELEASED, "end_age": seconds(1)} if has_ended else {}
    claimed: dict[str, Any] = {}
    if is_claim:
        claimed["hold"] = handoff_pb2.HoldRef(engine_id="p", request_id="q")
        claimed |= {"claim_outcome": ClaimOutcome.EXPIRED.value, "unwanted_blocks": 5}
    assert messages.explain_answer(record, ["cpu", "near"], NOW) == admin_pb2.ExplainRequestResponse(
        engine_id="e",
        age=seconds(12),
        finished=True,
        incomplete_blocks=13,
        total_lookups=14,
        policy=request_level,
        votes=[cache_pb2.TierVote(tier="near", policy=request_level, why="x")],
        lookups=[
            admin_pb2.LookupExplained(
                age=seconds(4),
                spans=[
                    admin_pb2.KeySpan(keys=1, hit_tier="near"),
                    admin_pb2.KeySpan(keys=2, miss_reason=admin_pb2.MISS_REASON_EVICTED),
                    admin_pb2.KeySpan(keys=3, deferred=True),
                ],
                first_missed_key=b"missed",
                **claimed,
            )
        ],
        holds=[
            admin_pb2.HoldExplained(
                age=seconds(6),
                direction=handoff_pb2.HANDOFF_DIRECTION_DECODE_TO_PREFILL,
                status=handoff_pb2.PUBLISH_STATUS_PUBLISHED,
                num_tokens=7,
                blocks=8,
                pending_blocks=9,
                claims=10,
                claimed_blocks=11,
                **ended,
            )
        ],
    )


def test_steps_of_evictions_and_checks() -> None:
    tier = SimpleNamespace(tier=1, blocks=2, nbytes=3, kept_blocks=4, kept_nbytes=5, looked_at=6, total=7)
    task: Any = SimpleNamespace(tiers=[tier])
    assert messages.evict_step(task, ["cpu", "near"], done=True) == admin_pb2.EvictResponse(
        tiers=[
            admin_pb2.TierEviction(tier="near", blocks=2, bytes=3, kept_blocks=4, kept_bytes=5, looked_at=6, total=7)
        ],
        done=True,
    )
    finding = SimpleNamespace(name=b"n" * 32 + b"key", nbytes=2, problem="torn", repaired=True)
    progress: Any = SimpleNamespace(
        tier=SimpleNamespace(name="near", type="lmdb"),
        blocks=3,
        nbytes=4,
        total=5,
        findings=[finding],
        done=True,
        note="x",
        error="y",
    )
    assert messages.fsck_step(progress) == admin_pb2.FsckResponse(
        tier="near",
        tier_type="lmdb",
        blocks=3,
        checked_bytes=4,
        total_blocks=5,
        findings=[
            admin_pb2.FsckFinding(namespace_id=b"n" * 32, key=b"key", size_bytes=2, problem="torn", repaired=True)
        ],
        done=True,
        note="x",
        error="y",
    )


def test_counts_of_misses_begin_with_the_most_frequent_reason() -> None:
    """Reasons that did not occur are left out."""
    counts = messages._miss_counts({MissReason.EVICTED: 2, MissReason.RESET: 0, MissReason.NO_ROOM: 3})
    assert [(each.reason, each.keys) for each in counts] == [
        (admin_pb2.MISS_REASON_NO_ROOM, 3),
        (admin_pb2.MISS_REASON_EVICTED, 2),
    ]
