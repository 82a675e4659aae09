"""Operations that store, flush and remove blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from ...cuda.host.copy import HostBuffer, address_of, copy_batch
from ...protos.v1 import cache_pb2, events_pb2, transfer_pb2
from ...protos.wire.block_contents import BlockContent, pack_contents
from ...protos.wire.packed_keys import unpack_offsets
from ...protos.wire.part_sequence import FRAME_BYTES
from ..effects import Copy, Operation, Push
from ..errors import InvalidRequest, KVTierError, LeaseLost, NotConnected, ServerError
from ..part_streams import ATTEMPTS, PartSender, is_retryable
from ..results import StoreStatus, WriteBatch
from ..session.session import ClientSession
from ..transport.grpc_methods import LOCATE
from .arguments import StoreOptions, message, packed
from .base import Base, Held, consecutive

__all__ = ["StoreOperations", "Writing"]

_GROUP_BYTES = 4
_GRANTED = bytes([StoreStatus.GRANTED])


@dataclass(slots=True)
class Writing:
    """A store between `begin_write` and `end_write`."""

    session: ClientSession
    store_id: int
    held: Held
    batch: WriteBatch
    keys: Sequence[bytes]
    options: StoreOptions
    positions: Sequence[int]
    """Positions in `keys` of the blocks of the store."""
    failed: Collection[int] = ()
    """Blocks of the store that the caller could not write."""
    has_digests: bool = False
    """Whether the digests of the parts are recorded."""
    stream_broke: bool = False
    """Whether a stream broke, so that the store may have ended without a fault of the caller."""


class StoreOperations(Base):
    def begin_write(
        self,
        held: Held,
        keys: Sequence[bytes],
        options: StoreOptions,
        *,
        staged: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> Operation[Writing]:
        """Begins a store. Returns memory to write the parts to, valid until the exit of `held`.

        The memory is slots of the region or, if no region is mapped, a staging buffer. If `staged`
        is false, there is no staging buffer; `end_write` then needs `sources`. `sizes`: part sizes,
        if known. Call `end_write` or `abort_write` afterwards.
        """
        session: ClientSession = yield self._connect
        held.use(session)
        held.session = session
        preparing = self._prepare_store(session, keys, options, held.grant_id)
        keys = list(keys)  # the caller may change its list before `end_write`
        answer = yield from preparing
        try:
            batch = self._batch(held, session, keys, answer, staged=staged, sizes=sizes)
        except BaseException as error:  # for example, no memory for a staging buffer
            yield from self._give_back(session, held.grant_id, error)
            raise
        return Writing(session, answer.store_id, held, batch, keys, options, batch.wanted)

    def _batch(
        self,
        held: Held,
        session: ClientSession,
        keys: Sequence[bytes],
        answer: cache_pb2.PrepareStoreResponse,
        *,
        staged: bool,
        sizes: Sequence[int] | None,
    ) -> WriteBatch:
        statuses: bytes = answer.statuses
        if len(statuses) != len(keys):
            raise ServerError(f"the server returned {len(statuses)} statuses for {len(keys)} keys")
        if statuses == _GRANTED * len(keys):  # fast path for new blocks
            wanted = list(range(len(keys)))
            sizes = self._sizes(keys) if sizes is None else sizes
        else:
            wanted = [number for number, status in enumerate(statuses) if status == StoreStatus.GRANTED]
            sizes = self._sizes(keys[number] for number in wanted)
        if (region := session.region) is not None:
            memory, address = region.memory[:], region.address
            offsets = unpack_offsets(answer.slot_offsets)
            session.check_slots(offsets, sizes)
        else:
            memory = held.borrow(self._staging.lend(sum(sizes))) if staged else memoryview(b"")
            address, offsets = address_of(memory)[0], consecutive(sizes)
        return WriteBatch(statuses, wanted, memory, address, offsets, sizes, answer.not_retained_blocks)

    def abort_write(self, writing: Writing, error: BaseException) -> Operation[None]:
        """Discards a store that failed with `error`. Raises no `KVTierError`."""
        if writing.store_id:
            yield from self._give_back(writing.session, writing.held.grant_id, error)

    def end_write(self, writing: Writing, *, sources: Sequence[int] | None = None) -> Operation[None]:
        """Sends the parts if no region is mapped, and completes the store.

        `sources`: addresses of the parts; None if the parts are in the staging buffer.
        """
        batch = writing.batch
        writing.failed, sizes = sorted(batch.failed), batch.sizes
        if sources is None:
            staged = writing.session.region is None
            sources = [batch.address + offset for offset in batch.offsets] if staged else ()
        if writing.store_id and writing.session.region is not None and not writing.has_digests:
            try:
                slots = [batch.address + offset for offset in batch.offsets]
                yield Copy(partial(self._record_digests, writing, slots))
            except GeneratorExit:
                raise  # the event loop has ended; a thread may still read the slots
            except BaseException as error:
                yield from self.abort_write(writing, error)
                raise
        attempt = 1
        while writing.store_id:
            try:
                yield from self._send_and_complete(writing, sources, sizes)
            except LeaseLost as error:
                if not writing.stream_broke:
                    raise
                if attempt == ATTEMPTS:
                    raise NotConnected(f"the streams of a store broke, and the store has ended: {error}") from error
            else:
                return
            attempt += 1
            kept = yield from self._prepare_again(writing)
            sources, sizes = [sources[number] for number in kept], [sizes[number] for number in kept]

    def _record_digests(self, writing: Writing, addresses: Sequence[int]) -> None:
        """Records the digests of the parts at these addresses: sources of a copy, or slots."""
        session, batch = writing.session, writing.batch
        assert session.region is not None
        keys = [writing.keys[position] for position in writing.positions]
        self._digests.record(session.region, session.namespace_id, keys, batch.offsets, addresses, batch.sizes)
        writing.has_digests = True

    def _send_and_complete(self, writing: Writing, sources: Sequence[int], sizes: Sequence[int]) -> Operation[None]:
        session = writing.session
        request = message(
            cache_pb2.CompleteStoreRequest,
            session=session.ref,
            store_id=writing.store_id,
            failed_items=writing.failed,
        )
        if session.region is None:
            try:
                if (yield from self._push(writing, sources, sizes)):
                    return
            except BaseException as error:  # a cancellation must not leave the store open either
                yield from self.abort_write(writing, error)
                raise
        yield from self._complete_store(session, request, writing.held.grant_id)

    def _prepare_again(self, writing: Writing) -> Operation[list[int]]:
        """Begins another store for the blocks that the server lacks, after an unknown outcome.

        The server may have completed the store, and its answer was lost. Returns the indices in
        `positions` of the blocks of the new store. Updates the statuses of blocks that the server
        neither has nor grants.
        """
        failed = set(writing.failed)
        written = [number for number in range(len(writing.positions)) if number not in failed]
        positions = [writing.positions[number] for number in written]
        wanted = [writing.keys[position] for position in positions]
        writing.held.grant_id = self._new_grant()
        answer = yield from self._prepare_store(writing.session, wanted, writing.options, writing.held.grant_id)
        statuses = bytearray(writing.batch.statuses)
        kept = []
        for number, position, status in zip(written, positions, answer.statuses, strict=True):
            if status == StoreStatus.GRANTED:
                kept.append(number)
            elif status != StoreStatus.PRESENT:
                statuses[position] = status
        writing.batch.statuses = bytes(statuses)
        writing.positions = [writing.positions[number] for number in kept]
        writing.store_id, writing.failed, writing.stream_broke = answer.store_id, (), False
        return kept

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[HostBuffer],
        options: StoreOptions,
    ) -> Operation[bytes]:
        sources, sizes = self._addresses_and_sizes(keys, buffers, writable=False)
        with self.held() as held:
            writing = yield from self.begin_write(held, keys, options, staged=False, sizes=sizes)
            batch = writing.batch
            wanted = sources if len(batch.wanted) == len(sources) else [sources[number] for number in batch.wanted]
            if writing.session.region is None:
                yield from self.end_write(writing, sources=wanted)
                return batch.statuses
            try:
                yield Copy(partial(self._copy, writing, wanted))
            except GeneratorExit:
                raise  # the event loop has ended; a thread may still copy to the slots
            except BaseException as error:
                yield from self.abort_write(writing, error)
                raise
            yield from self.end_write(writing)
            return batch.statuses

    def _copy(self, writing: Writing, sources: Sequence[int]) -> None:
        """Copies parts to their slots, and records their digests."""
        batch = writing.batch
        copy_batch(list(map(batch.address.__add__, batch.offsets)), sources, batch.sizes)
        self._record_digests(writing, sources)

    def describe(self, keys: Sequence[bytes], contents: Sequence[BlockContent]) -> Operation[bool]:
        """Sends the tokens of blocks, one call per group; returns whether the server keeps them."""
        alike: dict[tuple[bytes, int, int, str], tuple[list[bytes], list[BlockContent]]] = {}
        for key, content in zip(keys, contents, strict=True):
            shape = (key[-_GROUP_BYTES:], len(key), len(content.token_ids), content.lora_name)
            some = alike.setdefault(shape, ([], []))
            some[0].append(key)
            some[1].append(content)
        kept = True
        for (_, key_bytes, _, _), (own_keys, own_contents) in alike.items():
            try:
                message_contents = pack_contents(own_contents, key_bytes)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
            answer = yield from self._request(
                events_pb2.DescribeBlocksRequest,
                "EventService/DescribeBlocks",
                keys=packed(own_keys),
                contents=message_contents,
            )
            kept = kept and answer.kept
        return kept

    def flush(self, keys: Sequence[bytes], *, wait: float) -> Operation[bytes]:
        answer = yield from self._request(cache_pb2.FlushRequest, "CacheService/Flush", keys=packed(keys), wait=wait)
        statuses: bytes = answer.statuses
        return statuses

    def reset(self, *, wait: float, retire: bool) -> Operation[int]:
        answer = yield from self._request(cache_pb2.ResetRequest, "CacheService/Reset", wait=wait, retire=retire)
        pending: int = answer.pending_blocks
        return pending

    def _push(self, writing: Writing, sources: Sequence[int], sizes: Sequence[int]) -> Operation[bool]:
        """Sends parts, with retries. Returns whether a stream also completed the store."""
        session = writing.session
        source = PartSender(session.ref, writing.store_id, sources, sizes)
        start, attempt = 0, 1
        try:
            while True:
                try:
                    return (yield from self._push_from(session, source, start, complete=not writing.failed))
                except KVTierError as error:
                    if attempt == ATTEMPTS or not is_retryable(error, session):
                        raise
                    writing.stream_broke = True
                request = transfer_pb2.LocateRequest(session=session.ref, store_id=writing.store_id)
                answer = yield from self._call(session, LOCATE, request)
                start, attempt = answer.received_bytes, attempt + 1
        finally:
            source.close()

    def _push_from(self, session: ClientSession, source: PartSender, start: int, *, complete: bool) -> Operation[bool]:
        step = min(session.limits.max_frame_bytes, FRAME_BYTES)
        if start >= source.total_bytes:
            return False
        complete = complete and not start
        answer = yield Push(session, source, start, step, complete, self._timeouts.transfer)
        if answer.received_bytes != source.total_bytes - start:
            raise ServerError(f"the server received {answer.received_bytes} of {source.total_bytes - start} bytes")
        completed: bool = answer.completed
        return completed
