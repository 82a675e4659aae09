"""Reader of the core's event log, and the changes of each medium that follow.

The reader gets a replay if necessary, then the events as they are recorded.

Readers share the event loop with all calls, so a reader asks for a turn before each slice. A reader
that processes its steps slowly costs the server nothing: it has one cursor, and if the log drops
events that the reader has not read, the reader begins again with a replay. A replay of a reader
that is stalled ends after two seconds, because it has a copy of an index.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from ...client.events.known_blocks import KnownBlocks
from ...tiers.core.event_log import BlockEvent, EventKind, EventsLost
from ...tiers.core.event_replay import EventReplay
from ...tiers.secondary_tier import NamespaceId
from ..core_runtime import TierRuntime
from .messages import PublishedEvent

__all__ = ["EventWatch", "TierBlocks", "WatchPhase", "WatchStep", "pause"]

_SLICE = 1024
"""Keys per slice: about 1 ms."""
_GATHER_SECONDS = 0.01
"""After the first event, a reader waits for further events, so that runs of keys are merged."""
_IDLE_SECONDS = 1.0
"""Without events, a reader tests this often whether it may continue."""
_STALLED_SECONDS = 2.0
_PAUSE_SECONDS = 0.001
"""Pause after each slice, so that publishing takes at most half of the event loop's time."""
_MAX_SKIPPED = 1024
"""After this many events of other namespaces, a reader gets a step with a new cursor only."""


class WatchPhase(enum.Enum):
    LIVE = enum.auto()
    BEGIN = enum.auto()
    """A replay begins: the reader must forget all blocks."""
    REPLAY = enum.auto()
    END = enum.auto()


@dataclass(frozen=True, slots=True)
class WatchStep:
    phase: WatchPhase
    events: list[BlockEvent]
    cursor: int | None
    """Cursor after the events; None before the end of a replay."""


class EventWatch:
    """One reader. Call `close` at the end."""

    def __init__(
        self,
        runtime: TierRuntime,
        scope: bytes | None,
        namespace: NamespaceId | None = None,
        *,
        turn: Callable[[], Awaitable[object]],
        check: Callable[[], object],
        lock: asyncio.Lock,
        slice_keys: int | None = None,
    ) -> None:
        """`namespace`: reads only this namespace; None: all namespaces of the scope.

        `turn` waits until the reader may run its next slice. `check` raises if the reader must end.
        `lock` is shared by the readers of a tenant: only one of them runs a replay. `slice_keys`:
        number of keys after which a slice ends.
        """
        self._runtime = runtime
        self._ring = runtime.core.watch_events(scope)
        self._namespace = namespace
        self._turn = turn
        self._check = check
        self._lock = lock
        self._slice = slice_keys or _SLICE

    def close(self) -> None:
        self._runtime.core.unwatch_events(self._ring)

    async def steps(self, cursor: int | None) -> AsyncGenerator[WatchStep, None]:
        """Yields steps until `check` or `turn` raises. Begins with a replay if `cursor` is None."""
        told = cursor or 0
        while True:
            if cursor is None or not self._ring.has(cursor):
                cursor = None
                async with contextlib.aclosing(self._replay()) as replay:
                    async for step in replay:
                        yield step
                        cursor = step.cursor
                told = cursor or 0
                continue
            self._check()
            if cursor == self._ring.end:
                await self._wait()
                continue
            await self._turn()
            if not self._ring.has(cursor):
                continue
            events, cursor = self._ring.read(cursor, self._slice)
            visible = [event for event in events if self._namespace in (None, event.namespace)]
            if visible or cursor - told > _MAX_SKIPPED:
                told = cursor
                yield WatchStep(WatchPhase.LIVE, visible, cursor)

    async def _wait(self) -> None:
        """Waits for the next event, at most a second."""
        self._ring.read(self._ring.end, 1)  # asks for an `EventsRecorded` command
        await self._runtime.wait_for(self._ring.scope, _IDLE_SECONDS)
        await asyncio.sleep(_GATHER_SECONDS)

    async def _replay(self) -> AsyncGenerator[WatchStep, None]:
        """Yields the steps of a replay. If it ends without an END, it must be repeated."""
        await self._lock.acquire()
        release = contextlib.ExitStack()
        release.callback(self._lock.release)
        with release:
            replay = self._runtime.core.replay_events(self._ring, self._namespace)
            phase = WatchPhase.BEGIN
            loop = asyncio.get_running_loop()
            while not replay.done:
                await self._turn()
                try:
                    events = replay.step(self._slice)
                except EventsLost:
                    return
                stalled = loop.call_later(_STALLED_SECONDS, _abandon, replay, release)
                try:
                    if phase is WatchPhase.BEGIN or events:
                        yield WatchStep(phase, events, None)
                        phase = WatchPhase.REPLAY
                    if replay.done:
                        yield WatchStep(WatchPhase.END, [], replay.cursor)
                finally:
                    stalled.cancel()


def _abandon(replay: EventReplay, lock: contextlib.ExitStack) -> None:
    replay.abandon()
    lock.close()


async def pause() -> None:
    await asyncio.sleep(_PAUSE_SECONDS)


class TierBlocks:
    """Changes of each medium that follow from the steps of a reader, with pauses between slices."""

    def __init__(self, media: Sequence[str]) -> None:
        """`media`: medium of each tier."""
        self._media = media
        self._known = KnownBlocks[tuple[NamespaceId, str]]()
        """A group is a medium of a namespace."""

    async def apply(self, step: WatchStep) -> AsyncIterator[tuple[NamespaceId, PublishedEvent]]:
        """Yields the changes of a step."""
        if step.phase is WatchPhase.BEGIN:
            for _ in self._known.begin_replay():
                await pause()
        for event in step.events:
            medium = self._media[event.tier]
            group = (event.namespace, medium)
            if event.kind is EventKind.STORED:
                yield group[0], PublishedEvent(True, medium, self._known.store(group, event.tier, event.keys))
            elif event.kind is EventKind.REMOVED:
                yield group[0], PublishedEvent(False, medium, self._known.remove(group, event.tier, event.keys))
            else:
                for keys in self._known.clear(group, event.tier):
                    yield group[0], PublishedEvent(False, medium, keys)
                    await pause()
        if step.phase is WatchPhase.END:
            for (namespace, medium), keys in self._known.end_replay():
                yield namespace, PublishedEvent(False, medium, keys)
                await pause()

    async def all(self, namespace: NamespaceId, *, is_stored: bool) -> AsyncIterator[PublishedEvent]:
        """Yields all blocks of a namespace, each once per medium. Meanwhile, call nothing else."""
        for medium in dict.fromkeys(self._media):
            for keys in self._known.all((namespace, medium)):
                yield PublishedEvent(is_stored, medium, keys)
                await pause()
