"""Tier in a store that several servers share: what does not depend on how blocks are stored.

Health reports, circuit breakers, and the parts of the contract that are the same for all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import SplitResult, urlsplit

from ..negotiation import vote
from ..secondary_tier import BlockBytes, Entry, Medium, NamespaceId, RequestInfo, SecondaryTier, TierError, Vote
from ..storage.health import TierHealth
from .circuit_breaker import CircuitBreaker
from .limits import ByteBudget
from .object_store import NotAskedError, StoreUnavailableError
from .value_codec import ValueCodec, is_name

__all__ = ["NetworkTier", "RemoteLimits", "split_url"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Limits of a remote tier.

    Attributes:
        deadline_seconds: for each call of a node. A job ends at a node after the first call
            without answer.
        ttl_seconds: time after which the store removes a value. A load and a repeated store start
            it again.
        in_flight_bytes: sum of the bytes of all transfers that run at the same time.
    """

    deadline_seconds: float = 0.25
    ttl_seconds: float = 7 * 86400.0
    in_flight_bytes: int = 64 << 20


def split_url(url: str, schemes: Collection[str], refusal: str) -> SplitResult:
    """Splits a store's URL. Raises ValueError: with `refusal` for credentials and parameters."""
    parts = urlsplit(url)
    if parts.scheme not in schemes:
        raise ValueError(f"must begin with {', '.join(f'{scheme}://' for scheme in schemes)}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(refusal)
    return parts


class NetworkTier(SecondaryTier):
    """Tier in a remote store. A store that does not answer causes misses, never an exception."""

    durable: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK
    local: ClassVar[bool] = False
    shared: ClassVar[bool] = True
    parallel_stores: ClassVar[int] = 2
    parallel_loads: ClassVar[int] = 4

    def __init__(self, name: str, capacity_bytes: int, *, limits: RemoteLimits, codec: ValueCodec) -> None:
        """`capacity_bytes` limits the blocks that this server remembers, not the store."""
        super().__init__(name, capacity_bytes)
        self._limits = limits
        self._codec = codec
        self._health = TierHealth(self)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._budget = ByteBudget(limits.in_flight_bytes)

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        """Yields nothing: the list of a shared store has no bound, and lookups ask the store."""
        return iter(())

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Does nothing, because other servers may use the blocks. The store evicts them."""

    def _can_move(self, block: BlockBytes) -> bool:
        is_valid = is_name(block.namespace, block.key) and block.nbytes > 0
        return is_valid and self._codec.can_store(block.namespace)

    def _breaker_of(self, node: str) -> CircuitBreaker:
        return self._breakers.setdefault(node, CircuitBreaker())

    def _guarded(self, node: str, call: Callable[[], T]) -> T:
        """Calls a node if its breaker permits it. Raises StoreUnavailableError and others."""
        breaker = self._breaker_of(node)
        if not breaker.permits():
            raise NotAskedError(breaker.reason)
        try:
            result = call()
        except StoreUnavailableError as error:
            breaker.failed(f"{node}: {error}")
            self._health.report(f"node {node}", breaker.reason)
            raise StoreUnavailableError(breaker.reason) from error
        except TierError:
            breaker.succeeded()  # an answer, although not the desired one
            self._health.report(f"node {node}", None)
            raise
        except BaseException as error:
            breaker.failed(f"{node}: {type(error).__name__}")
            raise
        breaker.succeeded()
        self._health.report(f"node {node}", None)
        return result

    @contextlib.contextmanager
    def _reporting(self, operation: str) -> Iterator[_Refusals]:
        """Reports the errors of an operation in `last_error`, or that there are none."""
        refusals = _Refusals()
        with refusals.kept():
            yield refusals
        self._health.report(operation, f"cannot {operation}: {refusals}" if refusals.texts else None)


class _Refusals:
    """Errors of one operation, except those that the state of a node shows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lost_seconds = 0.0
        """Time of the calls that had no answer."""

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(self.texts))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Ends the `with` block at an error of the store, and keeps the error."""
        started = time.monotonic()
        try:
            yield
        except StoreUnavailableError:
            self.lost_seconds += time.monotonic() - started
        except TierError as error:
            self.texts.append(str(error))
