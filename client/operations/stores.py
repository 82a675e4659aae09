"""Writing blocks, and emptying what holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import xxhash

from ...cuda.copy import HostBuffer, address_of, copy_batch
from ...protos.frames import encode_push_frame
from ...protos.packed import unpack_offsets
from ...protos.v1 import cache_pb2
from ..effects import Connect, Copy, Operation, Push
from ..errors import KVTierError, ServerError
from ..link import Link
from ..results import StoreStatus, WriteBatch
from .base import Base, consecutive, duration, message

__all__ = ["Stores", "Writing"]


@dataclass(slots=True)
class Writing:
    """A store between its two halves."""

    link: Link
    store_id: int
    batch: WriteBatch


class Stores(Base):
    """Bytes into the server."""

    def begin_write(
        self, held: ExitStack, keys: Sequence[bytes], *, request_id: str, retain_for: float | None = None
    ) -> Operation[Writing]:
        """Makes slots, or staging, writable until `held` is closed; `end_write` must follow."""
        link: Link = yield Connect(self._timeouts.connect)
        request = message(
            cache_pb2.PrepareStoreRequest,
            session=link.ref,
            request_id=request_id,
            keys=keys,
            retain_for=duration(retain_for),
        )
        held.enter_context(link.using())
        answer = yield from self._call_for_sure(link, "CacheService/PrepareStore", request)
        wanted = [number for number, status in enumerate(answer.statuses) if status == StoreStatus.GRANTED]
        sizes = self._sizes(keys[number] for number in wanted)
        if link.region is not None:
            memory, address, offsets = link.region.memory, link.region.address, unpack_offsets(answer.slot_offsets)
        else:
            memory = held.enter_context(self._staging.lend(sum(sizes)))
            address, offsets = address_of(memory)[0], consecutive(sizes)
        batch = WriteBatch(answer.statuses, wanted, memory, address, offsets, sizes, answer.not_retained_blocks)
        return Writing(link, answer.store_id, batch)

    def end_write(self, writing: Writing, *, abort: bool = False) -> Operation[None]:
        """Ends a store: sends what was staged, and completes or aborts it."""
        link, batch = writing.link, writing.batch
        if not writing.store_id:
            return
        request = message(
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
        request = message(cache_pb2.FlushRequest, session=link.ref, keys=keys, wait=duration(wait))
        answer = yield from self._call(link, "CacheService/Flush", request, wait)
        statuses: bytes = answer.statuses
        return statuses

    def reset(self, *, wait: float) -> Operation[int]:
        """Empties the CPU tier of the namespace; returns how many blocks are waited for."""
        link: Link = yield Connect(self._timeouts.connect)
        request = message(cache_pb2.ResetRequest, session=link.ref, wait=duration(wait))
        answer = yield from self._call(link, "CacheService/Reset", request, wait)
        pending: int = answer.pending_blocks
        return pending

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
