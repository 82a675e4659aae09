"""Operations on requests, lookups and leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protos.v1 import cache_pb2
from ...protos.wire.packed_keys import unpack_offsets
from ..effects import Connect, Operation
from ..errors import InvalidRequest
from ..results import (
    KeyStatus,
    LookupResult,
    Medium,
    OffloadPolicy,
    Prefetched,
    RequestOutcome,
    SourceOutcome,
    TierFilter,
    TierVote,
)
from ..session.session import ClientSession
from .base import Grant, SessionOperations, as_json, duration, member, message, packed

__all__ = ["LookupOperations", "lease_id_of"]

_READABLE = frozenset({KeyStatus.HIT, KeyStatus.HIT_PENDING})


class LookupOperations(SessionOperations):
    def begin_request(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        priority: int,
        kv_transfer_params: Mapping[str, Any] | None,
        wait: float,
        prefix: bool,
        lease: float | None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
        source: str = "",
        conversation_id: str = "",
    ) -> Operation[LookupResult]:
        session: ClientSession = yield Connect(self._timeouts.connect)
        request = message(
            cache_pb2.BeginRequestRequest,
            session=session.ref,
            request_id=request_id,
            keys=packed(keys),
            mode=lookup_mode(prefix),
            prompt_tokens=prompt_tokens,
            priority=priority,
            kv_transfer_params_json=as_json(kv_transfer_params),
            wait=duration("wait", wait),
            lease_duration=duration("lease", lease),
            exclude=tier_filter(exclude),
            min_hits=min_hits,
            retain_for=duration("retain_for", retain_for),
            source=source,
            conversation_id=conversation_id,
            grant_id=self._new_grant(),
        )
        answer = yield from self._call_granting(session, request.grant_id, "CacheService/BeginRequest", request, wait)
        votes = tuple(TierVote(vote.tier, OffloadPolicy(vote.policy), vote.why) for vote in answer.votes)
        found = lookup_result(answer.lookup, request_id, keys, session)
        return replace(found, policy=OffloadPolicy(answer.policy), votes=votes)

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request_id: str,
        wait: float,
        prefix: bool,
        lease: float | None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
        source: str = "",
        want_slots: bool = False,
        grant: Grant | None = None,
    ) -> Operation[LookupResult]:
        """`want_slots`: if the region is mapped, the result also has the slots of the hits.

        `grant`: set if the caller ends the lease by it; see `_owning`.
        """
        session: ClientSession = yield Connect(self._timeouts.connect)
        if grant is not None:
            grant.session = session
        request = message(
            cache_pb2.LookupRequest,
            session=session.ref,
            request_id=request_id,
            keys=packed(keys),
            mode=lookup_mode(prefix),
            wait=duration("wait", wait),
            lease_duration=duration("lease", lease),
            want_slots=want_slots and session.region is not None,
            exclude=tier_filter(exclude),
            min_hits=min_hits,
            retain_for=duration("retain_for", retain_for),
            source=source,
            grant_id=grant.id if grant is not None else self._new_grant(),
        )
        answer = yield from self._call_granting(session, request.grant_id, "CacheService/Lookup", request, wait)
        return lookup_result(answer, request_id, keys, session)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        request_id: str,
        wait: float,
        exclude: TierFilter | None,
        retain_for: float | None,
        source: str = "",
    ) -> Operation[Prefetched]:
        session: ClientSession = yield Connect(self._timeouts.connect)
        request = message(
            cache_pb2.PrefetchRequest,
            session=session.ref,
            request_id=request_id,
            keys=packed(keys),
            wait=duration("wait", wait),
            exclude=tier_filter(exclude),
            retain_for=duration("retain_for", retain_for),
            source=source,
        )
        answer = yield from self._call(session, "CacheService/Prefetch", request, wait)
        return Prefetched(
            present=answer.present_blocks,
            started=answer.started_blocks,
            missing=answer.missing_blocks,
            no_room=answer.no_room_blocks,
            unanswered=answer.unanswered_blocks,
            not_retained=answer.not_retained_blocks,
            source_outcome=SourceOutcome(answer.source_outcome),
        )

    def release(self, lease_ids: Iterable[int]) -> Operation[None]:
        yield from self._request(cache_pb2.ReleaseLeaseRequest, "CacheService/ReleaseLease", lease_ids=lease_ids)

    def _release_granted(self, found: LookupResult, grant_id: int) -> Operation[None]:
        """Releases a lease. If the answer is not known, the lease ends in the background."""
        request = cache_pb2.ReleaseLeaseRequest(session=found.session.ref, lease_ids=[found.id])
        yield from self._call_granting(found.session, grant_id, "CacheService/ReleaseLease", request)

    def touch(self, lease_ids: Iterable[int], *, lease: float | None) -> Operation[list[int]]:
        answer = yield from self._request(
            cache_pb2.TouchRequest, "CacheService/Touch", lease_ids=lease_ids, lease_duration=duration("lease", lease)
        )
        return list(answer.missing_lease_ids)

    def finish_request(self, request_id: str, *, wait: float) -> Operation[RequestOutcome]:
        answer = yield from self._request(
            cache_pb2.FinishRequestRequest, "CacheService/FinishRequest", request_id=request_id, wait=wait
        )
        return RequestOutcome(answer.settled, answer.incomplete_blocks)


def lookup_result(
    answer: cache_pb2.LookupResponse, request_id: str, keys: Sequence[bytes], session: ClientSession
) -> LookupResult:
    return LookupResult(
        id=answer.lease_id,
        statuses=answer.statuses,
        prefix_hits=answer.prefix_hits,
        request_id=request_id,
        keys=keys,
        session=session,
        source_indices=answer.sources,
        slots=unpack_offsets(answer.slot_offsets),
        not_retained=answer.not_retained_blocks,
        source_outcome=SourceOutcome(answer.source_outcome),
    )


def lease_id_of(lease: LookupResult | int, items: Sequence[int]) -> int:
    """Returns the id of a lease. Raises `InvalidRequest` if an item was no hit of the lookup."""
    if isinstance(lease, int):
        return lease
    if not isinstance(lease, LookupResult):
        raise InvalidRequest(f"a lease or its id is necessary, not {lease!r:.100}")
    statuses = lease.statuses
    try:
        for item in items:
            if not 0 <= item < len(statuses) or statuses[item] not in _READABLE:
                raise InvalidRequest(f"item {item} was no hit of this lookup of {len(statuses)} keys")
    except TypeError as error:
        raise InvalidRequest(f"items must be a sequence of integers: {error}") from None
    return lease.id


def lookup_mode(prefix: bool) -> cache_pb2.LookupMode:  # noqa: FBT001 - named by its callers
    return cache_pb2.LOOKUP_MODE_PREFIX if prefix else cache_pb2.LOOKUP_MODE_EACH


def tier_filter(exclude: TierFilter | None) -> cache_pb2.TierFilter | None:
    if exclude is None:
        return None
    if not isinstance(exclude, TierFilter):
        raise InvalidRequest(f"exclude must be a TierFilter, not {exclude!r:.100}")
    for name in ("names", "media"):
        if isinstance(value := getattr(exclude, name), str) or not isinstance(value, Iterable):
            raise InvalidRequest(f"TierFilter.{name} must be a collection, not {value!r}")
    media = [cache_pb2.TierMedium.Name(member(Medium, medium, "TierFilter.media")) for medium in exclude.media]
    return message(cache_pb2.TierFilter, names=exclude.names, media=media, remote=exclude.remote)
