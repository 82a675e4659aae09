"""Operations on requests, lookups and leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from ...protos.v1 import cache_pb2
from ..effects import Operation
from ..errors import InvalidRequest
from ..results import (
    KeyStatus,
    LeaseSlots,
    LookupResult,
    OffloadPolicy,
    Prefetched,
    RequestOutcome,
    SourceOutcome,
    TierVote,
)
from ..session.session import ClientSession
from .arguments import LookupOptions, PrefetchOptions, RequestOptions, duration, encoded, message, packed
from .base import Held, SessionOperations

__all__ = ["LookupOperations", "lease_id_of"]

_READABLE = frozenset({KeyStatus.HIT, KeyStatus.HIT_PENDING})
_OFFSET_BYTES = 8
_last: Callable[[bytes], int] = itemgetter(-1)


class LookupOperations(SessionOperations):
    def begin_request(self, request_id: str, keys: Sequence[bytes], options: RequestOptions) -> Operation[LookupResult]:
        session: ClientSession = yield self._connect
        request = message(
            cache_pb2.BeginRequestRequest,
            session=session.ref,
            request_id=request_id,
            keys=packed(keys),
            grant_id=self._new_grant(),
            **encoded(options),
        )
        wait = options.get("wait", 0.0)
        answer = yield from self._call(session, "CacheService/BeginRequest", request, wait, grant_id=request.grant_id)
        votes = tuple(TierVote(vote.tier, OffloadPolicy(vote.policy), vote.why) for vote in answer.votes)
        names = self._digests.names if options.get("slots") else None
        found = lookup_result(answer.lookup, request_id, keys, session, names)
        return replace(found, policy=OffloadPolicy(answer.policy), votes=votes)

    def lookup(
        self, keys: Sequence[bytes], options: LookupOptions, *, held: Held | None = None
    ) -> Operation[LookupResult]:
        """`held`: set if the caller ends the lease by its grant."""
        session: ClientSession = yield self._connect
        if held is not None:
            held.session = session
        request = message(
            cache_pb2.LookupRequest,
            session=session.ref,
            keys=packed(keys),
            grant_id=held.grant_id if held is not None else self._new_grant(),
            **encoded(options),
        )
        wait, request_id = options.get("wait", 0.0), options.get("request_id", "")
        answer = yield from self._call(session, "CacheService/Lookup", request, wait, grant_id=request.grant_id)
        names = self._digests.names if options.get("slots") else None
        return lookup_result(answer, request_id, keys, session, names)

    def prefetch(self, keys: Sequence[bytes], options: PrefetchOptions) -> Operation[Prefetched]:
        session: ClientSession = yield self._connect
        request = message(cache_pb2.PrefetchRequest, session=session.ref, keys=packed(keys), **encoded(options))
        wait = options.get("wait", 0.0)
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
        yield from self._call(found.session, "CacheService/ReleaseLease", request, grant_id=grant_id)

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
    answer: cache_pb2.LookupResponse,
    request_id: str,
    keys: Sequence[bytes],
    session: ClientSession,
    names: Callable[[Sequence[bytes]], Mapping[int, bytes]] | None = None,
) -> LookupResult:
    """`names`: `PartDigests.names`, if the lookup has asked for slots."""
    outcome = answer.source_outcome
    return LookupResult(
        id=answer.lease_id,
        statuses=answer.statuses,
        prefix_hits=answer.prefix_hits,
        request_id=request_id,
        keys=list(keys),  # the caller may change its list before `read`
        session=session,
        source_indices=answer.sources,
        slots=_slots_of(answer, keys, session, names),
        not_retained=answer.not_retained_blocks,
        source_outcome=SourceOutcome(outcome) if outcome else SourceOutcome.NONE,
    )


def _slots_of(
    answer: cache_pb2.LookupResponse,
    keys: Sequence[bytes],
    session: ClientSession,
    names: Callable[[Sequence[bytes]], Mapping[int, bytes]] | None,
) -> LeaseSlots | None:
    hits = answer.prefix_hits
    if names is None or not 0 < hits <= len(keys) or len(answer.slot_offsets) % (hits * _OFFSET_BYTES):
        return None
    keys = keys[:hits]
    verified = names(keys) if session.namespace_id else {}
    if not answer.slot_offsets and not verified:
        return None
    return LeaseSlots(session.ref.epoch, bytes(map(_last, keys)), answer.slot_offsets, verified)


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
