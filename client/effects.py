"""Effects that client operations request from a transport.

An operation is a generator. It yields effects, receives the result of each, and returns the result
of the operation. The transports of the synchronous client, the asyncio client and the fake server
perform the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from ..protos.v1.transfer_pb2 import PullRequest, PushRequest
from .part_streams import PartReceiver, PartSender
from .session.session import ClientSession

__all__ = ["Call", "Connect", "Copy", "Effect", "Operation", "Performer", "Pull", "Push", "Transport"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Wait up to `timeout` seconds for the session. Result: `ClientSession`."""

    timeout: float
    patient: bool = False
    """Whether to wait for further attempts if the first attempt to connect fails."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a unary method. Result: its response."""

    method: str
    """Service and method, for example "CacheService/Lookup"."""
    request: Any
    timeout: float


@dataclass(frozen=True, slots=True)
class Push:
    """Send frames. The end of the session cancels the stream. Result: `PushResponse`."""

    session: ClientSession
    source: PartSender
    """Source of the frames, which begin at byte `start` and have at most `step` bytes each."""
    start: int
    step: int
    complete: bool
    """Whether the stream also completes the store."""
    timeout: float

    def frames(self) -> Iterator[PushRequest]:
        return self.source.frames(self.start, self.step, complete=self.complete)


@dataclass(frozen=True, slots=True)
class Pull:
    """Receive frames into `sink`. The end of the session cancels the stream. Result: None."""

    session: ClientSession
    request: PullRequest
    sink: PartReceiver
    timeout: float


@dataclass(frozen=True, slots=True)
class Copy:
    """Run a copy to its end. The asyncio client runs the copy on another thread."""

    run: Callable[[], None]


Effect: TypeAlias = Connect | Call | Push | Pull | Copy
Operation: TypeAlias = Generator[Effect, Any, T]


class Performer(Protocol):
    """Performs effects. With asyncio, both methods are coroutines."""

    def perform(self, effect: Effect) -> Any:
        """Returns the result of an effect. Raises `KVTierError`."""

    def close(self) -> Any:
        """Ends the connection, and the session if there is one."""


class Transport(Performer, Protocol):
    """Performs effects and owns the session."""

    @property
    def session(self) -> ClientSession | None:
        """The current session, if any."""

    def invalidate(self, session: ClientSession) -> None:
        """Ends a session that the server no longer knows."""

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        """Ends the lease or store that a call was granted, although its answer is not known.

        Returns at once; a background thread calls the server until it answers. The caller must have
        stopped to access the slots of the grant.
        """
