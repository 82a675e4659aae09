"""Blocks of the publisher: changes per medium, in slices."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness.event_tier import NAMESPACE, EventTier
from harness.payloads import key_of

from kvtier.client.events import known_blocks
from kvtier.server.events import log_reader
from kvtier.server.events import topic as topic_module
from kvtier.server.events.log_reader import TierBlocks, WatchPhase, WatchStep
from kvtier.server.events.messages import PublishedEvent
from kvtier.server.events.topic import Topic
from kvtier.tiers.core import event_log
from kvtier.tiers.core.event_log import BlockEvent, EventKind, EventLog, EventsLost
from kvtier.tiers.core.event_replay import EventReplay

KEYS = [key_of(number) for number in range(40)]
MEDIA = ["CPU", "STORAGE", "STORAGE"]


def step(phase: WatchPhase, *events: tuple[EventKind, int, list[bytes]]) -> WatchStep:
    return WatchStep(phase, [BlockEvent(kind, tier, NAMESPACE, keys) for kind, tier, keys in events], None)


async def changes(held: TierBlocks, *given: Any) -> list[tuple[bool, str, set[bytes]]]:
    found = [change async for _, change in held.apply(step(*given))]
    return [(change.is_stored, change.medium, set(change.keys)) for change in found if change.keys]


async def test_a_replay_changes_only_what_is_different() -> None:
    """B6.10 Also if an earlier replay was interrupted."""
    held = TierBlocks(MEDIA)
    await changes(held, WatchPhase.BEGIN)
    assert await changes(held, WatchPhase.END, (EventKind.STORED, 1, KEYS[:6])) == [(True, "STORAGE", set(KEYS[:6]))]
    assert await changes(held, WatchPhase.LIVE, (EventKind.STORED, 2, KEYS[5:7])) == [(True, "STORAGE", {KEYS[6]})]
    await changes(held, WatchPhase.BEGIN)
    assert await changes(held, WatchPhase.REPLAY, (EventKind.STORED, 1, KEYS[:3])) == []
    await changes(held, WatchPhase.BEGIN)
    found = await changes(held, WatchPhase.REPLAY, (EventKind.STORED, 1, [KEYS[0], KEYS[7]]))
    assert found == [(True, "STORAGE", {KEYS[7]})]
    assert await changes(held, WatchPhase.REPLAY, (EventKind.STORED, 2, KEYS[5:6])) == []
    removed = [each async for _, each in held.apply(step(WatchPhase.END))]
    assert {key for each in removed for key in each.keys} == {*KEYS[1:5], KEYS[6]}
    assert not any(each.is_stored for each in removed)


async def test_work_of_any_size_is_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """B6.10 A topic's begin, a reset, and the end of a replay pause after each slice."""
    pauses: list[None] = []

    async def pause() -> None:
        pauses.append(None)

    def taken() -> int:
        number = len(pauses)
        pauses.clear()
        return number

    monkeypatch.setattr(log_reader, "pause", pause)
    monkeypatch.setattr(known_blocks, "_SLICE_KEYS", 4)
    held = TierBlocks(MEDIA)
    await changes(held, WatchPhase.END, (EventKind.STORED, 0, KEYS))
    every = [len(each.keys) async for each in held.all(NAMESPACE, is_stored=True)]
    assert (every, taken()) == ([4] * 10, 10)
    await changes(held, WatchPhase.BEGIN)
    await changes(held, WatchPhase.END, (EventKind.STORED, 0, KEYS[:20]))
    assert taken() == 5
    await changes(held, WatchPhase.LIVE, (EventKind.CLEARED, 0, []))
    assert taken() == 5
    assert [each async for each in held.all(NAMESPACE, is_stored=True)] == []


@pytest.mark.parametrize("batch", [1, 256])
def test_a_block_that_moves_is_always_in_a_medium(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6.10 Its removed event waits until the other medium has published that it is stored."""
    monkeypatch.setattr(topic_module, "_BATCH_KEYS", batch)
    topic = Topic([16], lambda _: None)
    topic.change(PublishedEvent(True, "CPU", KEYS))
    places = {key: {change.medium} for (change,) in iter(topic.take, []) for key in change.keys}
    topic.change(PublishedEvent(True, "STORAGE", KEYS))
    topic.change(PublishedEvent(False, "CPU", KEYS[::-1]))
    for change in (change for changes in iter(topic.take, []) for change in changes):
        for key in change.keys:
            places[key] ^= {change.medium}
            assert places[key]
    assert places == {key: {"STORAGE"} for key in KEYS}


def change(tier: EventTier, rng: random.Random) -> None:
    key = rng.choice(KEYS)
    if rng.random() < 0.02:
        tier.clear()
    elif key in tier.keys:
        tier.remove(key)
    else:
        tier.store(key)


class Reader:
    """Reads a ring, as `EventWatch` does, into blocks and a topic, whose messages it checks."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._ring = log.watch(None)
        self._held = TierBlocks(MEDIA)
        self._replay: EventReplay | None = None
        self._cursor: int | None = None
        self.topic = Topic([16], lambda _: None)
        self.known: set[tuple[str, bytes]] = set()

    async def read(self) -> None:
        phase, events = WatchPhase.LIVE, []
        try:
            if self._cursor is not None:
                events, self._cursor = self._ring.read(self._cursor, 4)
            elif self._replay is None:
                self._replay = EventReplay(self._log, self._ring)
                phase = WatchPhase.BEGIN
            else:
                events = self._replay.step(4)
                phase = WatchPhase.END if self._replay.done else WatchPhase.REPLAY
                if self._replay.done:
                    self._cursor, self._replay = self._replay.cursor, None
        except EventsLost:
            self._cursor = self._replay = None
            return
        async for _, change in self._held.apply(WatchStep(phase, events, None)):
            self.topic.change(change)

    def publish(self) -> None:
        for change in self.topic.take():
            self._publish(change)

    def _publish(self, change: PublishedEvent) -> None:
        names = {(change.medium, key) for key in change.keys}
        assert len(names) == len(change.keys)
        assert not names & self.known if change.is_stored else names <= self.known
        self.known = self.known | names if change.is_stored else self.known - names

    @property
    def is_done(self) -> bool:
        return self._cursor == self._ring.end and not self.topic.has_unsent


@pytest.mark.parametrize("seed", range(20))
async def test_a_topic_is_right_after_any_changes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6.10 Each block is stored and removed in turns, also when the log loses events."""
    monkeypatch.setattr(log_reader, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(known_blocks, "_SLICE_KEYS", 3)
    monkeypatch.setattr(event_log, "RUN_KEYS", 4)
    monkeypatch.setattr(event_log, "MAX_KEYS", 24)
    rng = random.Random(seed)
    log = EventLog()
    tiers = [EventTier(log, number) for number in range(len(MEDIA))]
    reader = Reader(log)
    for _ in range(1000):
        chosen = rng.random()
        if chosen < 0.5:
            for _ in range(rng.choice([1, 1, 1, 20])):
                change(rng.choice(tiers), rng)
        elif chosen < 0.9:
            await reader.read()
        else:
            reader.publish()
    while not reader.is_done:
        await reader.read()
        reader.publish()
    assert reader.known == {(medium, key) for medium, tier in zip(MEDIA, tiers, strict=True) for key in tier.keys}
