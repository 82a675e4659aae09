"""Copies by the server's own processes, on behalf of clients: writers of stores, readers of leases.

A running copy counts as a writer of the store, like a client that maps the region. If the store
ends before the copy, the server reuses the slots only after the end of the copy. CompleteStore also
takes effect only after the copy. A copy out of the slots of a lease keeps its blocks pinned, also
if the lease ends before the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence

from ...tiers.core.block import Block
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import BlockLease
from ..core_runtime import TierRuntime

__all__ = ["Writers"]

_SMALL_BYTES = 1 << 20
"""The digests of this number of bytes take 0.1 ms, about as long as a call on a thread."""


class Writers:
    """Number of running copies per store. All calls must come from the event loop."""

    def __init__(self, runtime: TierRuntime) -> None:
        self._runtime = runtime
        self._numbers = itertools.count(1 << 32)  # connections of the attach socket count from 1
        self._running: Counter[int] = Counter()
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def writing(self, store: Store) -> Iterator[None]:
        """Context in which a process of the server may write to the store's slots."""
        number = next(self._numbers)
        session_id = store.owner.session_id  # the caller may use another session of the engine
        self._runtime.core.writer_attached(session_id, number)
        self._running[store.id] += 1
        try:
            yield
        finally:
            self._running[store.id] -= 1
            if not self._running[store.id]:
                del self._running[store.id]
            self._runtime.core.writer_gone(session_id, number)
            self._runtime.run_commands()
            self._ended.set()
            self._ended = asyncio.Event()

    @contextlib.contextmanager
    def reading(self, lease: BlockLease) -> Iterator[None]:
        """Context in which a process of the server may read the slots of an open lease."""
        lease.readers += 1
        try:
            yield
        finally:
            self._runtime.core.end_reader(lease)
            self._runtime.run_commands()

    def record_digests(self, store: Store) -> Awaitable[None] | None:
        """Records the digests of the parts of a store whose bytes came over streams.

        Returns None, or for many bytes what the caller must await.
        """
        blocks = list(store.blocks)
        if len(blocks) * max((block.part_bytes for block in blocks[:1]), default=0) > _SMALL_BYTES:
            return self._record(store, blocks)
        self._runtime.digests.record(blocks, store.rank)
        return None

    async def _record(self, store: Store, blocks: Sequence[Block]) -> None:
        with self.writing(store):
            await asyncio.to_thread(self._runtime.digests.record, blocks, store.rank)

    def busy(self, store_id: int) -> bool:
        """Returns whether a process of the server may be writing to the store's slots."""
        return store_id in self._running

    async def idle(self, store_id: int) -> None:
        """Waits until no process of the server writes to the store's slots."""
        while self.busy(store_id):
            await self._ended.wait()
