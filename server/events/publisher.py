"""Publisher of events: sends what the tiers store and remove to the topics of attached engines.

A topic exists for each engine whose session declares the address of the engine. It has the blocks
of the engine's namespace. An address belongs to the first tenant that declares it. If no session of
a namespace declares an address of its tenant, the blocks of this namespace are published on the
default topic of the tenant. A topic ends with its sessions.
Every block of a medium is stored once and removed once per topic. While a replay of the core's
events runs, nothing is published, so that parents come before children in each medium.

Tenants take turns: each gets the messages of one topic per round. A topic begins only when the
tenant's other topics have little to publish, because each block of a topic that waits takes memory.

Three tasks: one reads the log and records what each topic has to publish, one begins and ends
topics, one sends. The reader never waits for the sender, because the log keeps few events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ...tiers.core.event_log import event_scope
from ...tiers.negotiation import Medium
from ...tiers.secondary_tier import NamespaceId
from ..auth.roles import Role
from ..config.events import EventConfig
from ..core_runtime import TierRuntime
from ..rpc.sessions import OpenSession, SessionRegistry
from ..telemetry.logs import get_logger
from .log_reader import EventWatch, TierBlocks, WatchPhase, pause
from .messages import MessageEncoder
from .reader_process import ReaderProcess
from .topic import Topic
from .topic_owners import MAX_ADDRESSES, TopicOwners

__all__ = ["EventPublisher", "topic_of"]

_log = get_logger(__name__)

_TOPICS_SECONDS = 0.5
"""Time between two looks at the open sessions."""
_RETRY_SECONDS = 1.0
_LOG_SECONDS = 10.0
_MAX_UNSENT = 1 << 16
"""If a tenant's topics have more blocks to publish, no topic begins or ends: 100 bytes each."""

_TopicName = tuple[bytes, NamespaceId]


def topic_of(session: OpenSession) -> bytes:
    """Returns the topic of a session, in the form that llm-d expects; empty without an address."""
    if not session.engine_address:
        return b""
    return f"kv@{session.engine_address}@{session.served_model or session.model}".encode()


class EventPublisher:
    def __init__(
        self, runtime: TierRuntime, sessions: SessionRegistry, config: EventConfig, readers: ReaderProcess
    ) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._default_topic = config.topic
        self._readers = readers
        self._owners = TopicOwners()
        self._log_at = 0.0
        self._encoder = MessageEncoder(config)
        self._held = TierBlocks(
            ["CPU", *("CPU" if tier.medium is Medium.MEMORY else "STORAGE" for tier in runtime.tiers)]
        )
        self._topics: dict[_TopicName, Topic] = {}
        self._is_replaying = True
        self._changed = asyncio.Event()
        """Set when a topic may have something to publish."""
        self._lock = asyncio.Lock()
        """Held while `_held` and what the topics have to publish change; never while sending."""

    async def run(self) -> None:
        """Publishes until it is cancelled. After a failure of the reader, a replay follows."""
        await asyncio.gather(*map(_repeat, (self._follow, self._update_topics, self._send_changes)))

    async def _follow(self) -> None:
        """Records the events of the log."""
        watch = EventWatch(self._runtime, None, turn=pause, check=lambda: None, lock=asyncio.Lock())
        with contextlib.closing(watch):
            async with contextlib.aclosing(watch.steps(None)) as steps:
                async for step in steps:
                    async with self._lock:
                        if step.phase is WatchPhase.BEGIN:
                            self._is_replaying = True
                        async for namespace, change in self._held.apply(step):
                            for (_, each), topic in self._topics.items():
                                if each == namespace and topic.is_wanted:
                                    topic.change(change)
                        if step.phase is WatchPhase.END:
                            self._is_replaying = False
                    self._changed.set()

    async def _update_topics(self) -> None:
        """Begins and ends topics, as sessions open and close."""
        while True:
            await asyncio.sleep(_TOPICS_SECONDS)
            wanted = self._wanted_topics()
            unsent: Counter[bytes] = Counter()
            for (_, namespace), topic in self._topics.items():
                unsent[event_scope(namespace)] += topic.unsent
            for name, topic in list(self._topics.items()):
                if name not in wanted:
                    if topic.is_wanted:
                        await self._switch(name, topic, unsent, is_wanted=False)
                    elif not topic.has_unsent:
                        del self._topics[name]
            for name, block_tokens in wanted.items():
                if name not in self._topics:
                    content_of = partial(self._runtime.core.content_of, name[1])
                    self._topics[name] = Topic(block_tokens, content_of)
                if not self._topics[name].is_wanted:
                    await self._switch(name, self._topics[name], unsent, is_wanted=True)

    async def _switch(self, name: _TopicName, topic: Topic, unsent: Counter[bytes], *, is_wanted: bool) -> None:
        """Begins or ends a topic: all blocks that are held are stored or removed.

        Leaves it as it is if the tenant's topics have much to publish. The next look tries again.
        `unsent`: blocks per tenant.
        """
        await pause()  # 500 topics at once took 0.2 s of the event loop
        tenant = event_scope(name[1])
        if unsent[tenant] > _MAX_UNSENT:
            return
        _log.info("topic of events began" if is_wanted else "topic of events ended", topic=name[0].decode())
        async with self._lock:
            topic.is_wanted = is_wanted
            before = topic.unsent
            async for change in self._held.all(name[1], is_stored=is_wanted):
                topic.change(change)
            unsent[tenant] += topic.unsent - before
        self._changed.set()

    def _wanted_topics(self) -> dict[_TopicName, Sequence[int]]:
        """Returns the current topics, with the tokens per block of each group."""
        sessions = [session for session in self._sessions.all() if session.groups]
        addresses = self._addresses(sessions)
        declared = {session.core.namespace.id for session in addresses}
        return {
            (
                topic_of(session) if session in addresses else self._default_topic_of(session),
                session.core.namespace.id,
            ): [group.block_tokens for group in session.groups]
            for session in sessions
            if session in addresses or session.core.namespace.id not in declared
        }

    def _addresses(self, sessions: Sequence[OpenSession]) -> set[OpenSession]:
        """Returns the sessions of engines whose address belongs to their tenant."""
        pairs = {
            session: self._owners.pair(session.engine_address, event_scope(session.core.namespace.id))
            for session in sessions
            if session.engine_address and Role.ENGINE in session.identity.roles
        }
        loop = asyncio.get_running_loop()
        owned = self._owners.update(pairs.values(), loop.time())
        topics: defaultdict[bytes, set[_TopicName]] = defaultdict(set)
        refused = []
        for session, pair in pairs.items():
            mine, name = topics[pair[1]], (topic_of(session), session.core.namespace.id)
            if pair in owned and (name in mine or len(mine) < MAX_ADDRESSES):
                mine.add(name)
            else:
                refused.append(session)
        if refused and loop.time() >= self._log_at:
            self._log_at = loop.time() + _LOG_SECONDS
            _log.warning(
                "engines are not published at their addresses: other tenants have them, they are no addresses, or the "
                "tenant has too many",
                engine=refused[0].core.engine_id,
                address=refused[0].engine_address,
                tenant=refused[0].core.tenant,
                engines=len(refused),
            )
        return pairs.keys() - set(refused)

    def _default_topic_of(self, session: OpenSession) -> bytes:
        tenant = session.core.tenant
        return (f"{self._default_topic}@{tenant}" if tenant else self._default_topic).encode()

    async def _send_changes(self) -> None:
        while True:
            self._changed.clear()
            while await self._send_round():
                pass
            await self._changed.wait()

    async def _send_round(self) -> bool:
        """Sends the next messages of one topic of each tenant; returns whether there were any.

        Topics that end come first, because some readers ignore topics: for them, the blocks of the
        ended topic would be removed after the topic that replaces it has stored them.
        """
        unsent = {name: topic for name, topic in self._topics.items() if topic.has_unsent}
        ending = {name[1] for name, topic in unsent.items() if not topic.is_wanted}
        turns: dict[bytes, _TopicName] = {}
        for name, topic in unsent.items():
            if not topic.is_wanted or name[1] not in ending:
                turns.setdefault(event_scope(name[1]), name)
        has_sent = False
        for name in turns.values():
            if name in self._topics:
                topic = self._topics[name] = self._topics.pop(name)  # last in the next round
                has_sent |= await self._send_next(*name, topic)
        return has_sent

    async def _send_next(self, name: bytes, namespace: NamespaceId, topic: Topic) -> bool:
        async with self._lock:
            unsent = [] if self._is_replaying else topic.take()
            topic.is_sending = True
        has_any = bool(unsent)
        try:
            while unsent:
                payload = self._encoder.encode(unsent[0], topic.block_tokens, topic.content_of)
                if payload is not None:
                    await self._readers.send(namespace, name, payload)
                del unsent[0]
                await pause()
        except Exception:
            for change in unsent:
                topic.change(change)
            raise
        finally:
            topic.is_sending = False
        return has_any


async def _repeat(task: Callable[[], Awaitable[None]]) -> None:
    """Runs a task without end; after a failure it begins again, or routers would be misled."""
    while True:
        try:
            await task()
        except Exception as error:  # noqa: BLE001 - the next try may succeed
            _log.error("publishing events failed", exc_info=error)
            await asyncio.sleep(_RETRY_SECONDS)
