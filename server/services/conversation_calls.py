"""ConversationService: lists conversations, and acts on their blocks without a session."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import grpc

from ...protos.durations import duration_of
from ...protos.v1 import conversation_pb2, conversation_pb2_grpc
from ...protos.wire.packed_keys import count_keys
from ...tiers.core.call_specs import LookupSpec
from ...tiers.core.conversation_actions import ActionCounts, BlockAction
from ...tiers.core.conversations import Conversation, number_in
from ...tiers.secondary_tier import NamespaceId
from ...tiers.types import NAMESPACE_BYTES, NamespaceSpec
from ..auth.roles import CALLER, Role
from ..config.tenants import tenant_tag
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from ..telemetry.logs import get_logger
from .long_calls import LongCalls

__all__ = ["ConversationService"]

_log = get_logger(__name__)

_MAX_ACTIONS, _MAX_WAITING = 16, 256
"""Maximum number of actions of one tenant that run, and that run or wait."""
_MAX_CONVERSATIONS = 100
_PAGE_KEYS = 65_536
"""A page ends when its conversations have this number of keys, because each key is searched."""
_SHARED_TIER_SECONDS = 1.0
"""Maximum time for which a prefetch waits for the answers of shared tiers."""

_RETAIN = conversation_pb2.CONVERSATION_ACTION_RETAIN
_PREFETCH = conversation_pb2.CONVERSATION_ACTION_PREFETCH
_PIN = conversation_pb2.CONVERSATION_ACTION_PIN
_UNPIN = conversation_pb2.CONVERSATION_ACTION_UNPIN
_ACTIONS = {
    _RETAIN: BlockAction.RETAIN,
    _PIN: BlockAction.PIN,
    _UNPIN: BlockAction.UNPIN,
    conversation_pb2.CONVERSATION_ACTION_RELEASE: BlockAction.RELEASE,
    conversation_pb2.CONVERSATION_ACTION_DEMOTE: BlockAction.DEMOTE,
    conversation_pb2.CONVERSATION_ACTION_DELETE: BlockAction.DELETE,
}
_LOGGED = frozenset({_PIN, _UNPIN, conversation_pb2.CONVERSATION_ACTION_DELETE})


class ConversationService(conversation_pb2_grpc.ConversationServiceServicer):
    def __init__(
        self, runtime: TierRuntime, sessions: SessionRegistry, validator: RequestValidator, long_calls: LongCalls
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self._validator = validator
        self._tiers = [tier.name for tier in runtime.core.stats().tiers]
        self._long_calls = long_calls
        self._actions: Counter[str] = Counter()
        """Number of actions per tenant that run or wait."""
        self._permits: dict[str, asyncio.Semaphore] = {}

    async def ListConversations(
        self, request: conversation_pb2.ListConversationsRequest, context: grpc.aio.ServicerContext
    ) -> conversation_pb2.ListConversationsResponse:
        tenant = _tenant(request.tenant) if request.HasField("tenant") or not _sees_all() else None
        if tenant is not None:
            self._sessions.count_call_without_session(tenant)
        tag = None if tenant is None else tenant_tag(tenant)
        number = number_in(tag)
        most = min(request.max_conversations or _MAX_CONVERSATIONS, _MAX_CONVERSATIONS)
        if request.conversation_id:
            found = sorted(self._core.conversations_named(tag, request.conversation_id), key=number, reverse=True)
            page, total = [each for each in found if not request.page or number(each) < request.page], len(found)
        else:
            page, total = (
                self._core.page_of_conversations(tag, request.page, most + 1),
                self._core.count_conversations(tag),
            )
        answer = conversation_pb2.ListConversationsResponse(total=total)
        keys = last = 0
        for conversation in page:
            if len(answer.conversations) == most or (keys and keys + len(conversation.keys) > _PAGE_KEYS):
                answer.next_page = last
                break
            keys, last = keys + len(conversation.keys), number(conversation)
            answer.conversations.append(await self._status(conversation))
        return answer

    async def ActOnConversation(
        self, request: conversation_pb2.ActOnConversationRequest, context: grpc.aio.ServicerContext
    ) -> conversation_pb2.ActOnConversationResponse:
        self._sessions.refuse_if_draining()
        self._validator.check_keys(request.keys)
        if bool(request.conversation_id) + bool(request.last_key) + bool(count_keys(request.keys)) != 1:
            raise Refused("INVALID_ARGUMENT", "give exactly one of conversation_id, last_key and keys")
        if request.action not in (_PREFETCH, *_ACTIONS):
            raise Refused("INVALID_ARGUMENT", f"there is no action {request.action}")
        if request.action in (_PIN, _UNPIN) and Role.ADMIN not in CALLER.get().roles:
            raise Refused("PERMISSION_DENIED", f"{CALLER.get().name} must not pin or unpin: this needs the role admin")
        seconds = self._validator.retention(request.retain_for)
        if request.action == _RETAIN and not request.HasField("retain_for"):
            raise Refused("INVALID_ARGUMENT", "retain_for is missing")
        async with self._permitted(CALLER.get().tenant or request.tenant):
            if request.conversation_id:
                counts = await self._act(request, seconds)
            else:
                counts = await self._act_on_keys(request, seconds)
        if request.action in _LOGGED:
            action = conversation_pb2.ConversationAction.Name(request.action).removeprefix("CONVERSATION_ACTION_")
            name = request.conversation_id or request.last_key.hex() or f"{count_keys(request.keys)} keys"
            _log.info(
                "acted on a conversation",
                who=CALLER.get().name,
                action=action.lower(),
                conversation=name,
                blocks=counts.changed,
            )
        return conversation_pb2.ActOnConversationResponse(
            changed_blocks=counts.changed,
            shared_blocks=counts.shared,
            kept_blocks=counts.kept,
            missing_blocks=counts.missing,
        )

    async def _act(self, request: conversation_pb2.ActOnConversationRequest, seconds: float) -> ActionCounts:
        """Acts on a conversation in all its namespaces. Raises `Refused`, RetentionFull."""
        tenant = _tenant(request.tenant)
        self._sessions.count_call_without_session(tenant)
        found = self._core.conversations_named(tenant_tag(tenant), request.conversation_id)
        if not found:
            raise _unknown("conversation", request.conversation_id)
        if request.action == _PREFETCH:
            prompts = [(each.namespace, list(each.latest)) for each in found]
            return await self._prefetch(prompts, tenant, seconds)
        return await self._long_calls.run(
            None, self._core.act_on_conversations(_ACTIONS[request.action], found, seconds)
        )

    async def _act_on_keys(self, request: conversation_pb2.ActOnConversationRequest, seconds: float) -> ActionCounts:
        """Acts on a prompt or a list of keys. Raises `Refused`, InvalidKey, RetentionFull."""
        tenant = _tenant(request.tenant)
        self._sessions.count_call_without_session(tenant)
        tag = tenant_tag(tenant)
        if count_keys(request.keys):
            if len(request.namespace_id) != NAMESPACE_BYTES or not request.namespace_id.startswith(tag):
                raise Refused("INVALID_ARGUMENT", f"namespace_id is no id of a namespace of tenant {tenant!r}")
            if request.action == _PREFETCH:
                raise Refused("INVALID_ARGUMENT", "a list of keys cannot be prefetched without a session")
            targets = [
                (NamespaceId(request.namespace_id), await self._long_calls.keys(None, self._validator, request.keys))
            ]
        else:
            prompts = self._core.prompts(tag, request.last_key)
            if not prompts:
                raise _unknown("conversation with the block", request.last_key.hex())
            if request.action == _PREFETCH:
                return await self._prefetch(prompts, tenant, seconds)
            targets = [(namespace.id, keys) for namespace, keys in prompts]
        return await self._long_calls.run(None, self._core.act_on_keys(_ACTIONS[request.action], targets, seconds))

    async def _prefetch(
        self, prompts: Sequence[tuple[NamespaceSpec, list[bytes]]], tenant: str, seconds: float
    ) -> ActionCounts:
        """Promotes blocks in a session of the core alone, which ends with the call."""
        total = ActionCounts()
        for namespace, keys in prompts:
            session = self._core.open_session(secrets.token_bytes(16), "conversations", None, namespace, tenant=tenant)
            try:
                now = self._runtime.now()
                deadline = now + _SHARED_TIER_SECONDS
                query = self._core.query_shared_tiers(session, keys, prefix=False, deadline=deadline, now=now)
                await self._long_calls.run(None, query)
                options = LookupSpec(prefix=False, retain_for=seconds)
                prefetch = self._core.prefetch(session, keys, options, now=self._runtime.now())
                answer = await self._long_calls.run(None, prefetch)
            finally:
                self._core.close_session(session.id)
                self._runtime.run_commands()
            total.changed += answer.started
            total.kept += answer.present + answer.no_room
            total.missing += answer.missing + answer.unanswered
        return total

    async def _status(self, conversation: Conversation) -> conversation_pb2.ConversationStatus:
        now = self._runtime.now()
        use = await self._long_calls.run(None, self._core.use_of_conversation(conversation))
        status = conversation_pb2.ConversationStatus(
            conversation_id=conversation.id,
            tenant=conversation.tenant,
            namespace_id=conversation.namespace.id,
            requests=conversation.requests,
            blocks=len(conversation.keys),
            tiers=[
                conversation_pb2.ConversationTier(
                    tier=tier, blocks=each.blocks, bytes=each.nbytes, retained_blocks=each.retained
                )
                for tier, each in zip(self._tiers, use, strict=True)
            ],
            age=duration_of(now - conversation.created_at),
            idle=duration_of(now - conversation.used_at),
            pinned=conversation.pinned,
        )
        if conversation.retain_until > now and not conversation.pinned:
            status.retained_for.CopyFrom(duration_of(conversation.retain_until - now))
        return status

    @contextlib.asynccontextmanager
    async def _permitted(self, tenant: str) -> AsyncIterator[None]:
        """Waits until fewer than `_MAX_ACTIONS` actions of a tenant run. Raises `Refused`."""
        if self._actions[tenant] >= _MAX_WAITING:
            raise Refused("LIMIT_EXCEEDED", f"the tenant has {_MAX_WAITING} actions already, which is the maximum")
        permits = self._permits.setdefault(tenant, asyncio.Semaphore(_MAX_ACTIONS))
        self._actions[tenant] += 1
        try:
            async with permits:
                yield
        finally:
            self._actions[tenant] -= 1
            if not self._actions[tenant]:
                del self._actions[tenant], self._permits[tenant]


def _sees_all() -> bool:
    """Returns whether the caller may name any tenant."""
    caller = CALLER.get()
    return caller.tenant is None or Role.ADMIN in caller.roles


def _tenant(requested: str) -> str:
    """Returns the tenant of a call. Raises `Refused` if the caller must not name it."""
    own = CALLER.get().tenant
    if requested and requested != own and not _sees_all():
        raise Refused("WRONG_TENANT", f"the caller belongs to another tenant than {requested!r}")
    return requested or own or ""


def _unknown(what: str, name: str) -> Refused:
    return Refused(
        "CONVERSATION_NOT_FOUND", f"there is no record of the {what} {name!r}; a restart and the limits drop records"
    )
