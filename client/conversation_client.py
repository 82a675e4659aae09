"""Clients of the server's ConversationService, which need neither a session nor a namespace."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc

from ..protos.credentials import Credentials
from ..protos.endpoint import EndpointError, client_endpoint
from ..protos.v1 import conversation_pb2, conversation_pb2_grpc
from .errors import InvalidRequest, error_from_status
from .operations.base import duration, member, message
from .session.fork_guard import ForkGuarded, fork_safe
from .timeouts import check_seconds
from .transport.grpc_methods import CHANNEL_OPTIONS

__all__ = [
    "AsyncConversationClient",
    "BlocksInTier",
    "ConversationAction",
    "ConversationClient",
    "ConversationInfo",
    "ConversationPage",
    "ConversationResult",
]


class ConversationAction(enum.IntEnum):
    """What to do with the blocks of a conversation.

    RETAIN: keep them for `retain_for` seconds, also those of later requests. RELEASE: end this.
    DEMOTE: evict them next, if a lower tier has them. PREFETCH: load those of the latest request
    into the CPU tier. PIN: keep them until UNPIN (role admin). DELETE: remove those that no other
    conversation uses from all tiers of the server.
    """

    RETAIN = conversation_pb2.CONVERSATION_ACTION_RETAIN
    RELEASE = conversation_pb2.CONVERSATION_ACTION_RELEASE
    DEMOTE = conversation_pb2.CONVERSATION_ACTION_DEMOTE
    PREFETCH = conversation_pb2.CONVERSATION_ACTION_PREFETCH
    PIN = conversation_pb2.CONVERSATION_ACTION_PIN
    UNPIN = conversation_pb2.CONVERSATION_ACTION_UNPIN
    DELETE = conversation_pb2.CONVERSATION_ACTION_DELETE


@dataclass(frozen=True, slots=True)
class ConversationResult:
    """Result of an action. Each block counts once.

    Attributes:
        changed: number of blocks that were changed in any tier, or whose loading has started.
        shared: number of blocks left alone, because another conversation uses them.
        kept: number of blocks left alone for another reason: pinned, in use, in only one tier
            (DEMOTE), beyond the tenant's retention limit, or in the CPU tier already (PREFETCH).
        missing: number of blocks that no tier has.
    """

    changed: int
    shared: int
    kept: int
    missing: int


@dataclass(frozen=True, slots=True)
class BlocksInTier:
    """Blocks of a conversation in one tier.

    Attributes:
        tier: name of the tier.
        blocks: number of blocks.
        nbytes: size of these blocks.
        retained: number of these blocks that are retained.
    """

    tier: str
    blocks: int
    nbytes: int
    retained: int


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in one namespace.

    Attributes:
        conversation_id: name of the conversation.
        tenant: its tenant.
        namespace_id: id of the namespace.
        requests: number of requests.
        blocks: number of blocks that the requests have used.
        tiers: the blocks that each tier has now, in lookup order.
        age_seconds: time since the first request.
        idle_seconds: time since the latest request.
        retained_seconds: time until the retention ends; None if it is not retained, or pinned.
        pinned: whether it is pinned.
    """

    conversation_id: str
    tenant: str
    namespace_id: bytes
    requests: int
    blocks: int
    tiers: tuple[BlocksInTier, ...]
    age_seconds: float
    idle_seconds: float
    retained_seconds: float | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class ConversationPage:
    """Some conversations, newest first.

    Attributes:
        conversations: the conversations.
        total: number of all conversations.
        next_page: the argument `page` for the next page; 0 after the last page.
    """

    conversations: tuple[ConversationInfo, ...]
    total: int
    next_page: int


class _Calls(ForkGuarded):
    """Address of a server, and the requests and results of both clients."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        tenant: str | None = None,
        timeout: float = 2.0,
        credentials: Credentials | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            endpoint: `unix:PATH` or `HOST:PORT`; default: `KVTIER_ENDPOINT`, or the user's socket.
            tenant: tenant of the conversations; None: that of the credentials.
            timeout: deadline of each call, in seconds.
            credentials: certificates and token; default: `Credentials.from_environment()`.

        Raises:
            InvalidRequest: an argument is invalid.
        """
        check_seconds("timeout", timeout)
        try:
            self._endpoint = client_endpoint(endpoint)
        except EndpointError as error:
            raise InvalidRequest(f"{error}") from error
        self._credentials = credentials or Credentials.from_environment()
        self._tenant = tenant
        self._timeout = timeout

    def _act_request(
        self,
        action: ConversationAction,
        conversation_id: str,
        retain_for: float | None,
        last_key: bytes,
        namespace_id: bytes,
        keys: Sequence[bytes],
    ) -> conversation_pb2.ActOnConversationRequest:
        return message(
            conversation_pb2.ActOnConversationRequest,
            tenant=self._tenant,
            action=member(ConversationAction, action, "action").value,
            conversation_id=conversation_id,
            retain_for=duration("retain_for", retain_for),
            last_key=last_key,
            namespace_id=namespace_id,
            keys=keys,
        )

    def _list_request(self, conversation_id: str, page: int, most: int) -> conversation_pb2.ListConversationsRequest:
        return message(
            conversation_pb2.ListConversationsRequest,
            tenant=self._tenant,
            conversation_id=conversation_id,
            page=page,
            max_conversations=most,
        )


class ConversationClient(_Calls):
    """Client for agents and routers: acts on the blocks of conversations. Any thread may use it.

    Engines name the conversation of a request with `conversation_id`. Each call raises a
    `KVTierError` if it fails.
    """

    def __init__(self, *arguments: Any, stub: Any = None, **options: Any) -> None:
        """`stub` replaces the connection to a server, for tests (`FakeServer`)."""
        super().__init__(*arguments, **options)
        self._channel = fork_safe(self._credentials.channel(self._endpoint, CHANNEL_OPTIONS)) if stub is None else None
        self._stub = stub or conversation_pb2_grpc.ConversationServiceStub(self._channel)

    def act(
        self,
        action: ConversationAction,
        conversation_id: str = "",
        *,
        retain_for: float | None = None,
        last_key: bytes = b"",
        namespace_id: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> ConversationResult:
        """Acts on a conversation, a prompt (`last_key`), or the `keys` of a namespace.

        Args:
            action: what to do.
            conversation_id: name of the conversation.
            retain_for: seconds, for RETAIN and PREFETCH, within the server's limit.
            last_key: key of the last block of a prompt: acts on all blocks up to this one.
            namespace_id: namespace of `keys`, as in `ConversationInfo.namespace_id`.
            keys: the blocks; not for PREFETCH.
        """
        request = self._act_request(action, conversation_id, retain_for, last_key, namespace_id, keys)
        return _result(self._call(self._stub.ActOnConversation, request))

    def list(self, conversation_id: str = "", *, page: int = 0, most: int = 0) -> ConversationPage:
        """Lists conversations, or those of one name. `most`: 100 if 0, which is the maximum."""
        return _page(self._call(self._stub.ListConversations, self._list_request(conversation_id, page, most)))

    def close(self) -> None:
        if self._channel is not None and not self._is_forked:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Any, request: Any) -> Any:
        self._check_process()
        try:
            return call(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise error_from_status(error.code(), error.details(), error.trailing_metadata()) from None


class AsyncConversationClient(_Calls):
    """`ConversationClient` for asyncio. Construct it on the event loop that uses it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._channel = self._credentials.aio_channel(self._endpoint, CHANNEL_OPTIONS)
        self._stub = conversation_pb2_grpc.ConversationServiceStub(self._channel)

    async def act(
        self,
        action: ConversationAction,
        conversation_id: str = "",
        *,
        retain_for: float | None = None,
        last_key: bytes = b"",
        namespace_id: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> ConversationResult:
        """The same as `ConversationClient.act`."""
        request = self._act_request(action, conversation_id, retain_for, last_key, namespace_id, keys)
        return _result(await self._call(self._stub.ActOnConversation, request))

    async def list(self, conversation_id: str = "", *, page: int = 0, most: int = 0) -> ConversationPage:
        """The same as `ConversationClient.list`."""
        return _page(await self._call(self._stub.ListConversations, self._list_request(conversation_id, page, most)))

    async def close(self) -> None:
        if not self._is_forked:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: Any, request: Any) -> Any:
        self._check_process()
        try:
            return await call(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise error_from_status(error.code(), error.details(), error.trailing_metadata()) from None


def _result(answer: conversation_pb2.ActOnConversationResponse) -> ConversationResult:
    return ConversationResult(answer.changed_blocks, answer.shared_blocks, answer.kept_blocks, answer.missing_blocks)


def _page(answer: conversation_pb2.ListConversationsResponse) -> ConversationPage:
    return ConversationPage(tuple(map(_info, answer.conversations)), answer.total, answer.next_page)


def _info(status: conversation_pb2.ConversationStatus) -> ConversationInfo:
    return ConversationInfo(
        conversation_id=status.conversation_id,
        tenant=status.tenant,
        namespace_id=status.namespace_id,
        requests=status.requests,
        blocks=status.blocks,
        tiers=tuple(BlocksInTier(each.tier, each.blocks, each.bytes, each.retained_blocks) for each in status.tiers),
        age_seconds=status.age.ToTimedelta().total_seconds(),
        idle_seconds=status.idle.ToTimedelta().total_seconds(),
        retained_seconds=status.retained_for.ToTimedelta().total_seconds() if status.HasField("retained_for") else None,
        pinned=status.pinned,
    )
