"""What a client can do, written once: each operation yields effects (`effects`) and returns its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import xxhash
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ..cuda.copy import HostBuffer, address_of, copy_batch
from ..protos.frames import decode_pull_frame, encode_push_frame
from ..protos.packed import unpack_offsets
from ..protos.v1 import admin_pb2, cache_pb2, transfer_pb2
from .effects import Call, Connect, Copy, Operation, Pull, Push
from .errors import ChecksumMismatch, DeadlineExceeded, InvalidRequest, KVTierError, ServerError, SessionLost
from .link import Link
from .namespace import Namespace
from .results import (
    LookupResult,
    OffloadPolicy,
    ReadBatch,
    RequestOutcome,
    StoreStatus,
    TierFilter,
    TierVote,
    WriteBatch,
)
from .staging import StagingPool
from .timeouts import Timeouts

__all__ = ["Operations", "Reading", "Writing"]


@dataclass(slots=True)
class Reading:
    """A load between its two halves."""

    link: Link
    lease_id: int
    batch: ReadBatch


@dataclass(slots=True)
class Writing:
    """A store between its two halves."""

    link: Link
    store_id: int
    batch: WriteBatch


class Operations:
    """Operations of one client; stateless but for the staging buffers."""

    def __init__(self, namespace: Namespace, timeouts: Timeouts, lost: Callable[[Link], None]) -> None:
        """`lost` is told of a link whose session the server does not know any more."""
        self._namespace = namespace
        self._timeouts = timeouts
        self._lost = lost
        self._staging = StagingPool()

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
    ) -> Operation[LookupResult]:
        """Announces a request and looks up its keys."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(
            cache_pb2.BeginRequestRequest,
            session=link.ref,
            request_id=request_id,
            keys=keys,
            mode=_mode(prefix),
            prompt_tokens=prompt_tokens,
            priority=priority,
            kv_transfer_params_json=_json(kv_transfer_params),
            wait=_duration(wait),
            lease_duration=_duration(lease),
            exclude=_filter(exclude),
            min_hits=min_hits,
            retain_for=_duration(retain_for),
        )
        answer = yield from self._call(link, "CacheService/BeginRequest", request, wait)
        votes = tuple(TierVote(vote.tier, OffloadPolicy(vote.policy), vote.why) for vote in answer.votes)
        return _lookup_result(answer.lookup, request_id, keys, link, OffloadPolicy(answer.policy), votes)

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
        want_slots: bool = False,
    ) -> Operation[LookupResult]:
        """Looks up keys and leases the hits."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(
            cache_pb2.LookupRequest,
            session=link.ref,
            request_id=request_id,
            keys=keys,
            mode=_mode(prefix),
            wait=_duration(wait),
            lease_duration=_duration(lease),
            want_slots=want_slots and link.region is not None,
            exclude=_filter(exclude),
            min_hits=min_hits,
            retain_for=_duration(retain_for),
        )
        answer = yield from self._call(link, "CacheService/Lookup", request, wait)
        return _lookup_result(answer, request_id, keys, link)

    def begin_read(self, held: ExitStack, lease: LookupResult | int, items: Sequence[int]) -> Operation[Reading]:
        """Makes items of a lease readable until `held` is closed; `end_read` must follow."""
        link: Link = yield Connect(self._timeouts.connect)
        lease_id = lease if isinstance(lease, int) else lease.id
        held.enter_context(link.using())
        known = isinstance(lease, LookupResult) and lease.link is link and max(items, default=0) < len(lease.slots)
        if known and isinstance(lease, LookupResult):
            slots = [lease.slots[item] for item in items]
            sizes = [self._namespace.part_bytes_of(lease.keys[item]) for item in items]
        else:
            request = _message(cache_pb2.PrepareLoadRequest, session=link.ref, lease_id=lease_id, items=items)
            answer = yield from self._call(link, "CacheService/PrepareLoad", request)
            slots, sizes = unpack_offsets(answer.slot_offsets), unpack_offsets(answer.part_sizes_bytes)
        if link.region is not None:
            return Reading(link, lease_id, ReadBatch(link.region.memory, link.region.address, slots, sizes))
        staging = held.enter_context(self._staging.lend(sum(sizes)))
        received = yield from self._pull(link, lease_id, items, staging)
        if received != sum(sizes):
            raise ServerError(f"{received} bytes arrived where {sum(sizes)} were announced")
        batch = ReadBatch(staging, address_of(staging)[0], _consecutive(sizes), sizes)
        return Reading(link, lease_id, batch)

    def end_read(self, reading: Reading, *, release: bool = False) -> Operation[None]:
        """Makes sure that a lease held while it was read: asks on the very session that read."""
        request = _message(
            cache_pb2.CompleteLoadRequest, session=reading.link.ref, lease_id=reading.lease_id, release=release
        )
        yield from self._call(reading.link, "CacheService/CompleteLoad", request)

    def load(
        self, held: ExitStack, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str, wait: float
    ) -> Operation[int]:
        """Fills buffers with the leading hits; returns how many."""
        destinations = self._addresses(keys, buffers, writable=True)
        found = yield from self.lookup(keys, request_id=request_id, wait=wait, prefix=True, lease=None, want_slots=True)
        if not found.prefix_hits:
            if found.id:
                yield from self.release([found.id])
            return 0
        try:
            reading = yield from self.begin_read(held, found, range(found.prefix_hits))
            batch = reading.batch
            sources = [batch.address + offset for offset in batch.offsets]
            yield Copy(lambda: copy_batch(destinations[: len(sources)], sources, batch.sizes))
            yield from self.end_read(reading, release=True)
        except BaseException:
            yield from self._quietly(self.release([found.id]))
            raise
        return found.prefix_hits

    def begin_write(
        self, held: ExitStack, keys: Sequence[bytes], *, request_id: str, retain_for: float | None = None
    ) -> Operation[Writing]:
        """Makes slots, or staging, writable until `held` is closed; `end_write` must follow."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(
            cache_pb2.PrepareStoreRequest,
            session=link.ref,
            request_id=request_id,
            keys=keys,
            retain_for=_duration(retain_for),
        )
        held.enter_context(link.using())
        answer = yield from self._call_for_sure(link, "CacheService/PrepareStore", request)
        wanted = [number for number, status in enumerate(answer.statuses) if status == StoreStatus.GRANTED]
        sizes = [self._namespace.part_bytes_of(keys[number]) for number in wanted]
        if link.region is not None:
            memory, address, offsets = link.region.memory, link.region.address, unpack_offsets(answer.slot_offsets)
        else:
            memory = held.enter_context(self._staging.lend(sum(sizes)))
            address, offsets = address_of(memory)[0], _consecutive(sizes)
        batch = WriteBatch(answer.statuses, wanted, memory, address, offsets, sizes, answer.not_retained_blocks)
        return Writing(link, answer.store_id, batch)

    def end_write(self, writing: Writing, *, abort: bool = False) -> Operation[None]:
        """Ends a store: sends what was staged, and completes or aborts it."""
        link, batch = writing.link, writing.batch
        if not writing.store_id:
            return
        request = _message(
            cache_pb2.CompleteStoreRequest,
            session=link.ref,
            store_id=writing.store_id,
            failed_items=sorted(batch.failed),
            abort=abort,
        )
        if link.region is None and not abort:
            try:
                yield from self._push(writing)
            except KVTierError:
                request.abort = True
                yield from self._quietly(self._call_for_sure(link, "CacheService/CompleteStore", request))
                raise
        yield from self._call_for_sure(link, "CacheService/CompleteStore", request)

    def store(
        self,
        held: ExitStack,
        keys: Sequence[bytes],
        buffers: Sequence[HostBuffer],
        *,
        request_id: str,
        retain_for: float | None = None,
    ) -> Operation[bytes]:
        """Stores buffers; returns a `StoreStatus` per key."""
        sources = self._addresses(keys, buffers, writable=False)
        writing = yield from self.begin_write(held, keys, request_id=request_id, retain_for=retain_for)
        batch = writing.batch
        wanted = [sources[number] for number in batch.wanted]
        destinations = [batch.address + offset for offset in batch.offsets]
        try:
            yield Copy(lambda: copy_batch(destinations, wanted, batch.sizes))
        except BaseException:
            yield from self._quietly(self.end_write(writing, abort=True))
            raise
        yield from self.end_write(writing)
        return batch.statuses

    def flush(self, keys: Sequence[bytes], *, wait: float) -> Operation[bytes]:
        """Waits until blocks are durable; returns a `DurableStatus` per key."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(cache_pb2.FlushRequest, session=link.ref, keys=keys, wait=_duration(wait))
        answer = yield from self._call(link, "CacheService/Flush", request, wait)
        statuses: bytes = answer.statuses
        return statuses

    def release(self, lease_ids: Iterable[int]) -> Operation[None]:
        """Gives leases back."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(cache_pb2.ReleaseLeaseRequest, session=link.ref, lease_ids=lease_ids)
        yield from self._call(link, "CacheService/ReleaseLease", request)

    def touch(self, lease_ids: Iterable[int], *, lease: float | None) -> Operation[list[int]]:
        """Extends leases; returns those that are gone."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(
            cache_pb2.TouchRequest, session=link.ref, lease_ids=lease_ids, lease_duration=_duration(lease)
        )
        answer = yield from self._call(link, "CacheService/Touch", request)
        return list(answer.missing_lease_ids)

    def finish_request(self, request_id: str, *, wait: float) -> Operation[RequestOutcome]:
        """Ends a request."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(
            cache_pb2.FinishRequestRequest, session=link.ref, request_id=request_id, wait=_duration(wait)
        )
        answer = yield from self._call(link, "CacheService/FinishRequest", request, wait)
        return RequestOutcome(answer.settled, answer.incomplete_blocks)

    def reset(self, *, wait: float) -> Operation[int]:
        """Empties the CPU tier of the namespace; returns how many blocks are waited for."""
        link: Link = yield Connect(self._timeouts.connect)
        request = _message(cache_pb2.ResetRequest, session=link.ref, wait=_duration(wait))
        answer = yield from self._call(link, "CacheService/Reset", request, wait)
        pending: int = answer.pending_blocks
        return pending

    def status(self) -> Operation[admin_pb2.GetStatusResponse]:
        """Asks for the server's status."""
        answer: admin_pb2.GetStatusResponse = yield Call(
            "AdminService/GetStatus", admin_pb2.GetStatusRequest(), self._timeouts.call
        )
        return answer

    def _call(self, link: Link, method: str, request: Any, wait: float = 0.0) -> Operation[Any]:
        try:
            return (yield Call(method, request, self._timeouts.call + wait))
        except SessionLost:
            self._lost(link)
            raise

    def _call_for_sure(self, link: Link, method: str, request: Any) -> Operation[Any]:
        """Calls what grants slots or gives them back.

        Where nobody knows whether it was carried out (no answer in time, or the caller was cancelled), slots could stay with
        a session that does not know of them: so that session ends, and with it whatever it holds.
        """
        try:
            return (yield from self._call(link, method, request))
        except BaseException as error:
            if isinstance(error, DeadlineExceeded) or not isinstance(error, KVTierError):
                self._lost(link)
            raise

    def _quietly(self, operation: Operation[None]) -> Operation[None]:
        """Runs an operation that tidies up after a failure, whose own failure is of no interest."""
        try:
            yield from operation
        except KVTierError:
            return

    def _push(self, writing: Writing) -> Operation[None]:
        link, batch = writing.link, writing.batch
        step, total = link.limits.max_frame_bytes, sum(batch.sizes)

        def frames() -> Iterator[bytes]:
            for start in range(0, total, step):
                payload = batch.memory[start : min(start + step, total)]
                checksum = xxhash.xxh3_64_intdigest(payload)
                if start:
                    yield encode_push_frame(start, checksum, [payload])
                else:
                    yield encode_push_frame(start, checksum, [payload], session=link.ref, store_id=writing.store_id)

        answer = yield Push(link, frames, self._timeouts.transfer)
        if answer.received_bytes != total:
            raise ServerError(f"the server took {answer.received_bytes} of {total} bytes")

    def _pull(self, link: Link, lease_id: int, items: Sequence[int], staging: memoryview) -> Operation[int]:
        received = 0

        def take(message: bytes) -> None:
            nonlocal received
            try:
                fields, payload = decode_pull_frame(message)
            except ValueError as error:
                raise ServerError(str(error)) from error
            if xxhash.xxh3_64_intdigest(payload) != fields.xxh3_64:
                raise ChecksumMismatch(f"the frame at byte {fields.offset_bytes} arrived damaged")
            end = fields.offset_bytes + payload.nbytes
            if end > staging.nbytes:
                raise ServerError(f"the server sends {end} bytes where at most {staging.nbytes} were announced")
            staging[fields.offset_bytes : end] = payload
            received += payload.nbytes

        request = _message(transfer_pb2.PullRequest, session=link.ref, lease_id=lease_id, items=items)
        yield Pull(link, request, take, self._timeouts.transfer)
        return received

    def _addresses(self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, writable: bool) -> list[int]:
        if len(keys) != len(buffers):
            raise InvalidRequest(f"{len(keys)} keys, but {len(buffers)} buffers")
        addresses = []
        for key, buffer in zip(keys, buffers, strict=True):
            try:
                wanted = self._namespace.part_bytes_of(key)
                address, nbytes = address_of(buffer, writable=writable)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(str(error)) from error
            if nbytes != wanted:
                raise InvalidRequest(f"a buffer of {nbytes} bytes for a part of {wanted}")
            addresses.append(address)
        return addresses


def _lookup_result(
    answer: cache_pb2.LookupResponse,
    request_id: str,
    keys: Sequence[bytes],
    link: Link,
    policy: OffloadPolicy | None = None,
    votes: tuple[TierVote, ...] = (),
) -> LookupResult:
    return LookupResult(
        id=answer.lease_id,
        statuses=answer.statuses,
        prefix_hits=answer.prefix_hits,
        request_id=request_id,
        keys=keys,
        link=link,
        source_indices=answer.sources,
        slots=unpack_offsets(answer.slot_offsets),
        policy=policy,
        votes=votes,
        not_retained=answer.not_retained_blocks,
    )


M = TypeVar("M", bound=Message)


def _message(make: type[M], **fields: Any) -> M:
    """Makes a request of what the user gave us."""
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def _json(params: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(params) if params else ""
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"kv_transfer_params are not JSON: {error}") from error


def _mode(prefix: bool) -> cache_pb2.LookupMode:  # noqa: FBT001 - named by its callers
    return cache_pb2.LOOKUP_MODE_PREFIX if prefix else cache_pb2.LOOKUP_MODE_EACH


def _filter(exclude: TierFilter | None) -> cache_pb2.TierFilter | None:
    if exclude is None:
        return None
    media = [cache_pb2.TierMedium.Name(medium) for medium in exclude.media]
    return _message(cache_pb2.TierFilter, names=exclude.names, media=media, remote=exclude.remote)


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _consecutive(sizes: Sequence[int]) -> list[int]:
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
