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
from contextlib import AbstractContextManager

from ...tiers.core.block import Block
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import BlockLease
from ..core_runtime import TierRuntime

__all__ = ["Writers"]

_SMALL_BYTES, _SMALL_BLOCKS = 1 << 20, 256
"""The digests of so few parts take 0.1 ms, about as long as a call on a thread."""


class Writers:
    """Number of running copies per store. All calls must come from the event loop."""

    def __init__(self, runtime: TierRuntime) -> None:
        self._runtime = runtime
        self._numbers = itertools.count(1 << 32)  # connections of the attach socket count from 1
        self._running: Counter[int] = Counter()
        self._ended = asyncio.Event()
        self._recording: set[asyncio.Task[None]] = set()

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

        Returns None, or for many bytes what the caller must await. If the caller is cancelled, the
        thread goes on, and counts as a writer until its end. Raises UnknownSession.
        """
        digests, blocks = self._runtime.digests, list(store.blocks)
        if len(blocks) <= _SMALL_BLOCKS and digests.bytes_of(blocks) <= _SMALL_BYTES:
            digests.record(blocks, store.rank)
            return None
        writing = self.writing(store)
        writing.__enter__()
        task = asyncio.get_running_loop().create_task(self._record(store, blocks, writing))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        return asyncio.shield(task)

    async def _record(self, store: Store, blocks: Sequence[Block], writing: AbstractContextManager[None]) -> None:
        try:
            await asyncio.to_thread(self._runtime.digests.record, blocks, store.rank)
        finally:
            writing.__exit__(None, None, None)

    def busy(self, store_id: int) -> bool:
        """Returns whether a process of the server may be writing to the store's slots."""
        return store_id in self._running

    async def idle(self, store_id: int) -> None:
        """Waits until no process of the server writes to the store's slots."""
        while self.busy(store_id):
            await self._ended.wait()
