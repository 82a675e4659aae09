"""Readers of the event log, who must know at any time which blocks each tier has."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvtier.tiers.core.event_log import BlockEvent, EventKind, EventRing, EventsLost, event_scope
from kvtier.tiers.core.manager import TierManager

from .inspect import CoreView
from .model import SPECS, Invariant, Name, Violation, is_hold_only

__all__ = ["EventReaders"]


class _Reader:
    """One reader: a replay in small steps, then the events of the ring; again after a loss."""

    def __init__(self, core: TierManager, scope: bytes | None) -> None:
        self._core = core
        self.ring: EventRing = core.watch_events(scope)
        self.lost = 0
        self._restart()

    def _restart(self) -> None:
        self._replay = self._core.replay_events(self.ring)
        self._cursor = -1
        self.held: dict[int, set[Name]] = {tier: set() for tier in self._core._events.tiers}

    @property
    def knows_all(self) -> bool:
        return self._replay.done and self._cursor == self.ring.end

    def read(self, most: int) -> None:
        try:
            if self._replay.done:
                events, self._cursor = self.ring.read(self._cursor, most)
                self._apply(events)
            else:
                self._apply(self._replay.step(most))
                self._cursor = self._replay.cursor
        except EventsLost:
            self.lost += 1
            self._restart()

    def leave(self) -> None:
        self._core.unwatch_events(self.ring)

    def _apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            held = self.held[event.tier]
            names = {(event.namespace, key) for key in event.keys}
            if len(names) != len(event.keys) and event.kind is EventKind.STORED:
                raise Violation(Invariant.EVENTS, f"an event names a block twice: {event}")
            if event.kind is EventKind.CLEARED:
                held.difference_update({name for name in held if name[0] == event.namespace})
            elif event.kind is EventKind.STORED:
                if names & held:
                    raise Violation(Invariant.EVENTS, f"stored again: {names & held}")
                held |= names
            elif not names <= held:
                raise Violation(Invariant.EVENTS, f"removed, but not stored: {names - held}")
            else:
                held -= names


class EventReaders:
    """A prompt reader of all tenants, and one of a tenant that comes, goes and is often late."""

    def __init__(self, core: TierManager, seed: int) -> None:
        self._core = core
        self._rng = random.Random(f"{seed} readers")
        self._prompt = _Reader(core, None)
        self._late: _Reader | None = None

    def check(self, view: CoreView) -> dict[str, bool]:
        """Reads events, and checks what the readers know; returns which rare events occurred."""
        late = self._late
        if late is None:
            self._late = (
                _Reader(self._core, event_scope(self._rng.choice(SPECS).id)) if self._rng.random() < 0.1 else None
            )
        elif self._rng.random() < 0.05:
            late.leave()
            self._late = None
        elif self._rng.random() < 0.15:
            late.read(3)
            self._compare(late, view)
        lost = late is not None and late.lost > 0
        while not self._prompt.knows_all:
            self._prompt.read(3)
        self._compare(self._prompt, view)
        return {"events lost": lost, "events read": bool(self._prompt.held[0])}

    def _compare(self, reader: _Reader, view: CoreView) -> None:
        if not reader.knows_all:
            return
        for tier, held in reader.held.items():
            there = {block.name for block in view.ready} if tier == 0 else view.held[tier - 1]
            there = {name for name in there if not is_hold_only(name[1]) and reader.ring.includes(name[0])}
            if held != there:
                raise Violation(Invariant.EVENTS, f"tier {tier}: {held ^ there} differ between events and tier")
