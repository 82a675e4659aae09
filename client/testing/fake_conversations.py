"""Conversations of the fake server. Retention ends only when a test ends it: there is no clock."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from google.protobuf.duration_pb2 import Duration

from ...protos.v1 import conversation_pb2 as pb
from ..effects import Call, Effect
from ..errors import error_for
from ..namespace import Namespace
from .fake_checks import keys_of
from .fake_holds import BlockName, Engine

__all__ = ["FakeBlocks", "FakeCalls", "FakeConversations"]

_MAX_CONVERSATIONS = 100
_ACTIONS = frozenset(pb.ConversationAction.values()) - {pb.CONVERSATION_ACTION_UNSPECIFIED}


@dataclass(frozen=True, slots=True)
class FakeBlocks:
    """What the conversations need of the server's blocks.

    `nbytes` returns the size of a block, 0 without a block.
    """

    nbytes: Callable[[BlockName], int]
    is_in_use: Callable[[BlockName], bool]
    drop: Callable[[BlockName], None]


@dataclass(slots=True, eq=False)
class _Conversation:
    number: int
    id: str
    prefix: bytes
    namespace: Namespace
    keys: dict[bytes, None] = field(default_factory=dict)
    latest: dict[bytes, None] = field(default_factory=dict)
    requests: int = 0
    retain_for: Duration | None = None
    pinned: bool = False


class FakeConversations:
    """Records of conversations, and the actions on their blocks.

    As on a server with a disk tier that has all blocks, DEMOTE changes each block. Unlike on a real
    server, every block may be retained.
    """

    def __init__(self, blocks: FakeBlocks) -> None:
        self._blocks = blocks
        self._by_name: dict[tuple[bytes, str], _Conversation] = {}
        """The least recently used first."""
        self._requests: dict[tuple[Engine, str], _Conversation] = {}
        self._retained: set[BlockName] = set()
        self._pinned: set[BlockName] = set()
        self._count = 0

    def retained(self) -> set[BlockName]:
        return self._retained | self._pinned

    def end_retention(self) -> None:
        """Ends the retention of all blocks that are not pinned."""
        self._retained.clear()
        for conversation in self._by_name.values():
            conversation.retain_for = None

    def begin(self, engine: Engine, request_id: str, namespace: Namespace, conversation_id: str) -> None:
        prefix = engine[1]
        name = (prefix, conversation_id)
        conversation = self._by_name.pop(name, None)
        if conversation is None:
            self._count += 1
            conversation = _Conversation(self._count, conversation_id, prefix, namespace)
        self._by_name[name] = self._requests[engine, request_id] = conversation
        conversation.latest = {}
        conversation.requests += 1

    def use(self, engine: Engine, request_id: str, keys: Iterable[bytes]) -> None:
        """Records keys that a request looks up or stores."""
        conversation = self._requests.get((engine, request_id))
        if conversation is None or (conversation.prefix, conversation.id) not in self._by_name:
            return
        for key in keys:
            conversation.keys[key] = conversation.latest[key] = None
            if conversation.pinned:
                self._pinned.add((conversation.prefix, key))
            elif conversation.retain_for is not None:
                self._retained.add((conversation.prefix, key))

    def finish(self, engine: Engine, request_id: str) -> None:
        self._requests.pop((engine, request_id), None)

    def list(self, request: pb.ListConversationsRequest) -> pb.ListConversationsResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        found = [
            each
            for each in self._by_name.values()
            if tenant in (None, each.namespace.tenant) and request.conversation_id in ("", each.id)
        ]
        most = min(request.max_conversations or _MAX_CONVERSATIONS, _MAX_CONVERSATIONS)
        found.sort(key=lambda each: -each.number)
        page = [each for each in found if not request.page or each.number < request.page]
        return pb.ListConversationsResponse(
            conversations=map(self._status, page[:most]),
            total=len(found),
            next_page=page[most - 1].number if len(page) > most else 0,
        )

    def act(self, request: pb.ActOnConversationRequest) -> pb.ActOnConversationResponse:
        if bool(request.conversation_id) + bool(request.last_key) + bool(keys_of(request)) != 1:
            raise error_for("INVALID_ARGUMENT", "give exactly one of conversation_id, last_key and keys")
        if request.action not in _ACTIONS:
            raise error_for("INVALID_ARGUMENT", f"there is no action {request.action}")
        if request.action == pb.CONVERSATION_ACTION_RETAIN and not request.HasField("retain_for"):
            raise error_for("INVALID_ARGUMENT", "retain_for is missing")
        counts: Counter[str] = Counter()
        for prefix, keys, conversation in self._targets(request):
            if conversation is not None and not self._mark(conversation, request):
                counts["kept_blocks"] += len(keys)
                continue
            outcomes = [self._act_on(request.action, (prefix, key), conversation) for key in keys]
            counts.update(outcomes)
            if conversation is not None and request.action == pb.CONVERSATION_ACTION_DELETE:
                self._forget(conversation, keys, outcomes)
        return pb.ActOnConversationResponse(**counts)

    def _targets(
        self, request: pb.ActOnConversationRequest
    ) -> Iterator[tuple[bytes, Sequence[bytes], _Conversation | None]]:
        """Yields keys by namespace; their conversation unless the caller has listed keys."""
        prefetches = request.action == pb.CONVERSATION_ACTION_PREFETCH
        own = [each for each in self._by_name.values() if each.namespace.tenant == request.tenant]
        if keys := keys_of(request):
            if len(request.namespace_id) != 32 or not request.namespace_id.startswith(_tag(request.tenant)):
                raise error_for("INVALID_ARGUMENT", f"namespace_id is no id of a namespace of {request.tenant!r}")
            if prefetches:
                raise error_for("INVALID_ARGUMENT", "a list of keys cannot be prefetched without a session")
            prefixes = {each.prefix for each in own if _id_of(each) == request.namespace_id}
            yield prefixes.pop() if prefixes else b"", list(dict.fromkeys(keys)), None
            return
        if request.conversation_id:
            found = [each for each in own if each.id == request.conversation_id]
            targets: list[Any] = [(each.prefix, list(each.latest if prefetches else each.keys), each) for each in found]
        else:
            latest = {each.prefix: each for each in own if request.last_key in each.keys}
            targets = [
                (prefix, [*takewhile(request.last_key.__ne__, each.keys), request.last_key], None)
                for prefix, each in latest.items()
            ]
        if not targets:
            name = request.conversation_id or request.last_key.hex()
            raise error_for("CONVERSATION_NOT_FOUND", f"there is no record of the conversation {name!r}")
        yield from targets

    @staticmethod
    def _mark(conversation: _Conversation, request: pb.ActOnConversationRequest) -> bool:
        """Changes the state of a conversation; returns whether its blocks may be changed, too."""
        match request.action:
            case pb.CONVERSATION_ACTION_RETAIN:
                conversation.retain_for = request.retain_for
            case pb.CONVERSATION_ACTION_PIN:
                conversation.pinned = True
            case pb.CONVERSATION_ACTION_UNPIN:
                conversation.pinned, conversation.retain_for = False, None
            case pb.CONVERSATION_ACTION_PREFETCH:
                pass
            case _ if conversation.pinned:
                return False
            case _:
                conversation.retain_for = None
        return True

    def _act_on(self, action: int, name: BlockName, conversation: _Conversation | None) -> str:
        """Changes a block; returns the field in which it counts."""
        is_pinned, is_there = name in self._pinned, bool(self._blocks.nbytes(name))
        unpins = action == pb.CONVERSATION_ACTION_UNPIN
        others = [each for each in self._others(name, conversation) if conversation is not None]
        if action in (pb.CONVERSATION_ACTION_RELEASE, pb.CONVERSATION_ACTION_UNPIN):
            if is_there and is_pinned and not unpins:
                return "kept_blocks"
            self._pinned.discard(name)
            if is_there and any(each.pinned or each.retain_for is not None for each in others):
                return "shared_blocks"
            self._retained.discard(name)
        elif action in (pb.CONVERSATION_ACTION_DEMOTE, pb.CONVERSATION_ACTION_DELETE):
            if others and (is_there or action == pb.CONVERSATION_ACTION_DELETE):
                return "shared_blocks"
            is_deleted = action == pb.CONVERSATION_ACTION_DELETE
            if is_there and (is_pinned or (is_deleted and self._blocks.is_in_use(name))):
                return "kept_blocks"
            self._retained.discard(name)
            if is_deleted:
                self._blocks.drop(name)
        elif is_there and action == pb.CONVERSATION_ACTION_PREFETCH:
            return "kept_blocks"
        elif is_there:
            (self._pinned if action == pb.CONVERSATION_ACTION_PIN else self._retained).add(name)
        return "changed_blocks" if is_there else "missing_blocks"

    def _others(self, name: BlockName, conversation: _Conversation | None) -> Iterator[_Conversation]:
        """Yields the other conversations that use a block."""
        prefix, key = name
        for each in self._by_name.values():
            if each is not conversation and each.prefix == prefix and key in each.keys:
                yield each

    def _forget(self, conversation: _Conversation, keys: Sequence[bytes], outcomes: Sequence[str]) -> None:
        """Removes the deleted keys, and a conversation of which no key is left."""
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome != "kept_blocks":
                del conversation.keys[key]
                conversation.latest.pop(key, None)
        if not conversation.keys:
            del self._by_name[conversation.prefix, conversation.id]

    def _status(self, conversation: _Conversation) -> pb.ConversationStatus:
        names = [(conversation.prefix, key) for key in conversation.keys]
        sizes = {name: nbytes for name in names if (nbytes := self._blocks.nbytes(name))}
        tier = pb.ConversationTier(
            tier="cpu",
            blocks=len(sizes),
            bytes=sum(sizes.values()),
            retained_blocks=len(sizes.keys() & self.retained()),
        )
        return pb.ConversationStatus(
            conversation_id=conversation.id,
            tenant=conversation.namespace.tenant,
            namespace_id=_id_of(conversation),
            requests=conversation.requests,
            blocks=len(conversation.keys),
            tiers=[tier],
            age=Duration(),
            idle=Duration(),
            retained_for=None if conversation.pinned else conversation.retain_for,
            pinned=conversation.pinned,
        )


class FakeCalls:
    """Transport of a client of conversations. `handle` gets a method's name and its request."""

    def __init__(self, handle: Callable[[str, Any], Any]) -> None:
        self._handle = handle

    def perform(self, effect: Effect) -> Any:
        if not isinstance(effect, Call):
            raise TypeError(f"{type(effect).__name__} needs a session")
        return self._handle(effect.method, effect.request)

    def close(self) -> None:
        pass


def _tag(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()[:16]


def _id_of(conversation: _Conversation) -> bytes:
    return _tag(conversation.namespace.tenant) + hashlib.sha256(conversation.prefix).digest()[:16]
