"""EventService: streams which blocks the tiers have stored and removed; takes their contents."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from weakref import WeakValueDictionary

import grpc

from ...protos.v1 import common_pb2, events_pb2, events_pb2_grpc
from ...protos.wire.block_contents import TOKEN_BYTES, pack_contents, unpack_contents
from ...protos.wire.packed_keys import unpack_keys
from ...tiers.core.block_contents import BlockContent
from ...tiers.core.event_log import BlockEvent, EventKind, event_scope
from ...tiers.negotiation import Medium
from ...tiers.secondary_tier import NamespaceId
from ...tiers.types import GROUP_INDEX_BYTES, EngineSession
from ..core_runtime import TierRuntime
from ..events.log_reader import EventWatch, WatchPhase, WatchStep
from ..refused import Refused
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import SliceScheduler

__all__ = ["EventService", "medium_of"]

_MAX_SESSION_STREAMS, _MAX_TENANT_STREAMS, _MAX_STREAMS = 4, 64, 1024
"""Maximum number of streams of one session, of the sessions of a tenant, and of all sessions."""
_MAX_CONTENT_BYTES = 1 << 20
"""Maximum size of the contents in a response, which waits in memory if a client does not read."""
_CONTENT_SLICE = 128
"""Keys per slice with contents. A slice has up to 127 more, so blocks of 1,024 tokens have room."""
_MAX_BLOCK_BYTES = 64 << 10
"""Maximum size of the token ids of a block: 16,384 tokens."""

_DESCRIBED = 256
"""Keys per slice of DescribeBlocks. A key takes 2 to 4 µs."""

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
    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        validator: RequestValidator,
        scheduler: SliceScheduler,
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._validator = validator
        self._sessions = sessions
        self._scheduler = scheduler
        names = [tier.name for tier in runtime.core.stats().tiers]
        media = ["CPU", *(medium_of(tier.medium) for tier in runtime.tiers)]
        self._tiers = list(zip(names, media, strict=True))
        self._streams: Counter[bytes] = Counter()
        """Number of streams per session."""
        self._tenant_streams: Counter[bytes] = Counter()
        """Number of streams per scope."""
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
        with self._counted(session, scope):
            watch = EventWatch(
                self._runtime,
                scope,
                None if request.all_namespaces else session.namespace.id,
                turn=partial(self._scheduler.turn, session),
                check=partial(self._sessions.find, request.session),
                lock=lock,
                slice_keys=_CONTENT_SLICE if request.with_contents else None,
            )
            with contextlib.closing(watch):
                steps = watch.steps(request.after.sequence if resumes else None)
                async with contextlib.aclosing(steps):
                    async for step in steps:
                        yield self._response(step, epoch, with_contents=request.with_contents)

    async def DescribeBlocks(
        self, request: events_pb2.DescribeBlocksRequest, context: grpc.aio.ServicerContext
    ) -> events_pb2.DescribeBlocksResponse:
        session = self._sessions.get(request.session)
        packed, key_bytes, contents = request.keys.keys, request.keys.key_bytes, request.contents
        self._validator.check_keys(request.keys)
        if request.keys.lengths:
            raise Refused("INVALID_KEY", "keys: the keys of one call must have one length")
        if not packed or not self._core.keeps_contents:
            return events_pb2.DescribeBlocksResponse(kept=self._core.keeps_contents)
        number = len(packed) // key_bytes
        tokens, parents = contents.token_ids, contents.parent_keys
        block_bytes = len(tokens) // number
        if block_bytes > _MAX_BLOCK_BYTES:
            raise Refused("INVALID_ARGUMENT", f"contents: a block has more than {_MAX_BLOCK_BYTES} bytes of token ids")
        if block_bytes * number != len(tokens) or len(parents.keys) != len(packed) or parents.lengths:
            raise Refused("INVALID_ARGUMENT", "contents: token_ids and parent_keys do not match the number of keys")
        groups = self._sessions.find(request.session).groups
        for start in range(0, number, _DESCRIBED):
            if number > _DESCRIBED:
                await self._scheduler.turn(session)
            end = min(start + _DESCRIBED, number)
            part = slice(start * key_bytes, end * key_bytes)
            keys = unpack_keys(packed[part], key_bytes)
            self._validator.check_groups(keys, packed[part], key_bytes, session.namespace)
            _check_tokens(keys, groups, block_bytes)
            some = events_pb2.BlockContents(
                token_ids=tokens[start * block_bytes : end * block_bytes],
                parent_keys=common_pb2.PackedKeys(keys=parents.keys[part], key_bytes=parents.key_bytes),
                lora_name=contents.lora_name,
            )
            try:
                described = unpack_contents(some, len(keys), key_bytes)
            except ValueError as error:
                raise Refused("INVALID_ARGUMENT", f"contents: {error}") from error
            for key, content in zip(keys, described, strict=True):
                self._core.describe(session.namespace.id, key, content)
        return events_pb2.DescribeBlocksResponse(kept=True)

    @contextlib.contextmanager
    def _counted(self, session: EngineSession, scope: bytes) -> Iterator[None]:
        limits = ((self._streams, session.id, _MAX_SESSION_STREAMS), (self._tenant_streams, scope, _MAX_TENANT_STREAMS))
        if self._streams.total() >= _MAX_STREAMS or any(streams[each] >= most for streams, each, most in limits):
            raise Refused("LIMIT_EXCEEDED", "the session, its tenant or the server has too many streams of events")
        for streams, each, _ in limits:
            streams[each] += 1
        try:
            yield
        finally:
            for streams, each, _ in limits:
                streams[each] -= 1
                if not streams[each]:
                    del streams[each]

    def _response(self, step: WatchStep, epoch: int, *, with_contents: bool) -> events_pb2.WatchEventsResponse:
        contents = _Contents(self._core.content_of, _MAX_CONTENT_BYTES if with_contents else 0)
        response = events_pb2.WatchEventsResponse(
            phase=_PHASES[step.phase],
            events=[part for event in step.events for part in self._messages(event, contents)],
        )
        if step.cursor is not None:
            response.cursor.epoch, response.cursor.sequence = epoch, step.cursor
        return response

    def _messages(self, event: BlockEvent, known: _Contents) -> Iterator[events_pb2.BlockEvent]:
        """Yields the messages of an event: one for each run of keys with the same `_shape`."""
        tier, medium = self._tiers[event.tier]
        is_stored = event.kind is EventKind.STORED
        blocks = [(key, known.get(event.namespace, key) if is_stored else None) for key in event.keys]
        for (length, content_bytes, _), run in groupby(blocks, _shape) if blocks else [((0, 0, ""), iter(()))]:
            keys, contents = [], []
            for key, content in run:
                keys.append(key)
                if content is not None:
                    contents.append(content)
            yield events_pb2.BlockEvent(
                kind=_KINDS[event.kind],
                namespace_id=event.namespace,
                tier=tier,
                medium=medium,
                keys=common_pb2.PackedKeys(keys=b"".join(keys), key_bytes=length),
                contents=pack_contents(contents, length) if content_bytes else None,
            )


class _Contents:
    """Contents for one response, up to a limit. The contents of further blocks are left out."""

    def __init__(self, content_of: Callable[[NamespaceId, bytes], BlockContent | None], room: int) -> None:
        self._content_of = content_of
        self._room = room

    def get(self, namespace: NamespaceId, key: bytes) -> BlockContent | None:
        content = self._content_of(namespace, key) if self._room > 0 else None
        if content is not None:
            self._room -= len(content[1]) + len(content[2])
        return content


def _shape(block: tuple[bytes, BlockContent | None]) -> tuple[int, int, str]:
    """Returns what blocks in one message must have in common."""
    key, content = block
    return (len(key), 0, "") if content is None else (len(key), len(content[1]), content[2])


def _check_tokens(keys: Sequence[bytes], groups: Sequence[common_pb2.Group], block_bytes: int) -> None:
    """Checks the size of the blocks against the namespace, unless it has too many groups."""
    for group in {int.from_bytes(key[-GROUP_INDEX_BYTES:], "big") for key in keys} if groups else ():
        if groups[group].block_tokens * TOKEN_BYTES != block_bytes:
            raise Refused(
                "INVALID_ARGUMENT",
                f"contents: {block_bytes} bytes per block, but blocks of group {group} have "
                f"{groups[group].block_tokens} tokens of {TOKEN_BYTES} bytes",
            )
