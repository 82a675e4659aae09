"""Operations that read the blocks of a lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index

from ...cuda.host.copy import HostBuffer, address_of, copy_batch
from ...protos.v1 import cache_pb2, transfer_pb2
from ...protos.wire.packed_keys import offset_table, unpack_offsets
from ..effects import Copy, Operation, Pull
from ..errors import ChecksumMismatch, InvalidRequest, KVTierError, LeaseLost, NotConnected, ServerError, error_for
from ..part_streams import ATTEMPTS, PartReceiver, is_retryable
from ..results import KeyStatus, LeaseSlots, LookupResult, ReadBatch
from ..session.session import ClientSession
from .arguments import LookupOptions, message
from .base import Base, Held, consecutive
from .digests import digests_of_slots
from .lookups import LookupOperations, lease_id_of

__all__ = ["MAX_REPORTED", "LoadOperations", "Reading"]

MAX_REPORTED = 256
"""Limit of the damaged blocks that a call reports. The next load reports further ones."""


class _LeaseInDoubt(NotConnected):
    """A stream broke, and its lease has ended.

    The server may have confirmed the load and released the lease, and its answer was lost.
    """


@dataclass(slots=True)
class Reading:
    """A load between `begin_read` and `end_read`."""

    session: ClientSession
    lease_id: int
    items: Sequence[int]
    batch: ReadBatch
    names: Mapping[int, bytes]
    """Keys of the parts whose bytes are compared with their digests, by position in `items`."""
    digests: Sequence[int] = ()
    """The digests of all parts, if no region is mapped."""
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
        names = self._names(session, lease, items, slots)
        if (region := session.region) is not None:
            batch = ReadBatch(region.memory[:], region.address, offsets, sizes)
            copied_bytes = sum(sizes) if known is not None else 0
            return Reading(session, lease_id, items, batch, names, copied_bytes=copied_bytes)
        staging = held.borrow(self._staging.lend(sum(sizes)))
        batch = ReadBatch(staging, address_of(staging)[0], consecutive(sizes), sizes)
        sink = PartReceiver([batch.address + offset for offset in batch.offsets], sizes)
        yield from self._pull(session, lease_id, items, sink)
        reading = Reading(session, lease_id, items, batch, names, sink.digests)
        yield from self._check(reading)
        return replace(reading, names={})  # the caller may change the staging buffer

    def _names(
        self, session: ClientSession, lease: LookupResult | int, items: Sequence[int], slots: LeaseSlots | None
    ) -> Mapping[int, bytes]:
        """Returns the known keys of the parts to verify, by position in `items`."""
        if not session.namespace_id:
            return {}
        if isinstance(lease, LookupResult):
            return self._digests.names([lease.keys[item] for item in items])
        known = slots.names if slots is not None else {}
        return {number: known[item] for number, item in enumerate(items) if item in known} if known else {}

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

    def end_read(self, reading: Reading, *, release: bool = False) -> Operation[None]:
        """Raises unless the server confirms that the lease was valid during the whole load.

        Raises ChecksumMismatch if bytes of the batch do not match their digests.
        """
        yield from self._check(reading)
        yield from self._complete_load(reading, release=release)

    def _check(self, reading: Reading) -> Operation[None]:
        """Reports parts of the batch that do not match their digests; raises ChecksumMismatch."""
        batch, damaged = reading.batch, list[int]()
        if reading.names:
            addresses = [batch.address + offset for offset in batch.offsets]
            yield Copy(partial(self._compare, reading, addresses, damaged))
        if damaged:
            yield from self._complete_load(reading, damaged)
            item = reading.items[damaged[0]]
            raise ChecksumMismatch(f"item {item} of the lookup is damaged in the server's memory")

    def _complete_load(
        self, reading: Reading, damaged: Sequence[int] = (), *, release: bool = False
    ) -> Operation[None]:
        """Confirms a load, and reports its damaged parts."""
        items = reading.items
        request = message(
            cache_pb2.CompleteLoadRequest,
            session=reading.session.ref,
            lease_id=reading.lease_id,
            release=release,
            copied_bytes=reading.copied_bytes,
            damaged_items=[int(items[number]) for number in damaged[:MAX_REPORTED]],
        )
        yield from self._call(reading.session, "CacheService/CompleteLoad", request)

    def _compare(self, reading: Reading, addresses: Sequence[int], damaged: list[int]) -> None:
        """Adds the positions of the parts at these addresses that do not match their digests."""
        session, batch, names = reading.session, reading.batch, reading.names
        if not names:
            return
        digests: Mapping[int, int] | Sequence[int] = reading.digests
        if session.region is not None:
            digests = digests_of_slots(session.region, batch.offsets, list(names))
        damaged += self._digests.damaged(session.namespace_id, names, digests, addresses, batch.sizes)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str, wait: float
    ) -> Operation[int]:
        destinations, sizes = self._addresses_and_sizes(keys, buffers, writable=True)
        attempt = 1
        while True:
            with self.held() as held:
                try:
                    hits, damaged = yield from self._load(
                        keys, destinations, sizes, held, request_id=request_id, wait=wait
                    )
                except _LeaseInDoubt:
                    if attempt == ATTEMPTS:
                        raise
                    attempt += 1
                    continue
            if damaged:
                yield from self._ignore_errors(self._report(damaged, "damaged_items"))
            return hits

    def report_wrong(self, keys: Sequence[bytes]) -> Operation[None]:
        if len(keys) > MAX_REPORTED:
            raise InvalidRequest(f"a report names at most {MAX_REPORTED} blocks, not {len(keys)}")
        yield from self._report(keys, "wrong_items")

    def _report(self, keys: Sequence[bytes], what: str) -> Operation[None]:
        """Reports blocks of which no lease is open, in a field of `CompleteLoadRequest`."""
        found = yield from self.lookup(keys[:MAX_REPORTED], {"prefix": False})
        items = [item for item, status in enumerate(found.statuses) if status == KeyStatus.HIT]
        if found.id:
            reported = {what: items}
            request = message(
                cache_pb2.CompleteLoadRequest, session=found.session.ref, lease_id=found.id, release=True, **reported
            )
            yield from self._call(found.session, "CacheService/CompleteLoad", request)

    def _load(
        self,
        keys: Sequence[bytes],
        addresses: Sequence[int],
        sizes: Sequence[int],
        held: Held,
        *,
        request_id: str,
        wait: float,
    ) -> Operation[tuple[int, list[bytes]]]:
        """Returns the number of whole leading blocks, and the keys of damaged ones to report."""
        options: LookupOptions = {"request_id": request_id, "wait": wait, "slots": True}
        found = yield from self.lookup(keys, options, held=held)
        hits = found.prefix_hits
        if not hits:
            if found.id:
                yield from self._release_granted(found, held.grant_id)
            return 0, []
        load = self._load_by_stream if found.session.region is None else self._load_by_copy
        try:
            return (yield from load(held, found, addresses[:hits], sizes[:hits]))
        except _LeaseInDoubt:
            raise
        except BaseException as error:
            yield from self._give_back(found.session, held.grant_id, error)
            raise

    def _load_by_copy(
        self, held: Held, found: LookupResult, addresses: Sequence[int], sizes: Sequence[int]
    ) -> Operation[tuple[int, list[bytes]]]:
        reading = yield from self.begin_read(held, found, range(len(sizes)))
        batch = reading.batch
        if not len(batch.offsets) == len(batch.sizes) == len(sizes):
            raise ServerError(f"the server returned {len(batch.offsets)} slots for {len(sizes)} blocks")
        sources = list(map(batch.address.__add__, batch.offsets))
        damaged: list[int] = []

        def copy() -> None:
            copy_batch(addresses, sources, batch.sizes)
            self._compare(reading, addresses, damaged)

        yield Copy(copy)
        yield from self._complete_load(reading, damaged, release=True)
        return min(damaged, default=len(sizes)), []

    def _load_by_stream(
        self, held: Held, found: LookupResult, addresses: Sequence[int], sizes: Sequence[int]
    ) -> Operation[tuple[int, list[bytes]]]:
        session, sink = found.session, PartReceiver(addresses, sizes)
        held.use(session)
        try:
            yield from self._pull(session, found.id, range(len(sizes)), sink, complete=True)
            if not sink.completed:
                request = message(cache_pb2.CompleteLoadRequest, session=session.ref, lease_id=found.id, release=True)
                yield from self._call(session, "CacheService/CompleteLoad", request)
        except LeaseLost as error:
            if sink.broke:
                raise _LeaseInDoubt(f"a stream broke, and its lease has ended: {error}") from error
            raise
        hits, damaged = len(sizes), list[int]()
        if names := self._names(session, found, range(hits), None):

            def compare() -> None:
                damaged.extend(self._digests.damaged(session.namespace_id, names, sink.digests, addresses, sizes))

            yield Copy(compare)
        return min(damaged, default=hits), [names[number] for number in damaged]

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
