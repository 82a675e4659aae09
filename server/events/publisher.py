"""Publisher of events: sends what the tiers store and remove to the topics of attached engines.

A topic exists for each engine whose session declares the address of the engine. It has the blocks
of the engine's namespace. If no session of a namespace declares an address, the blocks of this
namespace are published on the topic of the server's configuration. A topic ends with its sessions.
Every block of a medium is stored once and removed once per topic. While a replay of the core's
events runs, nothing is published: readers need parents before children, also across tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from ...tiers.base import NamespaceId
from ...tiers.core.event_log import BlockEvent, EventKind
from ...tiers.negotiation import Medium
from ..config.events import EventConfig
from ..rpc.sessions import OpenSession, SessionRegistry
from ..runtime import TierRuntime
from ..telemetry.logs import get_logger
from .messages import ContentOf, MessageEncoder, PublishedEvent, parents_first
from .watch import EventWatch, WatchPhase
from .zmq_socket import ZmqSocket

__all__ = ["EventPublisher", "topic_of"]

_log = get_logger(__name__)

_BATCH_KEYS = 256
"""Maximum number of keys of a message: 35 KB with one event per block."""
_TOPICS_SECONDS = 0.5
"""Time between two looks at the open sessions."""
_RETRY_SECONDS = 1.0
_SLICE_SECONDS = 0.001
"""Pause after each slice, so that publishing never takes more than half of the event loop."""

_Topic = tuple[bytes, NamespaceId]
_Held = dict[int, set[bytes]]


def topic_of(session: OpenSession) -> bytes:
    """Returns the topic of a session, in the form that llm-d expects; empty without an address."""
    if not session.engine_address:
        return b""
    return f"kv@{session.engine_address}@{session.served_model or session.model}".encode()


class EventPublisher:
    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, config: EventConfig, socket: ZmqSocket) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._default_topic = config.topic.encode()
        self._socket = socket
        self._encoder = MessageEncoder(config)
        self._media = ["CPU", *("CPU" if tier.medium is Medium.MEMORY else "STORAGE" for tier in runtime.tiers)]
        self._held: dict[NamespaceId, _Held] = defaultdict(lambda: defaultdict(set))
        """Keys per namespace and tier: 60 bytes per block and tier beside those of the tiers."""
        self._topics: dict[_Topic, Sequence[int]] = {}
        """Current topics, with the tokens per block of each group."""
        self._is_replaying = True
        """Whether the blocks in `_held` have not been published yet."""
        self._lock = asyncio.Lock()
        """Held by the task that changes `_held` or `_topics` and publishes the change."""

    async def run(self) -> None:
        """Publishes until it is cancelled. After a failure it begins again with a replay."""
        topics = asyncio.get_running_loop().create_task(self._update_topics())
        try:
            while True:
                try:
                    await self._follow()
                except Exception as error:  # noqa: BLE001 - routers would be misled for ever
                    _log.error("publishing events failed", exc_info=error)
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            topics.cancel()

    async def _follow(self) -> None:
        watch = EventWatch(self._runtime, None, turn=_pause, check=lambda: None, lock=asyncio.Lock())
        with contextlib.closing(watch):
            async with contextlib.aclosing(watch.steps(None)) as steps:
                async for step in steps:
                    async with self._lock:
                        if step.phase is WatchPhase.BEGIN:
                            await self._forget()
                        for event in step.events:
                            changes = self._apply(event)
                            if not self._is_replaying:
                                await self._publish(event.namespace, changes)
                        if step.phase is WatchPhase.END:
                            self._is_replaying = False
                            for topic in self._topics:
                                await self._send(topic, self._all_of(topic[1], is_stored=True))

    def _apply(self, event: BlockEvent) -> list[PublishedEvent]:
        """Records an event; returns what changes in its medium."""
        held = self._held[event.namespace]
        keys, medium = held[event.tier], self._media[event.tier]
        others = [held[tier] for tier in held if tier != event.tier and self._media[tier] == medium]
        changed = list(keys) if event.kind is EventKind.CLEARED else event.keys
        if event.kind is EventKind.STORED:
            keys.update(changed)
        else:
            keys.difference_update(changed)
        changed = [key for key in changed if not any(key in other for other in others)]
        return [PublishedEvent(event.kind is EventKind.STORED, medium, changed)] if changed else []

    async def _forget(self) -> None:
        """Publishes the removal of everything, because a replay begins."""
        if not self._is_replaying:
            for namespace in list(self._held):
                await self._publish(namespace, self._all_of(namespace, is_stored=False))
        self._is_replaying = True
        self._held.clear()

    def _all_of(self, namespace: NamespaceId, *, is_stored: bool) -> Iterator[PublishedEvent]:
        """Yields one event per medium with all blocks of a namespace."""
        held = self._held.get(namespace, {})
        for medium in dict.fromkeys(self._media):
            keys = set().union(*(keys for tier, keys in held.items() if self._media[tier] == medium))
            if keys:
                yield PublishedEvent(
                    is_stored, medium, parents_first(keys, self._content_of(namespace)) if is_stored else keys
                )

    def _content_of(self, namespace: NamespaceId) -> ContentOf:
        return partial(self._runtime.core.events.contents.get, namespace)

    async def _update_topics(self) -> None:
        """Begins and ends topics, as sessions open and close."""
        while True:
            await asyncio.sleep(_TOPICS_SECONDS)
            try:
                wanted = self._wanted_topics()
                if wanted.keys() != self._topics.keys():
                    async with self._lock:
                        if not self._is_replaying:
                            await self._change_topics(wanted)
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                _log.error("topics of events failed", exc_info=error)

    def _wanted_topics(self) -> dict[_Topic, Sequence[int]]:
        sessions = [session for session in self._sessions.all() if session.groups]
        declared = {session.core.namespace.id for session in sessions if session.engine_address}
        return {
            (topic_of(session) or self._default_topic, session.core.namespace.id): [
                group.block_tokens for group in session.groups
            ]
            for session in sessions
            if session.engine_address or session.core.namespace.id not in declared
        }

    async def _change_topics(self, wanted: dict[_Topic, Sequence[int]]) -> None:
        for topic in [topic for topic in self._topics if topic not in wanted]:
            _log.info("topic of events ended", topic=topic[0].decode())
            await self._send(topic, self._all_of(topic[1], is_stored=False))
            del self._topics[topic]
        for topic in [topic for topic in wanted if topic not in self._topics]:
            _log.info("topic of events began", topic=topic[0].decode())
            self._topics[topic] = wanted[topic]
            await self._send(topic, self._all_of(topic[1], is_stored=True))

    async def _publish(self, namespace: NamespaceId, events: Iterable[PublishedEvent]) -> None:
        topics = [topic for topic in self._topics if topic[1] == namespace]
        if topics:
            events = list(events)
        for topic in topics:
            await self._send(topic, events)

    async def _send(self, topic: _Topic, events: Iterable[PublishedEvent]) -> None:
        content_of = self._content_of(topic[1])
        for event in events:
            for number, keys in enumerate(_batches(event.keys)):
                part = PublishedEvent(event.is_stored, event.medium, keys)
                payload = self._encoder.encode(part, self._topics[topic], content_of)
                if payload is not None:
                    await self._socket.send(topic[0], payload)
                if number:
                    await _pause()


def _batches(keys: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    rest = iter(keys)
    while batch := list(islice(rest, _BATCH_KEYS)):
        yield batch


async def _pause() -> None:
    await asyncio.sleep(_SLICE_SECONDS)
