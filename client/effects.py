"""What an operation asks of its wire: the one source of the sync and the asyncio client.

An operation is a generator: it yields effects, is sent their results, and returns its answer. `sync` and `aio` perform the
same effects in their own way, and so does the fake server of `testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from .part_streams import PartReceiver, PartSender
from .session.session import Session

__all__ = ["Call", "Connect", "Copy", "Effect", "Operation", "Pull", "Push"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Give me the link to the server; wait so many seconds for the first one. Result: `Session`."""

    timeout: float
    patient: bool = False
    """Whether to go on waiting when an attempt to connect has failed."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call a unary method. Result: its response."""

    method: str
    """Service and method, for example "CacheService/Lookup"."""
    request: Any
    timeout: float


@dataclass(frozen=True, slots=True)
class Push:
    """Send frames, as long as the link stands. Result: `PushResponse`."""

    link: Session
    frames: Callable[[], Iterator[bytes]]
    timeout: float
    source: PartSender
    """Where the frames come from: from byte `start` on, of `step` bytes each; `complete` is the request's."""
    start: int
    step: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for frames, as long as the link stands, and give each to `take`. Result: None."""

    link: Session
    request: Any
    take: Callable[[bytes], None]
    timeout: float
    sink: PartReceiver
    """What `take` belongs to."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Run a copy, off the event loop if there is one, and to its end whatever happens. Result: None."""

    run: Callable[[], None]


Effect: TypeAlias = Connect | Call | Push | Pull | Copy
Operation: TypeAlias = Generator[Effect, Any, T]
