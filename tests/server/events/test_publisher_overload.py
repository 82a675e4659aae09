"""The publisher with a log that keeps few events, and tiers and sockets without a server."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from harness.event_tier import NAMESPACE, EventTier
from harness.indexer import hash_of
from harness.payloads import key_of
from harness.polling import async_wait_until

from kvtier.server.auth.roles import OWNER
from kvtier.server.config.events import EventConfig
from kvtier.server.events import publisher as publisher_module
from kvtier.server.events.publisher import EventPublisher
from kvtier.tiers.core import event_log
from kvtier.tiers.core.event_log import EventLog
from kvtier.tiers.core.event_replay import EventReplay

KEPT = [key_of(number) for number in range(1000)]
"""Blocks that are never removed: four messages."""
KEPT_NAMES = {("CPU", hash_of(key)) for key in KEPT}


class Readers:
    """Socket whose readers accept each block stored and removed once, in turns."""

    def __init__(self) -> None:
        self.known: dict[bytes, set[tuple[str, Any]]] = {}
        self.stored: Counter[tuple[bytes, Any]] = Counter()
        self.on_message: Callable[[], object] = lambda: None
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.failures = 0

    async def send(self, _: bytes, topic: bytes, payload: bytes) -> None:
        await self.accepts.wait()
        if self.failures:
            self.failures -= 1
            raise OSError
        known = self.known.setdefault(topic, set())
        for event in msgspec.msgpack.decode(payload)[1]:
            names = {(event["medium"], each) for each in event["block_hashes"]}
            if event["type"] == "BlockStored":
                assert not names & known
                known |= names
                self.stored.update((topic, each) for each in names)
            else:
                assert names <= known
                known -= names
        self.on_message()


class OpenEngine(SimpleNamespace):
    """A session, which is equal to itself only."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Site:
    """A publisher with a number of engines."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.tier = EventTier(self.log)
        self.readers = Readers()
        self.engines: list[str] = []

    def sessions(self) -> list[Any]:
        core = SimpleNamespace(namespace=SimpleNamespace(id=NAMESPACE), engine_id="e", tenant="")
        group = SimpleNamespace(block_tokens=16)
        return [
            OpenEngine(core=core, groups=(group,), engine_address=each, served_model="m", model="m", identity=OWNER)
            for each in self.engines
        ]

    async def wait_for_readers(self) -> None:
        """Waits until each engine's topic has exactly the blocks that are held."""

        def is_known() -> bool:
            held = {("CPU", hash_of(key)) for key in self.tier.keys}
            return all(self.known(engine) == held for engine in self.engines)

        await async_wait_until(is_known)

    def known(self, engine: str) -> set[tuple[str, Any]]:
        return self.readers.known.get(b"kv@%s@m" % engine.encode(), set())


@asynccontextmanager
async def publishing() -> AsyncIterator[Site]:
    site = Site()

    async def wait_for(*_: object) -> None:
        await asyncio.sleep(0.001)

    log = site.log
    core = SimpleNamespace(
        watch_events=log.watch,
        unwatch_events=log.unwatch,
        replay_events=partial(EventReplay, log),
        content_of=log.contents.get,
    )
    runtime: Any = SimpleNamespace(core=core, tiers=[], wait_for=wait_for)
    sessions: Any = SimpleNamespace(all=site.sessions)
    socket: Any = site.readers
    running = asyncio.create_task(EventPublisher(runtime, sessions, EventConfig(), socket).run())
    try:
        yield site
    finally:
        running.cancel()


@pytest.fixture(autouse=True)
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "RUN_KEYS", 8)
    monkeypatch.setattr(event_log, "MAX_KEYS", 64)
    monkeypatch.setattr(publisher_module, "_TOPICS_SECONDS", 0.01)
    monkeypatch.setattr(publisher_module, "_RETRY_SECONDS", 0.01)


async def test_a_busy_server_publishes_each_block_once() -> None:
    """B6.10 Each message takes so long that the log would lose events if its reader waited."""
    async with publishing() as site:
        site.tier.store(*KEPT)
        passing: deque[bytes] = deque()
        numbers = iter(range(10_000, 11_000))

        def churn() -> None:
            for number in (number for number, _ in zip(numbers, range(5), strict=False)):
                passing.append(key_of(number))
                site.tier.store(passing[-1])
                if len(passing) > 20:
                    site.tier.remove(passing.popleft())

        site.readers.on_message = churn
        site.engines = ["a:1", "b:1", "c:1", "d:1"]
        await async_wait_until(lambda: next(numbers, None) is None)
        await site.wait_for_readers()
        counts = {
            site.readers.stored[b"kv@%s@m" % engine.encode(), name] for engine in site.engines for name in KEPT_NAMES
        }
        assert counts == {1}


async def test_lost_events_change_only_what_is_different() -> None:
    """B6.10 The readers take nothing for a while, so that the log loses events."""
    async with publishing() as site:
        site.tier.store(*KEPT)
        site.engines = ["a:1", "b:1"]
        await site.wait_for_readers()
        site.readers.accepts.clear()
        gone = [key_of(number) for number in range(2000, 2100)]
        site.tier.store(*gone, *(key_of(number) for number in range(3000, 3100)))
        for key in gone:
            site.tier.remove(key)
        await asyncio.sleep(0.05)
        site.tier.remove(KEPT[7])
        site.readers.accepts.set()
        await site.wait_for_readers()
        assert max(site.readers.stored.values()) == 1


async def test_many_topics_begin_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant opens sessions with many addresses at once. Other tasks run between the topics."""
    turns = 0
    begun: list[int] = []

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(publisher_module._log, "info", lambda *_, **__: begun.append(turns))
    async with publishing() as site:
        counting = asyncio.create_task(count())
        site.engines = [f"{number}:1" for number in range(64)]
        await async_wait_until(lambda: len(begun) == 64)
        counting.cancel()
    assert len(set(begun)) == 64


async def test_the_blocks_of_a_topic_that_ends_are_removed_first() -> None:
    """B6.10 For a reader that ignores topics, the new topic of an engine has the blocks again."""
    async with publishing() as site:
        site.tier.store(*KEPT)
        site.engines = ["a:1"]
        await site.wait_for_readers()
        mixed: list[int] = []
        site.readers.on_message = lambda: mixed.append(min(len(site.known("a:1")), len(site.known("b:1"))))
        site.engines = ["b:1"]
        await site.wait_for_readers()
        assert set(mixed) == {0}


async def test_an_engine_that_comes_back_while_its_topic_ends() -> None:
    """B6.10 Each block is removed and stored again, or neither."""
    async with publishing() as site:
        site.tier.store(*KEPT)
        site.engines = ["a:1"]
        await site.wait_for_readers()
        site.engines = []
        await async_wait_until(lambda: len(site.known("a:1")) < len(KEPT))
        site.engines = ["a:1"]
        await site.wait_for_readers()
        await asyncio.sleep(0.05)
        site.tier.store(key_of(5000))
        await site.wait_for_readers()


async def test_the_last_message_of_a_topic_fails() -> None:
    """B6.10 The topic does not end while its last message is being sent."""
    async with publishing() as site:
        site.tier.store(key_of(1))
        site.engines = ["a:1"]
        await site.wait_for_readers()
        site.readers.accepts.clear()
        site.engines = []
        await asyncio.sleep(0.1)
        site.readers.failures = 1
        site.readers.accepts.set()
        await async_wait_until(lambda: not site.known("a:1"))


async def test_a_message_that_fails_is_sent_again() -> None:
    """B6.10 Unless its blocks have changed back meanwhile."""
    async with publishing() as site:
        site.tier.store(*KEPT)
        site.readers.failures = 3
        site.engines = ["a:1", "b:1"]
        await site.wait_for_readers()
        site.readers.failures = 2
        for key in KEPT[:40]:
            site.tier.remove(key)
        await site.wait_for_readers()
        assert max(site.readers.stored.values()) == 1
