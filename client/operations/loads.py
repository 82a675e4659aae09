"""Operations that read the blocks of a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import index

from ...cuda.host.copy import HostBuffer, address_of, copy_batch
from ...protos.v1 import cache_pb2, transfer_pb2
from ...protos.wire.packed_keys import offset_table, unpack_offsets
from ..effects import Copy, Operation, Pull
from ..errors import KVTierError, LeaseLost, NotConnected, ServerError, error_for
from ..part_streams import ATTEMPTS, PartReceiver, is_retryable
from ..results import LeaseSlots, LookupResult, ReadBatch
from ..session.session import ClientSession
from .arguments import LookupOptions, message
from .base import Base, Held, consecutive
from .lookups import LookupOperations, lease_id_of

__all__ = ["LoadOperations", "Reading"]


class _LeaseInDoubt(NotConnected):
    """A stream broke, and its lease has ended.

    The server may have confirmed the load and released the lease, and its answer was lost.
    """


@dataclass(slots=True)
class Reading:
    """A load between `begin_read` and `end_read`."""

    session: ClientSession
    lease_id: int
    batch: ReadBatch
    copied_bytes: int = 0
    """Bytes of slots that the lookup named; 0 if a call of this load named them."""


class LoadOperations(LookupOperations, Base):
    def begin_read(
        self,
        held: Held,
        lease: LookupResult | int,
        items: Sequence[int],
        *,
        slots: LeaseSlots | None = None,
    ) -> Operation[Reading]:
        """Begins a load. Returns memory with the parts of `items`, valid until the exit of `held`.

        Call `end_read` afterwards. `slots`: the `slots` of the lookup, if `lease` is an id.
        """
        lease_id = lease_id_of(lease, ())
        session: ClientSession = yield self._connect
        held.use(session)
        known = self._known(session, lease, items, slots)
        if known is not None:
            offsets, sizes = known
        else:
            lease_id_of(lease, items)  # items of known slots are hits
            request = message(cache_pb2.PrepareLoadRequest, session=session.ref, lease_id=lease_id, items=items)
            answer = yield from self._call(session, "CacheService/PrepareLoad", request)
            offsets, sizes = unpack_offsets(answer.slot_offsets), unpack_offsets(answer.part_sizes_bytes)
            if len(sizes) != len(items) or not set(sizes) <= {*self._part_bytes}:
                raise ServerError("the server named other sizes than those of the parts")
        session.check_slots(offsets, sizes)
        if (region := session.region) is not None:
            batch = ReadBatch(region.memory[:], region.address, offsets, sizes)
            return Reading(session, lease_id, batch, sum(sizes) if known is not None else 0)
        staging = held.borrow(self._staging.lend(sum(sizes)))
        batch = ReadBatch(staging, address_of(staging)[0], consecutive(sizes), sizes)
        sink = PartReceiver([batch.address + offset for offset in batch.offsets], sizes)
        yield from self._pull(session, lease_id, items, sink)
        return Reading(session, lease_id, batch)

    def _known(
        self, session: ClientSession, lease: LookupResult | int, items: Sequence[int], slots: LeaseSlots | None
    ) -> tuple[list[int], list[int]] | None:
        """Returns offsets and sizes of `items`; None if the lookup did not name all of them."""
        ranks, is_own = self._namespace.world_size, False
        if isinstance(lease, LookupResult):
            slots, is_own = lease.slots, lease.session is session
        if slots is None or session.region is None:
            return None
        if slots.epoch != session.ref.epoch:
            raise error_for("LEASE_NOT_FOUND", "the server was restarted after the lookup")
        if is_own and self._rank is not None:  # the lookup named the slots of this rank only
            rank, ranks = 0, 1
        elif self._rank is not None or ranks == 1:
            rank = self._rank or 0
        else:
            return None
        try:
            groups, table = slots.groups, offset_table(slots.offsets)
            numbers = list(map(index, items))  # narrow integers of numpy would overflow
            if len(table) != ranks * len(groups) or min(numbers, default=0) < 0:
                return None
            sizes = map(self._part_bytes.__getitem__, map(groups.__getitem__, numbers))
            return list(map(table[rank::ranks].__getitem__, numbers)), list(sizes)
        except (IndexError, TypeError, ValueError):
            return None

    def end_read(
        self, session: ClientSession, lease_id: int, *, release: bool = False, copied_bytes: int = 0
    ) -> Operation[None]:
        """Raises unless the server confirms that the lease was valid during the whole load.

        `copied_bytes`: see `Reading`.
        """
        request = message(
            cache_pb2.CompleteLoadRequest,
            session=session.ref,
            lease_id=lease_id,
            release=release,
            copied_bytes=copied_bytes,
        )
        yield from self._call(session, "CacheService/CompleteLoad", request)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str, wait: float
    ) -> Operation[int]:
        destinations, sizes = self._addresses_and_sizes(keys, buffers, writable=True)
        attempt = 1
        while True:
            with self.held() as held:
                try:
                    return (yield from self._load(keys, destinations, sizes, held, request_id=request_id, wait=wait))
                except _LeaseInDoubt:
                    if attempt == ATTEMPTS:
                        raise
                    attempt += 1

    def _load(
        self,
        keys: Sequence[bytes],
        addresses: Sequence[int],
        sizes: Sequence[int],
        held: Held,
        *,
        request_id: str,
        wait: float,
    ) -> Operation[int]:
        options: LookupOptions = {"request_id": request_id, "wait": wait, "slots": True}
        found = yield from self.lookup(keys, options, held=held)
        hits = found.prefix_hits
        if not hits:
            if found.id:
                yield from self._release_granted(found, held.grant_id)
            return 0
        load = self._load_by_stream if found.session.region is None else self._load_by_copy
        try:
            yield from load(held, found, addresses[:hits], sizes[:hits])
        except _LeaseInDoubt:
            raise
        except BaseException as error:
            yield from self._give_back(found.session, held.grant_id, error)
            raise
        return hits

    def _load_by_copy(
        self, held: Held, found: LookupResult, addresses: Sequence[int], sizes: Sequence[int]
    ) -> Operation[None]:
        reading = yield from self.begin_read(held, found, range(len(sizes)))
        batch = reading.batch
        if not len(batch.offsets) == len(batch.sizes) == len(sizes):
            raise ServerError(f"the server returned {len(batch.offsets)} slots for {len(sizes)} blocks")
        sources = list(map(batch.address.__add__, batch.offsets))
        yield Copy(partial(copy_batch, addresses, sources, batch.sizes))
        yield from self.end_read(reading.session, found.id, release=True, copied_bytes=reading.copied_bytes)

    def _load_by_stream(
        self, held: Held, found: LookupResult, addresses: Sequence[int], sizes: Sequence[int]
    ) -> Operation[None]:
        session, sink = found.session, PartReceiver(addresses, sizes)
        held.use(session)
        try:
            yield from self._pull(session, found.id, range(len(sizes)), sink, complete=True)
            if not sink.completed:
                yield from self.end_read(session, found.id, release=True)
        except LeaseLost as error:
            if sink.broke:
                raise _LeaseInDoubt(f"a stream broke, and its lease has ended: {error}") from error
            raise

    def _pull(
        self,
        session: ClientSession,
        lease_id: int,
        items: Sequence[int],
        sink: PartReceiver,
        *,
        complete: bool = False,
    ) -> Operation[None]:
        """Receives parts, with retries."""
        attempt = 0
        while sink.missing:
            attempt += 1
            request = message(
                transfer_pb2.PullRequest,
                session=session.ref,
                lease_id=lease_id,
                items=[items[number] for number in sink.missing],
                # After a retry a separate call confirms the load.
                complete=complete and attempt == 1,
            )
            try:
                yield Pull(session, request, sink, self._timeouts.transfer)
            except KVTierError as error:
                if attempt == ATTEMPTS or not is_retryable(error, session):
                    raise
                sink.broke = True
                sink.end_stream()
            else:
                sink.end_stream()
                if sink.missing:
                    raise ServerError("the server ended a stream before it had sent all parts")
