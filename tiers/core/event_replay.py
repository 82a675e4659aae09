"""Replay of the blocks that the tiers hold, in slices, followed by the events of the log.

The blocks change while a replay runs. So each step first returns the events that were recorded
since the last step, but without those of blocks that the replay has not reached. The stored event
of such a block comes when the replay reaches it, if a tier then holds it. So a reader that knows
no block before the replay gets every stored and every removed event exactly once.
"""

from __future__ import annotations

from ..secondary_tier import NamespaceId
from ..types import HOLD_ONLY_KEY_PREFIX
from .event_log import BlockEvent, EventKind, EventLog, EventRing

__all__ = ["EventReplay"]


class EventReplay:
    """One replay for a reader of a ring. At any time it has a copy of one index at most."""

    def __init__(self, log: EventLog, ring: EventRing, namespace: NamespaceId | None = None) -> None:
        """`namespace`: replays only this namespace; None: all namespaces of the ring's scope."""
        self.cursor = ring.end
        """Cursor of the ring after the last step."""
        self.done = False
        self._ring = ring
        self._namespace = namespace
        self._sources = {tier: events.source for tier, events in log.tiers.items()}
        self._todo = {
            (tier, each): None
            for tier, source in self._sources.items()
            for each, _ in source.counts()
            if self.includes(each)
        }
        self._current: tuple[int, NamespaceId] | None = None
        self._pending: dict[bytes, object] = {}
        """Blocks of `_current` that the replay has not reached."""
        self._order: list[bytes] = []
        """Keys of `_pending`, last first: indexers need a parent before its children."""

    def includes(self, namespace: NamespaceId) -> bool:
        return self._ring.includes(namespace) if self._namespace is None else namespace == self._namespace

    def step(self, most: int) -> list[BlockEvent]:
        """Returns the next events, with about `most` keys. Raises EventsLost.

        If the log has more new events than `most`, the step returns only events of the log.
        """
        events, self.cursor = self._ring.read(self.cursor, most)
        live = [visible for event in events if (visible := self._visible(event)) is not None]
        return live if self.cursor < self._ring.end else [*live, *self._next_blocks(most)]

    def abandon(self) -> None:
        """Drops the copy of the index. The next step raises EventsLost."""
        self._todo.clear()
        self._pending, self._order = {}, []
        self.cursor = -1

    def _visible(self, event: BlockEvent) -> BlockEvent | None:
        """Returns an event without the blocks that the replay has not reached."""
        name = (event.tier, event.namespace)
        if not self.includes(event.namespace) or name in self._todo:
            return None
        if name != self._current:
            return event
        if event.kind is EventKind.CLEARED:
            self._pending, self._order = {}, []
            return event
        keys = [key for key in event.keys if key not in self._pending]
        return BlockEvent(event.kind, event.tier, event.namespace, keys) if keys else None

    def _next_blocks(self, most: int) -> list[BlockEvent]:
        if self._current is None or not self._pending:
            self._current = next(iter(self._todo), None)
            if self._current is None:
                self.done = True
                return []
            del self._todo[self._current]
            self._pending = self._sources[self._current[0]].copy_of(self._current[1])
            self._order = list(self._pending)
            self._order.reverse()
        tier, namespace = self._current
        has = self._sources[tier].has
        reached = self._order[: -most - 1 : -1]
        del self._order[-most:]
        for key in reached:
            self._pending.pop(key, None)
        keys = [key for key in reached if has(namespace, key) and not key.startswith(HOLD_ONLY_KEY_PREFIX)]
        return [BlockEvent(EventKind.STORED, tier, namespace, keys)] if keys else []
