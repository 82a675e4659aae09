"""Stores that helper processes write to on behalf of clients.

While such a copy runs, its store has a writer, like a client that maps the region. If the store
ends before the copy, its slots stay out of use until the copy has ended. A client's report that it
has finished a store counts only after the copy, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

from ...tiers.core.stores import Store
from ..runtime import TierRuntime

__all__ = ["Writers"]


class Writers:
    """Number of running copies per store. Lives on the event loop."""

    def __init__(self, runtime: TierRuntime) -> None:
        self._runtime = runtime
        self._numbers = itertools.count(1 << 32)  # the attach socket's connections count from 1
        self._running: Counter[int] = Counter()
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def writing(self, store: Store) -> Iterator[None]:
        """Context during which a helper process may write to the store's slots."""
        number = next(self._numbers)
        session_id = store.owner.session_id  # the engine's, which may differ from the caller's
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

    def busy(self, store_id: int) -> bool:
        """Returns whether a helper process may be writing to the store's slots."""
        return self._running[store_id] > 0

    async def idle(self, store_id: int) -> None:
        """Waits until no helper process writes to the store's slots."""
        while self.busy(store_id):
            await self._ended.wait()
