"""Operations on conversations, which need neither a session nor a namespace."""

from __future__ import annotations

from collections.abc import Sequence

from ...protos.v1 import conversation_pb2
from ..effects import Call, Operation
from ..results import BlocksInTier, ConversationAction, ConversationInfo, ConversationPage, ConversationResult
from ..timeouts import check_seconds
from .arguments import duration, member, message, packed

__all__ = ["ConversationOperations"]


class ConversationOperations:
    """Operations of one client. `AsyncConversationClient` documents them."""

    def __init__(self, tenant: str | None, timeout: float) -> None:
        """Raises `InvalidRequest` if `timeout` is invalid."""
        check_seconds("timeout", timeout)
        self._tenant = tenant
        self._timeout = timeout

    def act(
        self,
        action: ConversationAction,
        conversation_id: str,
        *,
        retain_for: float | None,
        last_key: bytes,
        namespace_id: bytes,
        keys: Sequence[bytes],
    ) -> Operation[ConversationResult]:
        request = message(
            conversation_pb2.ActOnConversationRequest,
            tenant=self._tenant,
            action=member(ConversationAction, action, "action").value,
            conversation_id=conversation_id,
            retain_for=duration("retain_for", retain_for),
            last_key=last_key,
            namespace_id=namespace_id,
            keys=packed(keys) if keys else None,
        )
        answer = yield Call("ConversationService/ActOnConversation", request, self._timeout)
        return ConversationResult(
            answer.changed_blocks, answer.shared_blocks, answer.kept_blocks, answer.missing_blocks
        )

    def list(self, conversation_id: str, *, page: int, most: int) -> Operation[ConversationPage]:
        request = message(
            conversation_pb2.ListConversationsRequest,
            tenant=self._tenant,
            conversation_id=conversation_id,
            page=page,
            max_conversations=most,
        )
        answer = yield Call("ConversationService/ListConversations", request, self._timeout)
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
