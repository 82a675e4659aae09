"""Reading what a lookup has found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import xxhash

from ...cuda.copy import HostBuffer, address_of, copy_batch
from ...protos.frames import decode_pull_frame
from ...protos.packed import unpack_offsets
from ...protos.v1 import cache_pb2, transfer_pb2
from ..effects import Connect, Copy, Operation, Pull
from ..errors import ChecksumMismatch, ServerError
from ..link import Link
from ..results import LookupResult, ReadBatch
from .base import consecutive, message
from .lookups import Lookups

__all__ = ["Loads", "Reading"]


@dataclass(slots=True)
class Reading:
    """A load between its two halves."""

    link: Link
    lease_id: int
    batch: ReadBatch


class Loads(Lookups):
    """Bytes out of the server."""

    def begin_read(self, held: ExitStack, lease: LookupResult | int, items: Sequence[int]) -> Operation[Reading]:
        """Makes items of a lease readable until `held` is closed; `end_read` must follow."""
        link: Link = yield Connect(self._timeouts.connect)
        lease_id = lease if isinstance(lease, int) else lease.id
        held.enter_context(link.using())
        known = isinstance(lease, LookupResult) and lease.link is link and max(items, default=0) < len(lease.slots)
        if known and isinstance(lease, LookupResult):
            slots = [lease.slots[item] for item in items]
            sizes = self._sizes(lease.keys[item] for item in items)
        else:
            request = message(cache_pb2.PrepareLoadRequest, session=link.ref, lease_id=lease_id, items=items)
            answer = yield from self._call(link, "CacheService/PrepareLoad", request)
            slots, sizes = unpack_offsets(answer.slot_offsets), unpack_offsets(answer.part_sizes_bytes)
        if link.region is not None:
            return Reading(link, lease_id, ReadBatch(link.region.memory, link.region.address, slots, sizes))
        staging = held.enter_context(self._staging.lend(sum(sizes)))
        received = yield from self._pull(link, lease_id, items, staging)
        if received != sum(sizes):
            raise ServerError(f"{received} bytes arrived where {sum(sizes)} were announced")
        batch = ReadBatch(staging, address_of(staging)[0], consecutive(sizes), sizes)
        return Reading(link, lease_id, batch)

    def end_read(self, reading: Reading, *, release: bool = False) -> Operation[None]:
        """Makes sure that a lease held while it was read: asks on the very session that read."""
        request = message(
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

        request = message(transfer_pb2.PullRequest, session=link.ref, lease_id=lease_id, items=items)
        yield Pull(link, request, take, self._timeouts.transfer)
        return received
