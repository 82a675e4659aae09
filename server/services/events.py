"""EventService: streams which blocks the tiers have stored and removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import groupby
from weakref import WeakValueDictionary

import grpc

from ...protos.v1 import common_pb2, events_pb2, events_pb2_grpc
from ...tiers.core.event_log import BlockEvent, EventKind, event_scope
from ...tiers.negotiation import Medium
from ...tiers.types import EngineSession
from ..events.watch import EventWatch, WatchPhase, WatchStep
from ..refused import Refused
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import SliceScheduler
from ..runtime import TierRuntime

__all__ = ["EventService", "medium_of"]

_MAX_SESSION_STREAMS, _MAX_STREAMS = 4, 1024
"""Maximum number of streams of one session, and of all sessions."""

_PHASES = {
    WatchPhase.LIVE: events_pb2.REPLAY_PHASE_UNSPECIFIED,
    WatchPhase.BEGIN: events_pb2.REPLAY_PHASE_BEGIN,
    WatchPhase.REPLAY: events_pb2.REPLAY_PHASE_CONTINUE,
    WatchPhase.END: events_pb2.REPLAY_PHASE_END,
}
_KINDS = {
    EventKind.STORED: events_pb2.BLOCK_EVENT_KIND_STORED,
    EventKind.REMOVED: events_pb2.BLOCK_EVENT_KIND_REMOVED,
    EventKind.CLEARED: events_pb2.BLOCK_EVENT_KIND_CLEARED,
}


def medium_of(medium: Medium) -> str:
    """Returns the name of a medium in events. Routers know the names of vLLM."""
    return "CPU" if medium is Medium.MEMORY else "STORAGE"


class EventService(events_pb2_grpc.EventServiceServicer):
    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, scheduler: SliceScheduler) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._scheduler = scheduler
        names = [tier.name for tier in runtime.core.stats().tiers]
        media = ["CPU", *(medium_of(tier.medium) for tier in runtime.tiers)]
        self._tiers = list(zip(names, media, strict=True))
        self._streams: Counter[bytes] = Counter()
        """Number of streams per session."""
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks of replays, by scope. Streams have the only strong references."""

    async def WatchEvents(
        self, request: events_pb2.WatchEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[events_pb2.WatchEventsResponse]:
        session = self._sessions.get(request.session)
        epoch = self._sessions.epoch
        resumes = request.HasField("after") and request.after.epoch == epoch
        scope = event_scope(session.namespace.id)
        lock = self._locks.get(scope)
        if lock is None:
            lock = self._locks[scope] = asyncio.Lock()
        with self._counted(session):
            watch = EventWatch(
                self._runtime,
                scope,
                None if request.all_namespaces else session.namespace.id,
                turn=partial(self._scheduler.turn, session),
                check=partial(self._sessions.find, request.session),
                lock=lock,
            )
            with contextlib.closing(watch):
                steps = watch.steps(request.after.sequence if resumes else None)
                async with contextlib.aclosing(steps):
                    async for step in steps:
                        yield self._response(step, epoch)

    @contextlib.contextmanager
    def _counted(self, session: EngineSession) -> Iterator[None]:
        if self._streams[session.id] >= _MAX_SESSION_STREAMS or self._streams.total() >= _MAX_STREAMS:
            raise Refused("LIMIT_EXCEEDED", "the session or the server has too many streams of events")
        self._streams[session.id] += 1
        try:
            yield
        finally:
            self._streams[session.id] -= 1
            if not self._streams[session.id]:
                del self._streams[session.id]

    def _response(self, step: WatchStep, epoch: int) -> events_pb2.WatchEventsResponse:
        response = events_pb2.WatchEventsResponse(
            phase=_PHASES[step.phase], events=[part for event in step.events for part in self._messages(event)]
        )
        if step.cursor is not None:
            response.cursor.epoch, response.cursor.sequence = epoch, step.cursor
        return response

    def _messages(self, event: BlockEvent) -> Iterator[events_pb2.BlockEvent]:
        """Yields the messages of an event: one for each run of keys of equal length."""
        tier, medium = self._tiers[event.tier]
        for length, keys in groupby(event.keys, len) if event.keys else [(0, iter(()))]:
            yield events_pb2.BlockEvent(
                kind=_KINDS[event.kind],
                namespace_id=event.namespace,
                tier=tier,
                medium=medium,
                keys=common_pb2.PackedKeys(keys=b"".join(keys), key_bytes=length),
            )
