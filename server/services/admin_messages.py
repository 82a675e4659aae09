"""AdminService messages, built from the records of the core and the server."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from ... import __version__
from ...cuda.host.region import HostRegion
from ...protos.durations import duration_of
from ...protos.v1 import admin_pb2, cache_pb2, handoff_pb2
from ...tiers.core.block import Block
from ...tiers.core.bulk_eviction import Eviction
from ...tiers.core.holds import Hold
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import BlockLease
from ...tiers.secondary_tier import OffloadPolicy
from ...tiers.stats.request_log import HoldRecord, LookupRecord, OutcomeRun, RequestRecord
from ...tiers.stats.snapshots import HandoffStats, TierStats
from ...tiers.types import NAMESPACE_BYTES, HandoffDirection, MissReason, ShareStats
from ..core_runtime import TierRuntime
from ..rpc.sessions import PROTOCOL_VERSIONS, OpenSession, SessionRegistry
from ..rpc.slice_scheduler import slices_of
from ..telemetry.downgrades import Downgrade
from ..telemetry.loop_lag import LoopLag
from ..telemetry.metrics import ServerStats
from .online_fsck import Progress

__all__ = [
    "POLICIES",
    "build_status",
    "current_downgrades",
    "evict_step",
    "explain_answer",
    "fsck_step",
    "handoff_status",
    "handoff_totals",
    "lease_status",
    "server_stats",
]

_SLICE = 512
"""Blocks of a store that are counted at once."""
_ATTACH_SECONDS = 10.0
"""Time within which a client maps the region after it has opened its session."""
_NAMED_SESSIONS = 3

POLICIES = {
    OffloadPolicy.BLOCK_LEVEL: cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL,
    OffloadPolicy.REQUEST_LEVEL: cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL,
}


@dataclass(slots=True)
class _Held:
    """What a session holds."""

    leases: int = 0
    leased_blocks: int = 0
    stores: int = 0
    storing_bytes: int = 0


async def build_status(
    runtime: TierRuntime,
    sessions: SessionRegistry,
    ready_at: float,
    loop_lag: LoopLag,
    pause: Callable[[], Awaitable[float]],
) -> admin_pb2.GetStatusResponse:
    """Builds the status in slices. `ready_at` is in seconds on the runtime's clock.

    `pause` waits for the next turn, and returns its end on the clock of `time.monotonic`.
    """
    held, turn_ends = await _held_by_sessions(runtime, pause), 0.0
    described = []
    for session in sessions.all():
        described.append(_session_status(session, held.get(session.core.id, _Held()), runtime.now()))
        if time.monotonic() >= turn_ends:
            turn_ends = await pause()
    stats, now = runtime.stats(), runtime.now()
    return admin_pb2.GetStatusResponse(
        server_version=__version__,
        epoch=sessions.epoch,
        draining=sessions.draining,
        tiers=map(_tier_status, stats.tiers),
        sessions=described,
        leases=stats.leases,
        stores=stats.stores,
        quarantined_bytes=stats.quarantined_bytes,
        namespaces=stats.namespaces,
        holds=stats.holds,
        held_bytes=stats.held_bytes,
        handoffs=[handoff_totals(direction, totals) for direction, totals in stats.handoffs.items()],
        pid=os.getpid(),
        protocol_versions=PROTOCOL_VERSIONS,
        region=_region_status(runtime.region),
        lookup_keys=stats.lookup_keys,
        lookup_misses=stats.lookup_misses,
        misses=_miss_counts(stats.misses_by_reason),
        uptime=duration_of(now - ready_at),
        loop_lag=duration_of(loop_lag.worst),
        downgrades=[
            admin_pb2.Downgrade(feature=each.feature, cause=each.cause, remedy=each.remedy)
            for each in current_downgrades(runtime, sessions)
        ],
    )


async def _held_by_sessions(runtime: TierRuntime, pause: Callable[[], Awaitable[float]]) -> dict[bytes, _Held]:
    """Returns what the leases and stores of each session hold, by the id of the session."""
    held: dict[bytes, _Held] = defaultdict(_Held)
    turn_ends = 0.0
    everything: list[BlockLease | Store] = [*runtime.core.leases(), *runtime.core.stores()]
    for each in everything:
        own = held[each.owner.session_id]
        if isinstance(each, BlockLease):
            own.leases += 1
            own.leased_blocks += each.hits
            blocks: Sequence[Block] = ()
        else:
            own.stores += 1
            blocks = each.blocks
        for part in slices_of(blocks, _SLICE):
            if time.monotonic() >= turn_ends:
                turn_ends = await pause()
            own.storing_bytes += sum(block.part_bytes for block in part)
        if time.monotonic() >= turn_ends:
            turn_ends = await pause()
    return held


def current_downgrades(runtime: TierRuntime, sessions: SessionRegistry) -> list[Downgrade]:
    """Returns the reported downgrades, and those that are seen in the tiers and sessions."""
    found = runtime.downgrades.all()
    for tier in runtime.tiers:
        if (limitation := tier.limitation()) is not None:
            found.append(Downgrade("tiers", f"tier {tier.name}: {limitation}", "kvtier doctor --only disks"))
    since = runtime.now() - _ATTACH_SECONDS
    unmapped = [each for each in sessions.all() if _is_unmapped(each) and each.opened_at < since]
    if unmapped:
        names = ", ".join(f"{each.client_name} (pid {each.pid})" for each in unmapped[:_NAMED_SESSIONS])
        cause = f"{len(unmapped)} sessions have not mapped the shared memory, so their copies are slower: {names}"
        found.append(Downgrade("shared_memory", cause, "see the warning in the engine's log"))
    return found


def _is_unmapped(session: OpenSession) -> bool:
    return session.transport == "shm" and not session.attachments


def server_stats(runtime: TierRuntime, sessions: SessionRegistry, started: float) -> ServerStats:
    open_sessions = sessions.all()
    return ServerStats(
        manager=runtime.stats(),
        epoch=sessions.epoch,
        uptime_seconds=runtime.now() - started,
        region_bytes=runtime.region.size_bytes,
        region_backed_bytes=runtime.region.backed_bytes,
        sessions_by_transport=Counter(session.transport for session in open_sessions),
        draining=sessions.draining,
        sessions_attached=sum(bool(session.attachments) for session in open_sessions),
        sessions_limit=sessions.limit,
        sessions_opened=sessions.opened,
        sessions_closed=sessions.opened - len(open_sessions),
        namespaces=runtime.core.namespace_stats(),
        models=sessions.models(),
        downgrades=current_downgrades(runtime, sessions),
    )


def _tier_status(tier: TierStats) -> admin_pb2.TierStatus:
    return admin_pb2.TierStatus(
        **_same_fields(admin_pb2.TierStatus, tier),
        trouble=tier.last_error,
        damaged_blocks=tier.damaged,
        dropped_blocks=tier.dropped,
        estimates=[admin_pb2.HitRatioEstimate(scale=it.scale, hit_ratio=it.hit_ratio) for it in tier.estimates],
        shares=[admin_pb2.ShareStatus(**_same_fields(admin_pb2.ShareStatus, share)) for share in tier.shares],
    )


def _miss_counts(misses: Mapping[MissReason, int]) -> list[admin_pb2.MissCount]:
    """Returns the number of missed keys by reason, the most frequent reason first."""
    return [
        admin_pb2.MissCount(reason=admin_pb2.MissReason.Name(reason.value), keys=keys)
        for reason, keys in sorted(misses.items(), key=lambda item: -item[1])
        if keys
    ]


def _session_status(session: OpenSession, held: _Held, now: float) -> admin_pb2.SessionStatus:
    return admin_pb2.SessionStatus(
        client_name=session.client_name,
        engine_id=session.core.engine_id,
        rank=session.core.rank,
        pid=session.pid,
        transport=session.transport,
        model=session.model,
        attached=bool(session.attachments),
        groups=session.groups,
        world_size=session.core.namespace.world_size,
        age=duration_of(now - session.opened_at),
        tenant=session.core.tenant,
        namespace_id=session.core.namespace.id,
        leases=held.leases,
        leased_blocks=held.leased_blocks,
        stores=held.stores,
        storing_bytes=held.storing_bytes,
        idle=duration_of(now - (session.heard_at if session.calls else session.opened_at)),
        calls=session.calls,
    )


def _region_status(region: HostRegion) -> admin_pb2.RegionStatus:
    return admin_pb2.RegionStatus(
        size_bytes=region.size_bytes,
        backed_bytes=region.backed_bytes,
        huge_bytes=region.huge_bytes,
        memory_nodes=region.nodes,
        misplaced=f"{region.misplaced}" if region.misplaced is not None else "",
    )


def evict_step(eviction: Eviction, tiers: Sequence[str], *, done: bool) -> admin_pb2.EvictResponse:
    """Returns the progress of an eviction. `tiers` has the names of all tiers, in lookup order."""
    return admin_pb2.EvictResponse(
        tiers=[
            admin_pb2.TierEviction(
                tier=tiers[each.tier],
                blocks=each.blocks,
                bytes=each.nbytes,
                kept_blocks=each.kept_blocks,
                kept_bytes=each.kept_nbytes,
                looked_at=each.looked_at,
                total=each.total,
            )
            for each in eviction.tiers
        ],
        done=done,
    )


def lease_status(held: BlockLease | Store, session: OpenSession | None, now: float) -> admin_pb2.LeaseStatus:
    status = admin_pb2.LeaseStatus(
        lease_id=held.id,
        engine_id=held.owner.engine_id,
        request_id=held.owner.request_id,
        remaining=duration_of(held.expires_at - now),
    )
    if session is not None:
        status.client_name, status.pid = session.client_name, session.pid
    if isinstance(held, BlockLease):
        status.kind = admin_pb2.LEASE_KIND_READ
        status.age.CopyFrom(duration_of(now - held.granted_at))
        status.blocks = held.hits
        status.bytes = sum(block.nbytes for block in held.items if block is not None)
        status.pending_blocks = held.pending
    else:
        status.kind = admin_pb2.LEASE_KIND_WRITE
        status.age.CopyFrom(duration_of(now - held.begun_at))
        status.blocks, status.bytes = len(held.blocks), sum(block.part_bytes for block in held.blocks)
        status.pending_blocks = len(held.blocks)
    return status


def handoff_status(hold: Hold, now: float) -> admin_pb2.HandoffStatus:
    return admin_pb2.HandoffStatus(
        engine_id=hold.engine[1],
        request_id=hold.name[2],
        direction=handoff_pb2.HandoffDirection.Name(hold.direction.value),
        tenant=hold.tenant,
        num_tokens=hold.num_tokens,
        blocks=len(hold.items) - hold.items.count(None),
        bytes=hold.nbytes,
        pending_blocks=hold.pending,
        claims=hold.claims,
        age=duration_of(now - hold.published_at),
        remaining=duration_of(hold.expires_at - now),
    )


def handoff_totals(direction: HandoffDirection, stats: HandoffStats) -> admin_pb2.HandoffTotals:
    return admin_pb2.HandoffTotals(
        **_same_fields(admin_pb2.HandoffTotals, stats),
        direction=handoff_pb2.HandoffDirection.Name(direction.value),
        held_time=duration_of(stats.held_seconds),
    )


def explain_answer(record: RequestRecord, tiers: list[str], now: float) -> admin_pb2.ExplainRequestResponse:
    """`tiers` has the names of all tiers, in lookup order."""
    answer = admin_pb2.ExplainRequestResponse(
        engine_id=record.engine_id,
        age=duration_of(now - record.at),
        finished=record.finished,
        incomplete_blocks=record.incomplete,
        lookups=[_lookup(lookup, tiers, now) for lookup in record.lookups],
        holds=[_hold(hold, now) for hold in record.holds],
        total_lookups=record.asked,
    )
    if record.negotiation is not None:
        answer.policy = POLICIES[record.negotiation.policy]
        for tier, vote in record.negotiation.votes:
            answer.votes.add(tier=tier, policy=POLICIES[vote.policy], why=vote.why)
    return answer


def _lookup(lookup: LookupRecord, tiers: list[str], now: float) -> admin_pb2.LookupExplained:
    claim = lookup.claim
    return admin_pb2.LookupExplained(
        age=duration_of(now - lookup.at),
        spans=[_span(span, tiers) for span in lookup.outcomes()],
        first_missed_key=lookup.first_miss or b"",
        hold=handoff_pb2.HoldRef(engine_id=claim.engine_id, request_id=claim.request_id) if claim else None,
        claim_outcome=admin_pb2.ClaimOutcome.Name(claim.outcome.value) if claim else None,
        unwanted_blocks=claim.unwanted if claim else 0,
    )


def _hold(hold: HoldRecord, now: float) -> admin_pb2.HoldExplained:
    return admin_pb2.HoldExplained(
        age=duration_of(now - hold.at),
        direction=handoff_pb2.HandoffDirection.Name(hold.direction.value),
        status=handoff_pb2.PublishStatus.Name(hold.status.value),
        num_tokens=hold.num_tokens,
        blocks=hold.blocks,
        pending_blocks=hold.pending,
        claims=hold.claims,
        claimed_blocks=hold.hits,
        end=admin_pb2.HoldEnd.Name(hold.end.value) if hold.end else None,
        end_age=duration_of(now - hold.ended_at) if hold.end else None,
    )


def _span(span: OutcomeRun, tiers: list[str]) -> admin_pb2.KeySpan:
    if isinstance(span.outcome, MissReason):
        return admin_pb2.KeySpan(keys=span.count, miss_reason=admin_pb2.MissReason.Name(span.outcome.value))
    if span.outcome is None:
        return admin_pb2.KeySpan(keys=span.count, deferred=True)
    return admin_pb2.KeySpan(keys=span.count, hit_tier=tiers[span.outcome])


def _same_fields(message: type[Message], stats: TierStats | ShareStats | HandoffStats) -> dict[str, Any]:
    """Returns the values of `stats` for the scalar fields of `message` with the same names."""
    scalars = [field.name for field in message.DESCRIPTOR.fields if field.message_type is None]
    return {name: getattr(stats, name) for name in scalars if hasattr(stats, name)}


def fsck_step(progress: Progress) -> admin_pb2.FsckResponse:
    return admin_pb2.FsckResponse(
        tier=progress.tier.name,
        tier_type=progress.tier.type,
        blocks=progress.blocks,
        checked_bytes=progress.nbytes,
        total_blocks=progress.total,
        findings=[
            admin_pb2.FsckFinding(
                namespace_id=finding.name[:NAMESPACE_BYTES],
                key=finding.name[NAMESPACE_BYTES:],
                size_bytes=finding.nbytes,
                problem=finding.problem,
                repaired=finding.repaired,
            )
            for finding in progress.findings
        ],
        done=progress.done,
        note=progress.note,
        error=progress.error,
    )
