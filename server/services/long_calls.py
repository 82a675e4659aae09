"""Calls with many keys or leases, in slices (see `slice_scheduler`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence

from ...tiers.base import TierFilter
from ...tiers.core.holds import Hold, HoldClaim, SlicedPublication
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import LookupAnswer, SlicedLookup
from ...tiers.core.prefetches import PrefetchAnswer
from ...tiers.core.secondary import Presence
from ...tiers.errors import CoreError, LeaseNotFound
from ...tiers.types import DurableStatus, EngineSession, LeaseId, PublishStatus, StoreAnswer, StoreId
from ..refused import Refused
from ..rpc.request_checks import NamesKeys, RequestValidator
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import SliceScheduler, slices_of
from ..runtime import TierRuntime

__all__ = ["LongCalls"]

_SLICE = 512
"""Keys per slice of a query of shared tiers, and leases per slice of a renewal."""
_FLUSH_SLICE = 256
"""A flush takes 2 to 8 µs per key."""
_MAX_WAITING = 256
"""Limit of the flushes, resets and ends of requests of a tenant that wait. Each change of any
tenant wakes all of them, 10 to 20 µs each; further ones are answered at once."""
_KEY_SLICE = 2048
"""To read and check a key of a request takes 0.1 to 0.3 µs."""
_STORE_SLICE = 256
"""A store takes 2 to 3 µs per key at its begin, and 4 to 6 µs at its end."""
_LOOKUP_SLICE = 256
"""A lookup takes 1 to 2 µs per key."""
_WAITING_SLICE = 16
"""The same for a lookup that waits for room: the later blocks of a slice are not evicted for it."""
_READ_SLICE = 1024
"""To read the slot of a block takes 0.3 µs."""
_RETRY_SECONDS = 0.005
"""Shortest time between two attempts of a lookup that waits for room."""
_UNPIN_SLICE = 8192
"""Blocks of released leases per slice: 0.1 µs per block."""
_LEASE_COST = 16
"""An unknown or empty lease takes as long as the release of this number of blocks."""


class LongCalls:
    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, scheduler: SliceScheduler) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self.scheduler = self._scheduler = scheduler
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()
        """Number of calls per tenant that each change wakes."""

    async def keys(self, session: EngineSession, validator: RequestValidator, keys: Sequence[bytes]) -> list[bytes]:
        """Reads the keys of a request. Raises like `RequestValidator.keys`."""
        checked: list[bytes] = []
        for part in slices_of(keys, _KEY_SLICE):
            if len(part) < len(keys):
                await self._scheduler.turn(session)
            checked += validator.keys(part, session.namespace)
        return checked

    async def keys_of(self, session: EngineSession, validator: RequestValidator, request: NamesKeys) -> Sequence[bytes]:
        """Reads the keys of a request, packed or not. Raises like `RequestValidator.keys`."""
        packed, key_bytes = request.packed_keys.keys, request.packed_keys.key_bytes
        if not packed:
            return await self.keys(session, validator, request.keys)
        if request.keys:
            raise Refused("INVALID_ARGUMENT", "only one of keys and packed_keys may be given")
        validator.check_packed(request.packed_keys)
        keys: list[bytes] = []
        for part in slices_of(packed, _KEY_SLICE * key_bytes):
            if len(part) < len(packed):
                await self._scheduler.turn(session)
            keys += validator.unpack(bytes(part), key_bytes, session.namespace)
        return keys

    @contextlib.contextmanager
    def waiting(self, session: EngineSession) -> Iterator[bool]:
        """Counts a call that each change wakes. Yields False if it must not wait: too many do."""
        if self._waiting[session.tenant] >= _MAX_WAITING:
            yield False
            return
        self._waiting[session.tenant] += 1
        try:
            yield True
        finally:
            self._waiting[session.tenant] -= 1
            if not self._waiting[session.tenant]:
                del self._waiting[session.tenant]

    async def flush(self, session: EngineSession, keys: Sequence[bytes], deadline: float) -> bytes:
        """Stores blocks in durable tiers, and waits for it. Returns a `DurableStatus` per key."""
        statuses: dict[bytes, int] = {}
        pending: deque[bytes] = deque()
        is_pending, turn_ends = int(DurableStatus.PENDING), 0.0
        for part in slices_of(keys, _FLUSH_SLICE):
            if len(part) < len(keys) and time.monotonic() >= turn_ends:
                turn_ends = await self._scheduler.turn(session)
            new = [key for key in dict.fromkeys(part) if key not in statuses]
            found = self._core.durability.flush(session.namespace.id, new)
            self._runtime.run_commands()
            statuses.update(zip(new, found, strict=True))
            pending.extend(key for key, status in zip(new, found, strict=True) if status == is_pending)
        if pending and deadline > self._runtime.now():
            with self.waiting(session) as may_wait:
                if may_wait:
                    await self._wait_for_flush(session, pending, statuses, deadline)
                    await self._drop_settled(session, pending, statuses, even_if_pending=True)
        answer = b""
        for part in slices_of(keys, _KEY_SLICE):
            if len(part) < len(keys):
                await self._scheduler.turn(session)
            answer += bytes(map(statuses.__getitem__, part))
        return answer

    async def _wait_for_flush(
        self, session: EngineSession, pending: deque[bytes], statuses: dict[bytes, int], deadline: float
    ) -> None:
        """Waits until no key is pending, at most until the deadline."""
        while pending and (remaining := deadline - self._runtime.now()) > 0:
            change = self._runtime.next_change  # also of changes during the slices
            await self._scheduler.turn(session)  # each change wakes all waiting flushes
            await self._drop_settled(session, pending, statuses)
            if pending:
                await self._runtime.wait_for_change(remaining, change)

    async def _drop_settled(
        self,
        session: EngineSession,
        pending: deque[bytes],
        statuses: dict[bytes, int],
        *,
        even_if_pending: bool = False,
    ) -> None:
        """Updates the statuses of the first pending keys, and drops these keys.

        Stops at the first key that is still pending. So each change costs only one key and the keys
        that it has settled.
        """
        for number in range(1, len(pending) + 1):
            key = pending[0]
            statuses[key] = self._core.durability.of(session.namespace.id, key)
            if statuses[key] == DurableStatus.PENDING and not even_if_pending:
                return
            pending.popleft()
            if not number % _FLUSH_SLICE:
                await self._scheduler.turn(session)

    async def look_up(self, lookup: SlicedLookup, lease_seconds: float, deadline: float = 0.0) -> LookupAnswer:
        """Performs a lookup. If the call is cancelled or fails, no lease remains.

        If the lookup may wait for room, it waits until the deadline.
        """
        handler, more, turn_ends = self._core.lookup_handler, True, 0.0
        try:
            if lookup.may_wait and handler.must_queue(lookup):
                await self._wait_for_room(lookup, deadline)
            while more:
                if lookup.lacks_room:
                    await self._wait_for_room(lookup, deadline)
                if len(lookup.keys) > _LOOKUP_SLICE and time.monotonic() >= turn_ends:
                    turn_ends = await self._scheduler.turn(lookup.session)
                now = self._runtime.now()
                size = _LOOKUP_SLICE if lookup.waiter is None else _WAITING_SLICE
                more = handler.look_up_slice(lookup, size, expires_at=now + lease_seconds, now=now)
                self._runtime.run_commands()
        except BaseException:  # also a cancellation: the client never gets the lease's id
            handler.abandon(lookup)
            self._runtime.run_commands()
            raise
        finally:
            if lookup.waiter is not None:
                handler.room.leave(lookup.waiter, self._runtime.now())
                self._runtime.run_commands()
        return lookup.answer()

    async def _wait_for_room(self, lookup: SlicedLookup, deadline: float) -> None:
        """Waits until the lookup may try again. After the deadline it may not wait again."""
        room = self._core.lookup_handler.room
        if lookup.waiter is None:
            lookup.waiter = room.enter(lookup.session, self._runtime.now())
        if lookup.waiter is not None and lookup.is_over_budget:
            room.yield_turn(lookup.waiter)
        self._runtime.run_commands()
        tried_at = self._runtime.now()
        while lookup.waiter is not None and (remaining := deadline - self._runtime.now()) > 0:
            if lookup.waiter.is_offered:
                # So that a lookup that needs many blocks does not try again for each of them.
                await asyncio.sleep(min(remaining, max(0.0, tried_at + _RETRY_SECONDS - self._runtime.now())))
                await self._scheduler.turn(lookup.session)
                lookup.waiter.is_offered = False
                return
            await self._runtime.wait_for(lookup.waiter, remaining)
            self._sessions.check(lookup.session)
        lookup.may_wait = False

    async def prefetch(self, prefetch: SlicedLookup, lease_seconds: float) -> PrefetchAnswer:
        """Performs a prefetch. If the call is cancelled or fails, its promotions continue."""
        await self.look_up(prefetch, lease_seconds)
        answer = self._core.lookup_handler.end_prefetch(prefetch)
        self._runtime.run_commands()
        return answer

    async def read(
        self, session: EngineSession, lease_id: LeaseId, items: Sequence[int], *, counted: bool = True
    ) -> tuple[list[int], list[int]]:
        """Returns slots and sizes of the items of a lease. Raises like `BlockLease.read`.

        `counted`: whether to count the bytes as loaded from the CPU tier.
        """
        rank = session.own_rank()
        slots: list[int] = []
        sizes: list[int] = []
        for part in slices_of(items, _READ_SLICE):
            if len(part) < len(items):
                await self._scheduler.turn(session)
            lease = self._core.lease(session, lease_id)  # it may have ended since the last slice
            found = lease.read(part, rank, counted=False)
            slots += found[0]
            sizes += found[1]
        if counted:
            lease.cpu_tier.loaded_bytes += sum(sizes)
        return slots, sizes

    async def read_store(self, session: EngineSession, store_id: StoreId) -> tuple[list[int], list[int]]:
        """Returns slots and sizes of the parts of a store. Raises StoreNotFound, NotOwner."""
        blocks = self._core.store(session, store_id).blocks
        slots: list[int] = []
        sizes: list[int] = []
        for part in slices_of(blocks, _READ_SLICE):
            if len(part) < len(blocks):
                await self._scheduler.turn(session)
            store = self._core.store(session, store_id)  # it may have ended since the last slice
            slots += store.slots(part)
            sizes += [block.part_bytes for block in part]
        return slots, sizes

    async def publish(self, publication: SlicedPublication) -> Hold | PublishStatus:
        """Publishes a hold. If the call is cancelled or fails, no hold remains."""
        handoffs, more, is_long = self._core.handoffs, True, len(publication.keys) > _STORE_SLICE
        try:
            while more:
                if is_long:
                    await self._scheduler.turn(publication.session)
                self._runtime.get_finished_jobs()
                more = handoffs.publish_slice(publication, _STORE_SLICE, self._runtime.now())
                is_long = True  # also if few blocks wait until the pins of ended holds are removed
                self._runtime.run_commands()
        except BaseException:  # also a cancellation
            handoffs.abandon(publication, self._runtime.now())
            self._runtime.run_commands()
            raise
        assert publication.result is not None
        return publication.result

    async def claim(self, claim: HoldClaim, lease_seconds: float) -> None:
        """Performs a claim. If the call is cancelled or fails, no lease remains."""
        claims, more = self._core.handoffs.claims, True
        try:
            while more:
                if len(claim.hold.keys) > _STORE_SLICE:
                    await self._scheduler.turn(claim.session)
                now = self._runtime.now()
                more = claims.claim_slice(claim, _STORE_SLICE, expires_at=now + lease_seconds, now=now)
                self._runtime.run_commands()
        except BaseException:  # also a cancellation: the client never gets the lease's id
            claims.abandon(claim)
            self._runtime.run_commands()
            raise

    async def prepare_store(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        *,
        request_id: str,
        lease_seconds: float,
        retain_for: float,
        grant_id: int = 0,
    ) -> StoreAnswer:
        """Begins a store. If the call is cancelled or fails, no store remains."""
        store_id: StoreId | None = None
        statuses, slots, not_retained = [], [], 0
        try:
            for number, part in enumerate(slices_of(keys, _STORE_SLICE), start=1):
                if len(part) < len(keys):
                    await self._scheduler.turn(session)
                now = self._runtime.now()
                self._runtime.get_finished_jobs()
                answer = self._core.prepare_store(
                    session,
                    part,
                    request_id=request_id,
                    expires_at=now + lease_seconds,
                    retain_until=now + retain_for if retain_for else 0.0,
                    extends=store_id,
                    more=number * _STORE_SLICE < len(keys),
                    now=now,
                    grant_id=grant_id,
                )
                self._runtime.run_commands()
                store_id = answer.store_id
                statuses.append(answer.statuses)
                slots += answer.slots
                not_retained += answer.not_retained
        except BaseException:  # also a cancellation: the client never gets the store's id
            if store_id is not None:
                _ = self._spawn(self._abort(session, store_id))
            raise
        return StoreAnswer(store_id, b"".join(statuses), slots, not_retained)

    async def _abort(self, session: EngineSession, store_id: StoreId) -> None:
        with contextlib.suppress(CoreError):
            failed = range(len(self._core.store(session, store_id).blocks))
            await self._complete(session, self._core.store_handler.begin_completion(session, store_id, failed))

    async def complete_store(self, session: EngineSession, store_id: StoreId, failed: Sequence[int]) -> Sequence[int]:
        """Ends a store, also if the call is cancelled meanwhile. Raises a CoreError.

        Returns the positions of the further blocks that are not stored, because bytes are missing.
        """
        store = self._core.store_handler.begin_completion(session, store_id, failed)
        if len(store.blocks) <= _STORE_SLICE:
            self._core.store_handler.complete_slice(store, _STORE_SLICE)
            self._runtime.run_commands()
        else:
            await asyncio.shield(self._spawn(self._complete(session, store)))
        return store.unreceived or ()

    async def _complete(self, session: EngineSession, store: Store) -> None:
        """Completes a store. If the session ends, the core abandons the rest of the store."""
        with contextlib.suppress(Refused):
            await self._scheduler.turn(session)
            while self._core.store_handler.complete_slice(store, _STORE_SLICE):
                self._runtime.run_commands()
                await self._scheduler.turn(session)
        self._runtime.run_commands()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def query_shared_tiers(
        self, session: EngineSession, keys: Sequence[bytes], tiers: TierFilter, deadline: float, *, prefix: bool
    ) -> None:
        """Asks the shared tiers which keys they have, and waits for the answers or the deadline."""
        if not self._core.shared_tiers:
            return
        open_keys: deque[bytes] = deque()
        for part in slices_of(keys, _SLICE):
            if len(part) < len(keys):
                await self._scheduler.turn(session)
            outstanding, has_miss = self._core.shared_tiers.query(session, part, tiers, prefix=prefix)
            self._runtime.run_commands()
            open_keys += outstanding
            if prefix and has_miss:
                break
        while open_keys and (remaining := deadline - self._runtime.now()) > 0:
            change = self._runtime.next_change
            await self._drop_answered(session, open_keys, tiers, prefix=prefix)
            if open_keys:
                # Asks again if the answer has expired.
                self._core.shared_tiers.query(session, [open_keys[0]], tiers, prefix=prefix)
                self._runtime.run_commands()
                await self._runtime.wait_for_change(remaining, change)
                self._sessions.check(session)

    async def _drop_answered(
        self, session: EngineSession, open_keys: deque[bytes], tiers: TierFilter, *, prefix: bool
    ) -> None:
        """Drops the first keys, up to a key without an answer. With `prefix`, a miss drops all."""
        for number in range(1, len(open_keys) + 1):
            presence = self._core.shared_tiers.presence(session, open_keys[0], tiers)
            if presence is Presence.UNKNOWN:
                return
            open_keys.popleft()
            if prefix and presence is not Presence.HELD:
                open_keys.clear()
                return
            if not number % _SLICE:
                await self._scheduler.turn(session)

    async def release(self, session: EngineSession, lease_ids: Iterable[int]) -> None:
        """Releases leases; ignores unknown ones. Raises NotOwner."""
        cost = 0
        for lease_id in map(LeaseId, dict.fromkeys(lease_ids)):
            if cost > _UNPIN_SLICE:
                await self._scheduler.turn(session)
                cost = 0
            cost += _LEASE_COST
            with contextlib.suppress(LeaseNotFound):
                cost += len(self._core.lease(session, lease_id).items)
                self._core.release(session, lease_id)

    async def renew(self, session: EngineSession, lease_ids: Iterable[int], expires_at: float) -> list[int]:
        """Extends leases; returns those that have ended. Raises NotOwner."""
        missing = []
        for number, lease_id in enumerate(dict.fromkeys(lease_ids), start=1):
            try:
                self._core.renew(session, LeaseId(lease_id), expires_at)
            except LeaseNotFound:
                missing.append(lease_id)
            if not number % _SLICE:
                await self._scheduler.turn(session)
        return missing
