"""Random actions of a client. Loaded bytes are verified, errors are counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from harness.payloads import filled

from kvtier.client import DurableStatus, HoldName, KeyStatus, PublishStatus, StoreStatus, WriteBatch
from stress.client_slots import ClientSlot, ClientSlots
from stress.durable_ledger import DurableLedger
from stress.result_log import ResultLog
from stress.shape import LEDGER, PAIR, Dataset

__all__ = ["Actions"]

LONG_LEASE = 60.0
LEASES = (None, None, 0.3, 1.0, LONG_LEASE)
"""Requested lease durations in seconds. Long leases are released, or end with a killed client."""
WAITS = (0.0, 0.0, 0.1, 0.5)
BATCHES = (1, 2, 6, 16, 48)
HOLD_SECONDS = 8.0
"""How long a request is held. A hold that expires within 5 s cannot be claimed."""
CLAIM_SECONDS = 2.0
ABANDONED = "abandoned"
"""Document of deposits that are begun and never completed: no tier may have any of its blocks."""
GARBAGE = 0xEE

Action = Callable[[ClientSlot], Coroutine[Any, Any, None]]


class _AbandonedError(Exception):
    """The writer abandons its store."""


class Actions:
    """The actions of one thread or task of a client process."""

    def __init__(
        self,
        rng: random.Random,
        client_slots: ClientSlots,
        fields: Sequence[Dataset],
        result_log: ResultLog,
        durable_ledger: DurableLedger,
        *,
        lease: float,
    ) -> None:
        """`lease` is the server's default lease duration in seconds."""
        self._rng = rng
        self._slots = client_slots
        self._datasets = fields
        self._results = result_log
        self._ledger = durable_ledger
        self._lease = lease
        self._numbers = itertools.count()
        self._name = f"{rng.getrandbits(32):08x}"
        self._actions: dict[Action, int] = {
            self.load: 80,
            self.look: 80,
            self.request: 60,
            self.store: 50,
            self.flush: 20,
            self.prefill: 20,
            self.decode: 30,
            self.write_slowly: 10,
            self.reopen: 10,
            self.status: 10,
            self.reset: 1,
        }

    async def run_one(self) -> None:
        """Runs one random action.

        Raises a `KVTierError` if the server is unreachable, for example.
        """
        dataset = self._rng.choice(self._datasets)
        slot = self._slots.of(dataset)
        act: Action
        if dataset is LEDGER:
            [act] = self._rng.choices((self.deposit, self.load_deposits, self.abandon), (10, 10, 1))
        else:
            [act] = self._rng.choices(list(self._actions), list(self._actions.values()))
        self._results.count(f"act {act.__name__}")
        await act(slot)

    async def load(self, slot: ClientSlot) -> None:
        keys = self.keys(slot.dataset)
        buffers = [filled(1, slot.dataset.namespace.part_bytes_of(key))[0] for key in keys]
        hits = await slot.api.load(keys, buffers, wait=self._rng.choice(WAITS))
        self._verify(slot, keys[:hits], buffers[:hits], "load")

    async def look(self, slot: ClientSlot) -> None:
        """Looks up blocks and reads some hits; then releases, prolongs or abandons the lease."""
        rng, keys = self._rng, self.keys(slot.dataset)
        options = {"wait": rng.choice(WAITS), "prefix": rng.random() < 0.5, "lease": rng.choice(LEASES)}
        found = await slot.api.lookup(keys, **options)
        if not found.id:
            return
        hits = [number for number, status in enumerate(found.statuses) if status == KeyStatus.HIT]
        await self._read(slot, found, keys, rng.sample(hits, rng.randint(0, len(hits))), "read")
        await self._release(slot, found.id, always=options["lease"] == LONG_LEASE)

    async def request(self, slot: ClientSlot) -> None:
        """Emulates an engine: begins a request, reads its prefix, stores the rest, finishes it."""
        rng, keys = self._rng, self.keys(slot.dataset)
        name = f"{self._name}-{next(self._numbers)}"
        params = {"do_remote_decode": True} if rng.random() < 0.3 else None
        found = await slot.api.begin_request(name, keys, kv_transfer_params=params, wait=rng.choice(WAITS))
        await self._read(slot, found, keys, range(found.prefix_hits), "request")
        rest = keys[found.prefix_hits :]
        await self._store(slot, rest, request_id=name)
        if rng.random() < 0.9:
            outcome = await slot.api.finish_request(name, wait=rng.choice(WAITS))
            self._results.count("requests settled" if outcome.settled else "requests unsettled")

    async def prefill(self, slot: ClientSlot) -> None:
        """Emulates a prefill engine: stores a prompt, and holds it for a decode engine."""
        keys = self.keys(slot.dataset)
        name = f"{self._name}-{next(self._numbers)}"
        await slot.api.begin_request(name, keys, kv_transfer_params={"do_remote_decode": True})
        await self._store(slot, keys, request_id=name)
        positions = range(len(keys))
        held = await slot.api.publish(name, keys, positions, num_tokens=16 * len(keys), hold_for=HOLD_SECONDS)
        await slot.api.finish_request(name)
        self._results.count(f"hold {held.status.name}")
        if held.status == PublishStatus.PUBLISHED:
            self._ledger.leave(f"hold-of-{slot.dataset.name}", [slot.client.engine_id, name])

    async def decode(self, slot: ClientSlot) -> None:
        """Emulates a decode engine: claims and reads the latest hold, and mostly releases it."""
        left = self._ledger.take(f"hold-of-{slot.dataset.name}", at_most=CLAIM_SECONDS)
        if left is None:
            return
        hold = HoldName(*left)
        claim = await slot.api.claim(hold, wait=self._rng.choice(WAITS))
        await self._read(slot, claim, list(claim.keys), range(claim.prefix_hits), "hand-off")
        self._results.count("hand-offs read", bool(claim.prefix_hits))
        await slot.api.release(claim.id)
        if self._rng.random() < 0.8:
            await slot.api.release_holds(hold)

    async def store(self, slot: ClientSlot) -> None:
        await self._store(slot, self.keys(slot.dataset))

    async def flush(self, slot: ClientSlot) -> None:
        statuses = await slot.api.flush(self.keys(slot.dataset), wait=self._rng.choice(WAITS))
        for status in statuses:
            self._results.count(f"flush {DurableStatus(status).name}")

    async def write_slowly(self, slot: ClientSlot) -> None:
        """Opens a store, writes half of it, and is late or abandons it.

        May write after its deadline.
        """
        keys = self.keys(slot.dataset)
        late = self._rng.random() < 0.4
        with contextlib.suppress(_AbandonedError):
            async with slot.api.write(keys) as batch:
                half = len(batch.wanted) // 2
                for number, view in enumerate(batch.views()[:half]):
                    view[:] = memoryview(slot.dataset.payload(keys[batch.wanted[number]], slot.rank))
                batch.failed.update(range(half, len(batch.wanted)))
                await asyncio.sleep(self._lease + 1.5 if late else self._rng.uniform(0, 0.3))
                if late or self._rng.random() < 0.5:
                    self._write_garbage(batch, "late" if late else "in time")

    async def reopen(self, slot: ClientSlot) -> None:
        """Replaces the client while other threads or tasks use it."""
        await self._slots.reopen(slot.dataset)

    async def status(self, slot: ClientSlot) -> None:
        await slot.api.status()

    async def reset(self, slot: ClientSlot) -> None:
        """Resets the CPU tier of a namespace while other clients use it."""
        pending = await slot.api.reset(wait=self._rng.choice(WAITS))
        self._results.count("resets that were waiting" if pending else "resets")

    async def cancelled(self) -> None:
        """Starts an action and cancels it; for asyncio clients."""
        task = asyncio.ensure_future(self.run_one())
        await asyncio.wait([task], timeout=self._rng.uniform(0, 0.03))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self._results.count("cancelled")

    async def leave_lease(self, slot: ClientSlot, keys: list[bytes]) -> None:
        """Reads with the lease that the other rank has left, and leaves one for it."""
        theirs = self._ledger.take(f"lease-of-{1 - slot.rank}")
        if theirs is not None:
            lease_id, hits, their_keys = theirs
            await self._read(slot, lease_id, [bytes.fromhex(key) for key in their_keys], range(hits), "shared lease")
            self._results.count("leases shared")
        found = await slot.api.lookup(keys, lease=1.0)
        if found.prefix_hits:
            self._ledger.leave(f"lease-of-{slot.rank}", [found.id, found.prefix_hits, [key.hex() for key in keys]])

    async def deposit(self, slot: ClientSlot) -> None:
        """Stores blocks in every tier, and records them once all tiers have acknowledged them.

        All calls use one session, because an unknown request counts as settled at once.
        """
        with self._ledger.deposit(self._rng) as numbers:
            if numbers:
                await self._deposit(slot, numbers)

    async def _deposit(self, slot: ClientSlot, numbers: Sequence[int]) -> None:
        keys = [key for number in numbers for key in LEDGER.keys(self._ledger.document, number, 1)]
        name = f"{self._name}-{next(self._numbers)}"
        begun = await slot.api.begin_request(name, keys, kv_transfer_params={"do_remote_decode": True})
        granted = await self._store(slot, keys, request_id=name)
        outcome = await slot.api.finish_request(name, wait=2.0)
        durable = await slot.api.flush(keys, wait=2.0)
        seen = await slot.api.lookup(keys[:1], lease=0.1)
        if seen.session is begun.session and outcome.settled and not outcome.incomplete_blocks:
            done = [
                number
                for number, status, stored in zip(numbers, durable, granted, strict=True)
                if status == DurableStatus.DURABLE and stored in (StoreStatus.GRANTED, StoreStatus.PRESENT)
            ]
            self._ledger.acknowledged(done)
            self._results.count("deposits", len(done))

    async def abandon(self, slot: ClientSlot) -> None:
        """Opens a store in the deposits' namespace, writes to it and abandons it."""
        keys = LEDGER.keys(ABANDONED, self._rng.randrange(1 << 12), self._rng.choice(BATCHES))
        with contextlib.suppress(_AbandonedError):
            async with slot.api.write(keys) as batch:
                await asyncio.sleep(self._rng.uniform(0, 0.3))
                self._write_garbage(batch, "in time")

    async def load_deposits(self, slot: ClientSlot) -> None:
        """Loads recorded durable blocks."""
        mine = self._ledger.some(self._rng, 8)
        keys = [key for number in mine for key in LEDGER.keys(self._ledger.document, number, 1)]
        buffers = [filled(1, LEDGER.parts[0])[0] for _ in keys]
        hits = await slot.api.load(keys, buffers, wait=1.0)
        self._verify(slot, keys[:hits], buffers[:hits], "deposit")

    def keys(self, dataset: Dataset) -> list[bytes]:
        """Keys of a run of a document's blocks; most runs start at its head, as requests do."""
        rng = self._rng
        start = 0 if rng.random() < 0.7 else rng.randrange(dataset.length)
        if dataset is PAIR:  # both ranks use the same document, as in an engine
            return dataset.keys(self._ledger.shared_document(dataset.documents), 0, rng.choice((4, 8, 16)))
        return dataset.keys(dataset.hot_document(rng), start, rng.choice(BATCHES))

    async def _store(self, slot: ClientSlot, keys: list[bytes], *, request_id: str = "") -> bytes:
        data = [slot.dataset.payload(key, slot.rank) for key in keys]
        statuses: bytes = await slot.api.store(keys, data, request_id=request_id)
        for status in statuses:
            self._results.count(f"store {StoreStatus(status).name}")
        self._record_epoch(slot)
        return statuses

    def _write_garbage(self, batch: WriteBatch, when: str) -> None:
        """Overwrites all slots and abandons the store: no client may ever load these bytes."""
        for view in batch.views():
            view[:] = bytes([GARBAGE]) * len(view)
        self._results.count(f"stores given up {when}")
        raise _AbandonedError

    async def _read(self, slot: ClientSlot, lease: Any, keys: list[bytes], items: Sequence[int], how: str) -> None:
        """Copies blocks, sometimes slowly.

        They are verified only if the lease was valid to the end.
        """
        if not items:
            return
        async with slot.api.read(lease, items) as batch:
            if self._rng.random() < 0.2:
                await asyncio.sleep(self._rng.uniform(0, 0.4))
            copies = [np.frombuffer(bytes(view), np.uint8) for view in batch.views()]
        self._verify(slot, [keys[item] for item in items], copies, how)

    def _verify(self, slot: ClientSlot, keys: list[bytes], found: list[np.ndarray], how: str) -> None:
        epoch, transport = self._record_epoch(slot), slot.client.transport
        self._results.check(slot.dataset, keys, found, slot.rank, how=how, epoch=epoch, transport=transport)
        self._results.count(f"verified over {transport}", len(keys))

    def _record_epoch(self, slot: ClientSlot) -> str:
        """Counts and returns the epoch of the server that answered.

        Empty if the session has ended.
        """
        session = slot.session
        if session is None:
            return ""
        epoch = f"{session.ref.epoch:016x}"
        self._results.count(f"epoch {epoch}")
        return epoch

    async def _release(self, slot: ClientSlot, lease_id: int, *, always: bool) -> None:
        fate = self._rng.random()
        if fate < 0.2:
            await slot.api.touch(lease_id, lease=0.5)
        if always or fate < 0.85:
            await slot.api.release(lease_id)
        else:
            self._results.count("leases left to expire")
