"""Client of conversations. Generated from conversation_aio.py by generate_sync.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

from ..protos.credentials import Credentials
from .effects import Operation, Performer
from .operations.conversation_actions import ConversationOperations
from .results import ConversationAction, ConversationPage, ConversationResult
from .session.fork_guard import ForkGuarded
from .transport.sync_transport import ServiceTransport, run_operation

__all__ = ["ConversationClient"]

T = TypeVar("T")


class ConversationClient(ForkGuarded):
    """Client for agents and routers: acts on the blocks of conversations.

    Engines name the conversation of a request with `conversation_id`. Each call raises a
    `KVTierError` if it fails. Any thread may use the client.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        tenant: str | None = None,
        timeout: float = 2.0,
        credentials: Credentials | None = None,
        backend: Performer | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            endpoint: `unix:PATH` or `HOST:PORT`; default: `KVTIER_ENDPOINT`, or the user's socket.
            tenant: tenant of the conversations; None: that of the credentials.
            timeout: deadline of each call, in seconds.
            credentials: certificates and token; default: `Credentials.from_environment()`.
            backend: for tests: replaces the connection to a server; see `kvtier.client.testing`.

        Raises:
            InvalidRequest: an argument is invalid, or the endpoint needs other credentials.
        """
        self._operations = ConversationOperations(tenant, timeout)
        self._transport: Performer = backend or ServiceTransport(endpoint, credentials)

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
        return self._run(
            self._operations.act(
                action,
                conversation_id,
                retain_for=retain_for,
                last_key=last_key,
                namespace_id=namespace_id,
                keys=keys,
            )
        )

    def list(self, conversation_id: str = "", *, page: int = 0, most: int = 0) -> ConversationPage:
        """Lists conversations, or those of one name. `most`: 100 if 0, which is the maximum."""
        return self._run(self._operations.list(conversation_id, page=page, most=most))

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        self._check_process()
        return run_operation(self._transport, operation)
