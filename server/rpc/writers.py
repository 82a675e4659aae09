"""Copies into the slots of stores that other processes make on our behalf.

While one runs, its store counts as having a writer, like a client that maps the region: should the store end before the copy does,
its slots stay out of use until the copy has ended as well. A client's word that its store is over is not taken before that either.
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
    """Who writes to which store. Lives on the event loop."""

    def __init__(self, runtime: TierRuntime) -> None:
        self._runtime = runtime
        self._numbers = itertools.count(1 << 32)  # `attach` counts its own from 1
        self._running: Counter[int] = Counter()
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def writing(self, store: Store) -> Iterator[None]:
        """Is entered before anything can be written to a store's slots, and left when nothing is any more."""
        number = next(self._numbers)
        session_id = store.owner.session_id  # of the engine, perhaps not the one that asks for the copy
        self._runtime.core.writer_attached(session_id, number)
        self._running[store.id] += 1
        try:
            yield
        finally:
            self._running[store.id] -= 1
            if not self._running[store.id]:
                del self._running[store.id]
            self._runtime.core.writer_gone(session_id, number)
            self._runtime.pump()
            self._ended.set()
            self._ended = asyncio.Event()

    def busy(self, store_id: int) -> bool:
        """Says whether somebody writes to a store's slots on our behalf."""
        return self._running[store_id] > 0

    async def idle(self, store_id: int) -> None:
        """Returns when nobody writes to a store's slots on our behalf."""
        while self.busy(store_id):
            await self._ended.wait()
