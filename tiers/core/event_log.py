"""Event log: which blocks each tier has stored and removed, for clients that track the tiers.

The log keeps the latest events of each scope that has a reader. A scope is one tenant, or all
tenants. So a tenant neither sees the number of events of another tenant, nor loses events because
of it. Without readers and contents, an event costs one test of `TierEvents.is_on`.

A block has one stored event when readers can find it in a tier, and afterwards either one removed
event or one cleared event of its namespace. Blocks of holds without a content hash have no events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ..secondary_tier import NamespaceId
from ..types import HOLD_ONLY_KEY_PREFIX, TENANT_TAG_BYTES
from .block_contents import BlockContent, BlockContents
from .commands import Command, EventsRecorded

__all__ = ["BlockEvent", "EventKind", "EventLog", "EventRing", "EventSource", "EventsLost", "TierEvents", "event_scope"]

RUN_KEYS = 128
"""Limit of the keys of one event. Consecutive events of a kind, tier and namespace are merged."""

MAX_KEYS = 1 << 16
"""Limit of the keys that a ring keeps. With keys of 40 bytes, a ring has at most 9 MB."""

KEEP_SECONDS = 60.0
"""For so long a ring without readers keeps recording, so that a reader can resume after a break."""

Scope = bytes | None


class EventsLost(Exception):
    """The ring has no event at this cursor any more. The reader needs a replay."""


class EventKind(enum.Enum):
    STORED = enum.auto()
    REMOVED = enum.auto()
    CLEARED = enum.auto()
    """All blocks of the namespace were removed from the tier. The event has no keys."""


@dataclass(slots=True, eq=False)
class BlockEvent:
    """Blocks of one namespace that one tier has stored or removed, in this order."""

    kind: EventKind
    tier: int
    """Position of the tier in the lookup order; the CPU tier is 0."""
    namespace: NamespaceId
    keys: list[bytes]


class EventSource(Protocol):
    """Blocks of one tier that has events."""

    def counts(self) -> Iterable[tuple[NamespaceId, int]]: ...

    def copy_of(self, namespace: NamespaceId, /) -> dict[bytes, Any]:
        """Returns a copy of the index of a namespace. Takes 10 ms per million blocks."""
        ...

    def has(self, namespace: NamespaceId, key: bytes, /) -> bool:
        """Returns whether readers can find a block in the tier."""
        ...


def event_scope(namespace: NamespaceId) -> bytes:
    """Returns the scope of the tenant that owns a namespace."""
    return namespace[:TENANT_TAG_BYTES]


class EventRing:
    """The latest events of one scope. A cursor is the number of the next event to read."""

    def __init__(self, scope: Scope, first: int, commands: list[Command]) -> None:
        self.scope = scope
        self.first = self.end = first
        self.readers = 0
        self.unread_since = 0.0
        """Time at which the last reader left."""
        self._commands = commands
        self._events: dict[int, BlockEvent] = {}
        self._weight = 0
        self._open: BlockEvent | None = None
        """The last event, unless a reader has it already."""
        self._is_announced = False

    def includes(self, namespace: NamespaceId) -> bool:
        return self.scope is None or event_scope(namespace) == self.scope

    def has(self, cursor: int) -> bool:
        return self.first <= cursor <= self.end

    def add(self, kind: EventKind, tier: int, namespace: NamespaceId, keys: list[bytes]) -> None:
        """Appends an event, or merges it with the last one; drops the oldest events if needed."""
        last = self._open
        if (
            last is not None
            and last.kind is kind
            and last.tier == tier
            and last.namespace == namespace
            and len(last.keys) < RUN_KEYS
        ):
            last.keys += keys
            self._weight += len(keys)
        else:
            self._open = self._events[self.end] = BlockEvent(kind, tier, namespace, keys)
            self.end += 1
            self._weight += 1 + len(keys)
        while self._weight > MAX_KEYS:
            self._weight -= 1 + len(self._events.pop(self.first).keys)
            self.first += 1
        if not self._is_announced:
            self._is_announced = True
            self._commands.append(EventsRecorded(self.scope))

    def read(self, cursor: int, most: int) -> tuple[list[BlockEvent], int]:
        """Returns events with about `most` keys, and the cursor after them. Raises EventsLost.

        If there are no events, the next event causes an `EventsRecorded` command.
        """
        if not self.has(cursor):
            raise EventsLost
        events: list[BlockEvent] = []
        while cursor < self.end and most > 0:
            event = self._events[cursor]
            events.append(event)
            most -= 1 + len(event.keys)
            cursor += 1
        if cursor == self.end:
            self._open = None
            self._is_announced = False
        return events, cursor


class TierEvents:
    """Recorder of the events of one tier."""

    __slots__ = ("_log", "is_on", "source", "tier")

    def __init__(self, tier: int, source: EventSource, log: EventLog, *, is_on: bool) -> None:
        self.tier = tier
        self.source = source
        self.is_on = is_on
        """Whether a scope has a reader or a block a content. Callers test it before each call."""
        self._log = log

    def stored(self, namespace: NamespaceId, key: bytes) -> None:
        self._record(EventKind.STORED, namespace, [key])

    def removed(self, namespace: NamespaceId, key: bytes) -> None:
        self._record(EventKind.REMOVED, namespace, [key])
        if self._log.contents:
            self._log.drop_content(namespace, key)

    def not_stored(self, namespace: NamespaceId, key: bytes) -> None:
        """Called when the store of a block has failed. There is no event."""
        if self._log.contents:
            self._log.drop_content(namespace, key)

    def cleared(self, namespace: NamespaceId) -> None:
        self._record(EventKind.CLEARED, namespace, [])
        if self._log.contents:
            self._log.drop_contents(namespace, self.tier)

    def _record(self, kind: EventKind, namespace: NamespaceId, keys: list[bytes]) -> None:
        if keys and keys[0].startswith(HOLD_ONLY_KEY_PREFIX):
            return
        for scope in (event_scope(namespace), None):
            ring = self._log.rings.get(scope)
            if ring is not None:
                ring.add(kind, self.tier, namespace, keys.copy())


class EventLog:
    """The rings of all scopes that have or recently had readers."""

    def __init__(self, commands: list[Command] | None = None, content_bytes: int = 0) -> None:
        """`content_bytes`: limit of the memory for contents of blocks."""
        self.contents = BlockContents(content_bytes)
        self.tiers: dict[int, TierEvents] = {}
        """The tiers with events. Shared tiers have none, because other servers change them."""
        self._commands: list[Command] = [] if commands is None else commands
        self.rings: dict[Scope, EventRing] = {}
        self._first = 0
        """First cursor of the next ring, beyond all cursors of rings that no longer exist."""
        self._now = 0.0
        self._is_on = False

    def add_tier(self, tier: int, source: EventSource) -> TierEvents:
        events = self.tiers[tier] = TierEvents(tier, source, self, is_on=self._is_on)
        return events

    def describe(self, namespace: NamespaceId, key: bytes, content: BlockContent) -> None:
        """Keeps the content of a block until no tier has the block, or the memory is full."""
        self.contents.put(namespace, key, content)
        if not self._is_on:
            self._switch()

    def drop_content(self, namespace: NamespaceId, key: bytes) -> None:
        """Drops the content of a block, unless another tier has the block."""
        if not any(tier.source.has(namespace, key) for tier in self.tiers.values()):
            self.contents.drop(namespace, key)

    def drop_contents(self, namespace: NamespaceId, cleared: int) -> None:
        """Drops the contents of a namespace that was cleared, unless other tiers have its blocks.

        If they have, the other contents stay until the memory is full.
        """
        others = (tier.source.counts() for number, tier in self.tiers.items() if number != cleared)
        if not any(each == namespace and count for counts in others for each, count in counts):
            self.contents.drop_all(namespace)

    def watch(self, scope: Scope) -> EventRing:
        """Returns the ring of a scope for a new reader, who must call `unwatch` later."""
        ring = self.rings.get(scope)
        if ring is None:
            ring = self.rings[scope] = EventRing(scope, self._first, self._commands)
            self._switch()
        ring.readers += 1
        return ring

    def unwatch(self, ring: EventRing) -> None:
        ring.readers -= 1
        ring.unread_since = self._now

    def tick(self, now: float) -> None:
        """Removes the rings that had no reader for `KEEP_SECONDS`."""
        self._now = now
        for ring in [ring for ring in self.rings.values() if not ring.readers]:
            if now - ring.unread_since >= KEEP_SECONDS:
                del self.rings[ring.scope]
                self._first = max(self._first, ring.end + 1)
        self.contents.tick()
        self._switch()

    def _switch(self) -> None:
        self._is_on = bool(self.rings or self.contents)
        for tier in self.tiers.values():
            tier.is_on = self._is_on
