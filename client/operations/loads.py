"""Reading what a lookup has found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...cuda.host.copy import HostBuffer, address_of, copy_batch
from ...protos.v1 import cache_pb2, transfer_pb2
from ...protos.wire.packed_keys import unpack_offsets
from ..effects import Connect, Copy, Operation, Pull
from ..errors import KVTierError, ServerError
from ..part_streams import ATTEMPTS, PartReceiver, is_retryable
from ..results import LookupResult, ReadBatch
from ..session.session import Session
from .base import consecutive, message
from .lookups import LookupOperations

__all__ = ["LoadOperations", "Reading"]


def _sources(batch: ReadBatch, blocks: int) -> list[int]:
    """Returns the addresses of so many parts. Raises `ServerError` where the server has named fewer, or more."""
    if not len(batch.offsets) == len(batch.sizes) == blocks:
        raise ServerError(f"the server has named {len(batch.offsets)} slots for {blocks} blocks")
    return [batch.address + offset for offset in batch.offsets]


@dataclass(slots=True)
class Reading:
    """A load between its two halves."""

    link: Session
    lease_id: int
    batch: ReadBatch


class LoadOperations(LookupOperations):
    """Bytes out of the server."""

    def begin_read(
        self,
        held: ExitStack,
        lease: LookupResult | int,
        items: Sequence[int],
        *,
        sizes: Sequence[int] | None = None,
    ) -> Operation[Reading]:
        """Makes items of a lease readable until `held` is closed; `end_read` must follow.

        `sizes` are those of the items' parts, where they are known already.
        """
        link: Session = yield Connect(self._timeouts.connect)
        lease_id = lease if isinstance(lease, int) else lease.id
        held.enter_context(link.using())
        known = isinstance(lease, LookupResult) and lease.link is link and max(items, default=0) < len(lease.slots)
        if known and isinstance(lease, LookupResult):
            slots = [lease.slots[item] for item in items]
            sizes = self._sizes(lease.keys[item] for item in items) if sizes is None else sizes
        else:
            request = message(cache_pb2.PrepareLoadRequest, session=link.ref, lease_id=lease_id, items=items)
            answer = yield from self._call(link, "CacheService/PrepareLoad", request)
            slots, sizes = unpack_offsets(answer.slot_offsets), unpack_offsets(answer.part_sizes_bytes)
        if link.region is not None:
            return Reading(link, lease_id, ReadBatch(link.region.memory[:], link.region.address, slots, sizes))
        staging = held.enter_context(self._staging.lend(sum(sizes)))
        batch = ReadBatch(staging, address_of(staging)[0], consecutive(sizes), sizes)
        yield from self._pull(link, lease_id, items, [batch.address + offset for offset in batch.offsets], sizes)
        return Reading(link, lease_id, batch)

    def end_read(self, reading: Reading, *, release: bool = False) -> Operation[None]:
        """Makes sure that a lease held while it was read: asks on the very session that read."""
        yield from self._confirm(reading.link, reading.lease_id, release=release)

    def load(
        self, held: ExitStack, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str, wait: float
    ) -> Operation[int]:
        """Fills buffers with the leading hits; returns how many."""
        destinations, sizes = self._places(keys, buffers, writable=True)
        found = yield from self.lookup(keys, request_id=request_id, wait=wait, prefix=True, lease=None, want_slots=True)
        if not found.prefix_hits:
            if found.id:
                yield from self.release([found.id])
            return 0
        hits = found.prefix_hits
        try:
            link = found.link
            if link.region is None:
                held.enter_context(link.using())
                yield from self._load_by_stream(link, found.id, range(hits), destinations[:hits], sizes[:hits])
                return hits
            reading = yield from self.begin_read(held, found, range(hits), sizes=sizes[:hits])
            batch = reading.batch
            sources = _sources(batch, hits)
            yield Copy(lambda: copy_batch(destinations[:hits], sources, batch.sizes))
            yield from self.end_read(reading, release=True)
        except BaseException:
            yield from self._quietly(self.release([found.id]))
            raise
        return hits

    def _load_by_stream(
        self, link: Session, lease_id: int, items: Sequence[int], addresses: Sequence[int], sizes: Sequence[int]
    ) -> Operation[None]:
        """Fills buffers, and confirms that the lease held meanwhile; ends it."""
        if not (yield from self._pull(link, lease_id, items, addresses, sizes, complete=True)):
            yield from self._confirm(link, lease_id, release=True)

    def _confirm(self, link: Session, lease_id: int, *, release: bool) -> Operation[None]:
        request = message(cache_pb2.CompleteLoadRequest, session=link.ref, lease_id=lease_id, release=release)
        yield from self._call(link, "CacheService/CompleteLoad", request)

    def _pull(
        self,
        link: Session,
        lease_id: int,
        items: Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        complete: bool = False,
    ) -> Operation[bool]:
        """Fills memory, all at once or piece after piece; returns whether that has confirmed the load and ended the lease."""
        sink = PartReceiver(addresses, sizes)
        attempt = 0
        while sink.missing:
            attempt += 1
            request = message(
                transfer_pb2.PullRequest,
                session=link.ref,
                lease_id=lease_id,
                items=[items[number] for number in sink.missing],
                # One that is continued is confirmed when all of it is there.
                complete=complete and attempt == 1,
            )
            try:
                yield Pull(link, request, sink.take, self._timeouts.transfer, sink)
            except KVTierError as error:
                if attempt == ATTEMPTS or not is_retryable(error, link):
                    raise
                sink.settle()
            else:
                sink.settle()
                if sink.missing:
                    raise ServerError("the server has ended a stream before all of it had come")
        return sink.completed
