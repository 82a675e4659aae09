"""Effects that client operations request from a transport.

An operation is a generator: it yields effects, is sent their results and returns its own result.
Synchronous client, asyncio client and fake server each perform the same effects in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from .part_streams import PartReceiver, PartSender
from .session.session import ClientSession

__all__ = ["Call", "Connect", "Copy", "Effect", "Operation", "Pull", "Push", "Transport"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Get the session, after up to `timeout` seconds. Result: `ClientSession`."""

    timeout: float
    patient: bool = False
    """Whether to wait on after a failed attempt to connect."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a unary method. Result: its response."""

    method: str
    """Service and method, for example "CacheService/Lookup"."""
    request: Any
    timeout: float


@dataclass(frozen=True, slots=True)
class Push:
    """Send frames; cancelled when the session ends. Result: `PushResponse`."""

    session: ClientSession
    frames: Callable[[], Iterator[bytes]]
    timeout: float
    source: PartSender
    """Source of the frames: from byte `start` on, `step` bytes each."""
    start: int
    step: int
    complete: bool
    """Whether the stream also completes the store."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Receive frames and pass each to `take`; cancelled when the session ends. Result: None."""

    session: ClientSession
    request: Any
    take: Callable[[bytes], None]
    timeout: float
    sink: PartReceiver
    """Owner of `take`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Run a copy to its end, off the event loop if there is one. Result: None."""

    run: Callable[[], None]


Effect: TypeAlias = Connect | Call | Push | Pull | Copy
Operation: TypeAlias = Generator[Effect, Any, T]


class Transport(Protocol):
    """Performs effects and owns the session. With asyncio, `perform` and `close` are coroutines."""

    @property
    def session(self) -> ClientSession | None:
        """The current session, if any."""

    def perform(self, effect: Effect) -> Any:
        """Returns the result of an effect. Raises `KVTierError`."""

    def invalidate(self, session: ClientSession) -> None:
        """Ends a session that the server no longer knows."""

    def close(self) -> Any:
        """Ends the session."""
