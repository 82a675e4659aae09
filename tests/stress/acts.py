"""What a client does: one act after another, drawn at random. Whatever it reads is verified, whatever fails is counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from harness.payloads import filled

from kvtier.client import DurableStatus, KeyStatus, StoreStatus, WriteBatch
from stress.client_slots import ClientSlots, Seat
from stress.durable_ledger import DurableLedger
from stress.shape import LEDGER, PAIR, Field
from stress.tally import Tally

__all__ = ["Acts"]

LONG_LEASE = 60.0
LEASES = (None, None, 0.3, 1.0, LONG_LEASE)
"""Seconds for which leases are asked for. The long ones are given back, or fall with a client that is killed."""
WAITS = (0.0, 0.0, 0.1, 0.5)
BATCHES = (1, 2, 6, 16, 48)
GARBAGE = 0xEE

Act = Callable[[Seat], Coroutine[Any, Any, None]]


class _Abandoned(Exception):
    """A writer changes its mind."""


class Acts:
    """The acts of one thread or task of a client process."""

    def __init__(
        self,
        rng: random.Random,
        client_slots: ClientSlots,
        fields: Sequence[Field],
        tally: Tally,
        durable_ledger: DurableLedger,
        *,
        lease: float,
    ) -> None:
        """`lease` is how long the server's leases hold unless asked otherwise, in seconds."""
        self._rng = rng
        self._slots = client_slots
        self._fields = fields
        self._tally = tally
        self._ledger = durable_ledger
        self._lease = lease
        self._numbers = itertools.count()
        self._name = f"{rng.getrandbits(32):08x}"
        self._acts: dict[Act, int] = {
            self.load: 80,
            self.look: 80,
            self.request: 60,
            self.store: 50,
            self.flush: 20,
            self.hold_write: 10,
            self.reopen: 10,
            self.status: 10,
            self.reset: 1,
        }

    async def one(self) -> None:
        """Does something; raises a `KVTierError` where the server was not there, and the like."""
        field = self._rng.choice(self._fields)
        seat = self._slots.of(field)
        if field is LEDGER:
            act: Act = self._rng.choice((self.deposit, self.withdraw))
        else:
            [act] = self._rng.choices(list(self._acts), list(self._acts.values()))
        self._tally.count(f"act {act.__name__}")
        await act(seat)

    async def load(self, seat: Seat) -> None:
        """Loads a run of blocks."""
        keys = self.keys(seat.field)
        buffers = [filled(1, seat.field.namespace.part_bytes_of(key))[0] for key in keys]
        hits = await seat.api.load(keys, buffers, wait=self._rng.choice(WAITS))
        self._verify(seat, keys[:hits], buffers[:hits], "load")

    async def look(self, seat: Seat) -> None:
        """Looks up blocks, reads some of the hits, and gives the lease back, prolongs it first, or leaves it to expire."""
        rng, keys = self._rng, self.keys(seat.field)
        options = {"wait": rng.choice(WAITS), "prefix": rng.random() < 0.5, "lease": rng.choice(LEASES)}
        found = await seat.api.lookup(keys, **options)
        if not found.id:
            return
        hits = [number for number, status in enumerate(found.statuses) if status == KeyStatus.HIT]
        await self._read(seat, found, keys, rng.sample(hits, rng.randint(0, len(hits))), "read")
        await self._let_go(seat, found.id, surely=options["lease"] == LONG_LEASE)

    async def request(self, seat: Seat) -> None:
        """Does what an engine does: announces a request, reads its prefix, stores the rest, and finishes it, mostly."""
        rng, keys = self._rng, self.keys(seat.field)
        name = f"{self._name}-{next(self._numbers)}"
        params = {"do_remote_decode": True} if rng.random() < 0.3 else None
        found = await seat.api.begin_request(name, keys, kv_transfer_params=params, wait=rng.choice(WAITS))
        await self._read(seat, found, keys, range(found.prefix_hits), "request")
        rest = keys[found.prefix_hits :]
        await self._store(seat, rest, request_id=name)
        if rng.random() < 0.9:
            outcome = await seat.api.finish_request(name, wait=rng.choice(WAITS))
            self._tally.count("requests settled" if outcome.settled else "requests unsettled")

    async def store(self, seat: Seat) -> None:
        """Stores a run of blocks."""
        await self._store(seat, self.keys(seat.field))

    async def flush(self, seat: Seat) -> None:
        """Asks for durability."""
        statuses = await seat.api.flush(self.keys(seat.field), wait=self._rng.choice(WAITS))
        for status in statuses:
            self._tally.count(f"flush {DurableStatus(status).name}")

    async def hold_write(self, seat: Seat) -> None:
        """Takes slots, writes half of them, and is late or changes its mind; may write garbage when its time is long over."""
        keys = self.keys(seat.field)
        late = self._rng.random() < 0.4
        with contextlib.suppress(_Abandoned):
            async with seat.api.write(keys) as batch:
                half = len(batch.wanted) // 2
                for number, view in enumerate(batch.views()[:half]):
                    view[:] = memoryview(seat.field.payload(keys[batch.wanted[number]], seat.rank))
                batch.failed.update(range(half, len(batch.wanted)))
                await asyncio.sleep(self._lease + 1.5 if late else self._rng.uniform(0, 0.3))
                if late or self._rng.random() < 0.5:
                    self._spoil(batch, "late" if late else "in time")

    async def reopen(self, seat: Seat) -> None:
        """Replaces the client, whatever the other threads or tasks are doing with it."""
        await self._slots.reopen(seat.field)

    async def status(self, seat: Seat) -> None:
        """Asks how the server is."""
        await seat.api.status()

    async def reset(self, seat: Seat) -> None:
        """Empties the CPU tier of a namespace, under everybody who is busy in it."""
        pending = await seat.api.reset(wait=self._rng.choice(WAITS))
        self._tally.count("resets that were waiting" if pending else "resets")

    async def cancelled(self) -> None:
        """Starts an act and cancels it in the middle; for asyncio clients."""
        task = asyncio.ensure_future(self.one())
        await asyncio.wait([task], timeout=self._rng.uniform(0, 0.03))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self._tally.count("cancelled")

    async def hand_over(self, seat: Seat, keys: list[bytes]) -> None:
        """Reads with the lease that the other rank has left for us, and leaves one for it."""
        theirs = self._ledger.handed_over(seat.rank)
        if theirs is not None:
            lease_id, hits, their_keys = theirs
            await self._read(seat, lease_id, their_keys, range(hits), "shared lease")
            self._tally.count("leases shared")
        found = await seat.api.lookup(keys, lease=1.0)
        if found.prefix_hits:
            self._ledger.hand_over(seat.rank, found.id, found.prefix_hits, keys)

    async def deposit(self, seat: Seat) -> None:
        """Stores blocks that every tier has to take, and notes them down once all of them say that they have.

        All within one session: in another one a request that nobody knows is settled at once.
        """
        numbers = self._ledger.fresh(self._rng.randint(1, 4))
        keys = [key for number in numbers for key in LEDGER.keys(self._ledger.document, number, 1)]
        if not keys:
            return
        name = f"{self._name}-{next(self._numbers)}"
        begun = await seat.api.begin_request(name, keys, kv_transfer_params={"do_remote_decode": True})
        granted = await self._store(seat, keys, request_id=name)
        outcome = await seat.api.finish_request(name, wait=2.0)
        durable = await seat.api.flush(keys, wait=2.0)
        seen = await seat.api.lookup(keys[:1], lease=0.1)
        if seen.session is begun.session and outcome.settled and not outcome.incomplete_blocks:
            done = [
                number
                for number, status, stored in zip(numbers, durable, granted, strict=True)
                if status == DurableStatus.DURABLE and stored in (StoreStatus.GRANTED, StoreStatus.PRESENT)
            ]
            self._ledger.acknowledged(done)
            self._tally.count("deposits", len(done))

    async def withdraw(self, seat: Seat) -> None:
        """Loads blocks of which it knows that they are there."""
        mine = self._ledger.some(self._rng, 8)
        keys = [key for number in mine for key in LEDGER.keys(self._ledger.document, number, 1)]
        buffers = [filled(1, LEDGER.parts[0])[0] for _ in keys]
        hits = await seat.api.load(keys, buffers, wait=1.0)
        self._verify(seat, keys[:hits], buffers[:hits], "withdrawal")

    def keys(self, field: Field) -> list[bytes]:
        """Returns a run of a document's blocks: mostly from its head on, as requests do."""
        rng = self._rng
        start = 0 if rng.random() < 0.7 else rng.randrange(field.length)
        if field is PAIR:  # both ranks are busy with the same document, as they are in an engine
            return field.keys(self._ledger.shared_document(field.documents), 0, rng.choice((4, 8, 16)))
        return field.keys(field.hot_document(rng), start, rng.choice(BATCHES))

    async def _store(self, seat: Seat, keys: list[bytes], *, request_id: str = "") -> bytes:
        data = [seat.field.payload(key, seat.rank) for key in keys]
        statuses: bytes = await seat.api.store(keys, data, request_id=request_id)
        for status in statuses:
            self._tally.count(f"store {StoreStatus(status).name}")
        self._answered_by(seat)
        return statuses

    def _spoil(self, batch: WriteBatch, when: str) -> None:
        """Overwrites everything and gives up: nobody may ever see it."""
        for view in batch.views():
            view[:] = bytes([GARBAGE]) * len(view)
        self._tally.count(f"stores given up {when}")
        raise _Abandoned

    async def _read(self, seat: Seat, lease: Any, keys: list[bytes], items: Sequence[int], how: str) -> None:
        """Copies blocks out, now and then with all the time in the world; they count once the lease is known to have held."""
        if not items:
            return
        async with seat.api.read(lease, items) as batch:
            if self._rng.random() < 0.2:
                await asyncio.sleep(self._rng.uniform(0, 0.4))
            copies = [np.frombuffer(bytes(view), np.uint8) for view in batch.views()]
        self._verify(seat, [keys[item] for item in items], copies, how)

    def _verify(self, seat: Seat, keys: list[bytes], found: list[np.ndarray], how: str) -> None:
        epoch = self._answered_by(seat)
        self._tally.check(seat.field, keys, found, seat.rank, how=how, epoch=epoch, transport=seat.client.transport)

    def _answered_by(self, seat: Seat) -> str:
        """Takes note of the life of the server that has served us, and returns it; empty if its session is over already."""
        session = seat.session
        if session is None:
            return ""
        epoch = f"{session.ref.epoch:016x}"
        self._tally.count(f"epoch {epoch}")
        return epoch

    async def _let_go(self, seat: Seat, lease_id: int, *, surely: bool) -> None:
        fate = self._rng.random()
        if fate < 0.2:
            await seat.api.touch(lease_id, lease=0.5)
        if surely or fate < 0.85:
            await seat.api.release(lease_id)
        else:
            self._tally.count("leases left to expire")
