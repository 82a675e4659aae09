"""Calls with many keys or leases, in slices (see `slice_scheduler`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ...protos.v1 import common_pb2
from ...protos.wire.packed_keys import count_keys, unpack_keys
from ...tiers.core.block import Block
from ...tiers.core.commands import Change, Waiter
from ...tiers.core.in_flight_stores import STORE_SLICE
from ...tiers.core.leases import BlockLease
from ...tiers.core.operations import Operation
from ...tiers.errors import LeaseNotFound
from ...tiers.types import EngineSession, LeaseId, StoreId
from ..auth.roles import CALLER, Role
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import SliceScheduler, slices_of

__all__ = ["LongCalls"]

T = TypeVar("T")

_SLICE = 512
"""Leases per slice of a renewal."""
_MAX_WAITING = 256
"""Limit of the flushes, resets and ends of requests of a tenant that wait. Each change of any
tenant wakes all of them, 10 to 20 µs each; further ones are answered at once."""
_KEY_SLICE = 2048
"""To read and check a key of a request takes 0.1 to 0.3 µs."""
_READ_SLICE = 1024
"""To read the slot of a block takes 0.3 µs."""
_RETRY_SECONDS = 0.005
"""Shortest time between two attempts of a lookup that waits for room."""
_MAX_VERIFIED_BYTES = 256 << 20
"""Limit of the bytes that the server reads after a report of damage: 20 ms on a thread."""
_REST = 10
"""Factor of the time for which a tenant's reports are ignored after a false one."""
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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._verifying: set[str] = set()
        """Tenants whose report of damage is being verified."""
        self._waiting: Counter[str] = Counter()
        """Number of calls per tenant that each change wakes."""

    async def keys(
        self, session: EngineSession | None, validator: RequestValidator, packed: common_pb2.PackedKeys
    ) -> list[bytes]:
        """Reads the keys of a request. Raises `Refused`, or InvalidKey for an unknown group.

        Without a session the groups are not checked.
        """
        key_bytes, keys = packed.key_bytes, list[bytes]()
        if key_bytes and len(joined := packed.keys) <= _KEY_SLICE * key_bytes:
            validator.check_keys(packed)
            keys = unpack_keys(joined, key_bytes)
            if session is not None:
                validator.check_groups(keys, joined, key_bytes, session.namespace)
            return keys
        is_long = count_keys(packed) > _KEY_SLICE
        for joined, part in validator.slices_of(packed, _KEY_SLICE):
            if is_long:
                await self._turn(session)
            if session is not None:
                validator.check_groups(part, joined, key_bytes, session.namespace)
            keys += part
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

    async def run(self, session: EngineSession | None, operation: Operation[T]) -> T:
        """Performs an operation of the core, in turns. If the call ends early, the core undoes it.

        Raises `Refused` if the session has ended meanwhile. `session`: None for a call without one.
        """
        turn_ends = 0.0
        try:
            self._runtime.get_finished_jobs()
            change = self._runtime.next_change  # also of changes during the step
            waiter = next(operation)
            while True:
                self._runtime.run_commands()
                if waiter is not None:
                    await self._wait(session, waiter, change)
                elif time.monotonic() >= turn_ends:
                    turn_ends = await self._turn(session)
                self._runtime.get_finished_jobs()
                change = self._runtime.next_change
                waiter = operation.send(self._runtime.now())
        except StopIteration as end:
            answer: T = end.value
            return answer
        finally:
            operation.close()  # if the call ends early, no client gets the answer
            self._runtime.run_commands()

    async def _turn(self, session: EngineSession | None) -> float:
        return await (self._scheduler.pause() if session is None else self._scheduler.turn(session))

    async def _wait(self, session: EngineSession | None, waiter: Waiter | Change, change: asyncio.Event) -> None:
        """Waits until an operation may continue, at most until its deadline."""
        tried_at = self._runtime.now()
        if isinstance(waiter, Change):
            await self._runtime.wait_for_change(waiter.until - tried_at, change)
            if session is not None:
                self._sessions.check(session)
            return
        assert session is not None
        while not waiter.is_offered and (remaining := waiter.until - self._runtime.now()) > 0:
            await self._runtime.wait_for(waiter, remaining)
            self._sessions.check(session)
        # So that a lookup that needs many blocks does not try again for each of them.
        retry_at = min(waiter.until, tried_at + _RETRY_SECONDS)
        await asyncio.sleep(max(0.0, retry_at - self._runtime.now()))
        await self._scheduler.turn(session)

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

    async def slots(self, session: EngineSession, lease_id: LeaseId, hits: int) -> list[int]:
        """Returns the slots of the first items of a lease: of the session's rank, or of all ranks.

        Raises like `BlockLease.slots`.
        """
        ranks = 1 if session.rank is not None else session.namespace.world_size
        slots: list[int] = []
        for part in slices_of(range(hits), max(1, _READ_SLICE // ranks)):
            if len(part) < hits:
                await self._scheduler.turn(session)
            slots += self._core.lease(session, lease_id).slots(part, session.rank)
        return slots

    def verify(self, session: EngineSession, lease: BlockLease, items: Sequence[int]) -> Awaitable[None] | None:
        """Compares the digests of blocks that a client has found damaged; removes damaged blocks.

        Returns what the caller may await, or None if the report is ignored: while another one of
        the tenant is verified, and after one that named an intact block for `_REST` times as long,
        because each takes the processor. Of a long report, only the first blocks are verified. The
        next load reports what is left again.
        """
        namespace = session.namespace
        if session.tenant in self._verifying:
            return None
        most = max(1, _MAX_VERIFIED_BYTES // (namespace.world_size * max(namespace.part_bytes)))
        found = lease.blocks(list(dict.fromkeys(items)))
        blocks = [block for block in found if block is not None and block.ready][:most]
        self._verifying.add(session.tenant)
        lease.readers += 1  # the blocks stay pinned
        return asyncio.shield(self._spawn(self._verify(session, lease, blocks)))

    async def _verify(self, session: EngineSession, lease: BlockLease, blocks: Sequence[Block]) -> None:
        began, name = self._runtime.now(), self._sessions.name_of(session.id)
        damaged: list[int] = []
        try:
            damaged = await asyncio.to_thread(self._runtime.digests.damaged, blocks)
            self._runtime.remove_damaged([blocks[number] for number in damaged], name)
        finally:
            rest = _REST * (self._runtime.now() - began) if len(damaged) < len(blocks) else 0.0
            asyncio.get_running_loop().call_later(rest, self._verifying.discard, session.tenant)
            self._core.end_reader(lease)
            self._runtime.run_commands()

    def remove_wrong(self, session: EngineSession, lease: BlockLease, items: Sequence[int]) -> None:
        """Removes blocks whose KV differs from the KV that a client computes for their keys.

        The server cannot compute KV, so it believes an engine. An engine can also reset the whole
        namespace. Raises `Refused` if the caller must not store blocks.
        """
        if Role.ENGINE not in CALLER.get().roles:
            raise Refused("PERMISSION_DENIED", f"{CALLER.get().name} must not report wrong blocks: it is no engine")
        found = lease.blocks(list(dict.fromkeys(items)))
        blocks = [block for block in found if block is not None]
        self._runtime.remove_wrong(blocks, self._sessions.name_of(session.id))

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

    async def complete_store(self, session: EngineSession, store_id: StoreId, failed: Sequence[int]) -> Sequence[int]:
        """Ends a store, also if the call is cancelled meanwhile. Raises a CoreError, `Refused`.

        Returns the positions of the further blocks that are not stored, because bytes are missing.
        """
        is_short = len(self._core.store(session, store_id).blocks) <= STORE_SLICE
        completion = self.run(session, self._core.complete_store(session, store_id, failed))
        return await (completion if is_short else asyncio.shield(self._spawn(completion)))

    def _spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the call that waited for it may be cancelled

    async def release(self, session: EngineSession, lease_ids: Iterable[int]) -> None:
        """Releases leases; ignores unknown ones. Raises NotOwner."""
        cost = 0
        try:
            for lease_id in map(LeaseId, dict.fromkeys(lease_ids)):
                if cost > _UNPIN_SLICE:
                    self._runtime.run_commands()
                    await self._scheduler.turn(session)
                    cost = 0
                cost += _LEASE_COST
                with contextlib.suppress(LeaseNotFound):
                    cost += len(self._core.lease(session, lease_id).items)
                    self._core.release(session, lease_id)
        finally:
            self._runtime.run_commands()

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
