"""Tier in a store that several servers share over the network: the part that all stores have.

The store is a cache of its own: it evicts, and it limits the life of values. A server writes a
value once, never replaces it, and deletes it only if its bytes are wrong.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ..base import BlockBytes, Entry, Medium, NamespaceId, Outcome, RequestInfo, SecondaryTier, TierError, Vote
from ..negotiation import vote
from ..storage.batching import batches
from ..storage.health import TierHealth
from . import value_codec
from .limits import ByteBudget, CircuitBreaker
from .object_store import ObjectStore, StoreUnavailableError
from .value_codec import ValueCodec, is_name

__all__ = ["RemoteLimits", "RemoteTier"]

_log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Limit of the bytes of one call: 16 MiB in 250 ms are 0.5 Gbit/s."""
LOOKUP_NAMES = 1024
"""Limit of the names of one call."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Limits of a remote tier.

    Attributes:
        deadline_seconds: for each call of the store. A job ends after the first call without
            answer.
        ttl_seconds: time after which the store removes a value. A load and a repeated store start
            it again.
        in_flight_bytes: sum of the bytes of all transfers that run at the same time.
    """

    deadline_seconds: float = 0.25
    ttl_seconds: float = 7 * 86400.0
    in_flight_bytes: int = 64 << 20


class RemoteTier(SecondaryTier):
    """Tier in a remote store. A store that does not answer causes misses, never an exception."""

    durable: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK
    local: ClassVar[bool] = False
    shared: ClassVar[bool] = True
    parallel_stores: ClassVar[int] = 2
    parallel_loads: ClassVar[int] = 4

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        *,
        node: str,
        connect: Callable[[], ObjectStore],
        limits: RemoteLimits,
        codec: ValueCodec = value_codec,
    ) -> None:
        """Connects on first use, so that the server starts without the store.

        `capacity_bytes` limits the blocks that this server remembers, not the store. `node` is the
        address of the store, for messages. `connect` is called once per worker thread.
        """
        super().__init__(name, capacity_bytes)
        self._node = node
        self._connect = connect
        self._limits = limits
        self._codec = codec
        self._health = TierHealth(self)
        self._breaker = CircuitBreaker()
        self._budget = ByteBudget(limits.in_flight_bytes)
        self._window_bytes = min(WINDOW_BYTES, limits.in_flight_bytes)
        self._mine = threading.local()
        self._stores: list[ObjectStore] = []
        self._connecting = threading.Lock()

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        """Yields nothing: the list of a shared store has no bound, and lookups ask the store."""
        return iter(())

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Asks the store. If it does not answer, it has none of the blocks."""
        names = [self._codec.name_of(*name) if is_name(*name) else b"" for name in keys]
        answers: list[bool] = []
        with self._reporting("lookup"):
            for start in range(0, len(names), LOOKUP_NAMES):
                some = names[start : start + LOOKUP_NAMES]
                answers += self._call(lambda store, some=some: store.exists(some))  # type: ignore[misc]
        return [*answers, *[False] * (len(names) - len(answers))]

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes the blocks that the store lacks. After an error the rest of the job fails."""
        outcomes: list[Outcome] = []
        with self._reporting("store"):
            for window in batches(blocks, self._window_bytes):
                with self._budget.reserve(sum(map(self._codec.value_bytes, window))):
                    outcomes += self._store_window(window)
            if Outcome.NO_SPACE in outcomes:
                raise TierError(f"{self._node} is full and does not evict: see its maxmemory-policy")
        return [*outcomes, *[Outcome.FAILED] * (len(blocks) - len(outcomes))]

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Reads and verifies blocks. Deletes damaged ones. After an error the rest fails."""
        outcomes: list[Outcome] = []
        with self._reporting("load"):
            for window in batches(blocks, self._window_bytes):
                with self._budget.reserve(sum(map(self._codec.value_bytes, window))):
                    outcomes += self._load_window(window)
        return [*outcomes, *[Outcome.FAILED] * (len(blocks) - len(outcomes))]

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Does nothing, because other servers may use the blocks. The store evicts them."""

    def free_disk_bytes(self) -> None:
        """Returns None. Checks the store, so that the status is right without any traffic."""
        with self._reporting("ping"):
            self._call(lambda store: store.ping())

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _store_window(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        storable = [block for block in blocks if self._can_store(block)]
        names = {id(block): self._codec.name_of(block.namespace, block.key) for block in storable}
        there = self._call(lambda store: store.exists(list(names.values()))) if storable else []
        missing = [block for block, found in zip(storable, there, strict=True) if not found]
        known = [name for name, found in zip(names.values(), there, strict=True) if found]
        if known:
            self._call(lambda store: store.renew(known, self._limits.ttl_seconds))
        values = self._buffers(missing)
        for block, value in zip(missing, values, strict=True):
            self._codec.encode(block, value)
        new = [(names[id(block)], value) for block, value in zip(missing, values, strict=True)]
        results = self._call(lambda store: store.put(new, self._limits.ttl_seconds)) if new else []
        full = {id(block) for block, stored in zip(missing, results, strict=True) if not stored}
        return [
            Outcome.NO_SPACE if id(block) in full else Outcome.DONE if id(block) in names else Outcome.FAILED
            for block in blocks
        ]

    def _can_store(self, block: BlockBytes) -> bool:
        is_valid = is_name(block.namespace, block.key) and block.nbytes > 0
        return is_valid and self._codec.can_store(block.namespace)

    def _load_window(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        wanted = [block for block in blocks if is_name(block.namespace, block.key)]
        names = [self._codec.name_of(block.namespace, block.key) for block in wanted]
        buffers = self._buffers(wanted)
        values = self._call(lambda store: store.get(names, buffers)) if wanted else []
        loaded: dict[int, Outcome] = {}
        good: list[bytes] = []
        for block, name, value in zip(wanted, names, values, strict=True):
            outcome = Outcome.MISSING if value is None else self._codec.decode(value, block)
            if outcome is Outcome.DONE:
                good.append(name)
            elif value is not None and outcome is Outcome.CORRUPT:
                outcome = self._drop(block, name, value)
            loaded[id(block)] = outcome
        if good:
            with contextlib.suppress(TierError):  # the blocks are loaded
                self._call(lambda store: store.renew(good, self._limits.ttl_seconds))
        return [loaded.get(id(block), Outcome.MISSING) for block in blocks]

    def _drop(self, block: BlockBytes, name: bytes, value: memoryview) -> Outcome:
        """Deletes a damaged value, unless another server has replaced it meanwhile."""
        _log.warning("tier %s: block %s is corrupt and is deleted", self.name, block.key.hex())
        try:
            self._call(lambda store: store.delete_if_equal(name, value))
        except TierError:
            return Outcome.FAILED
        return Outcome.CORRUPT

    def _buffers(self, blocks: Sequence[BlockBytes]) -> list[memoryview]:
        """Returns a buffer of this thread for each value. The next call reuses the memory."""
        sizes = [self._codec.value_bytes(block) for block in blocks]
        buffer = getattr(self._mine, "buffer", b"")
        if len(buffer) < sum(sizes):
            buffer = self._mine.buffer = bytearray(sum(sizes))
        views, at = [], 0
        for size in sizes:
            views.append(memoryview(buffer)[at : at + size])
            at += size
        return views

    def _call(self, call: Callable[[ObjectStore], T]) -> T:
        """Calls the store if the breaker permits it. Raises StoreUnavailableError and others."""
        if not self._breaker.permits():
            raise StoreUnavailableError(self._breaker.reason)
        try:
            result = call(self._store_of_this_thread())
        except StoreUnavailableError as error:
            self._breaker.failed(f"{self._node}: {error}")
            raise StoreUnavailableError(self._breaker.reason) from error
        except TierError:
            self._breaker.succeeded()  # an answer, although not the desired one
            raise
        except BaseException as error:
            self._breaker.failed(f"{self._node}: {type(error).__name__}")
            raise
        self._breaker.succeeded()
        return result

    def _store_of_this_thread(self) -> ObjectStore:
        store: ObjectStore | None = getattr(self._mine, "store", None)
        if store is None:
            store = self._mine.store = self._connect()
            with self._connecting:
                self._stores.append(store)
        return store

    @contextlib.contextmanager
    def _reporting(self, operation: str) -> Iterator[None]:
        """Reports an error of the store in `last_error`, and its end; ends the operation."""
        try:
            yield
        except StoreUnavailableError as error:
            self._health.report("connection", f"{error}")
        except TierError as error:
            self._health.report(operation, f"cannot {operation}: {error}")
        else:
            self._health.report("connection", None)
            self._health.report(operation, None)
