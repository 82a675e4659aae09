"""Tier `peers`: loads blocks that were located at another server into the CPU tier.

The core treats such a load as a promotion. So calls that want the same block share one load, the
block's slots are pinned until the load has ended, and a failed load is a miss.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...client.errors import KVTierError, LeaseLost
from ...protos.wire.part_digests import part_digest
from ...tiers.core.pin_budget import affordable
from ...tiers.negotiation import RequestInfo
from ...tiers.remote.circuit_breaker import CircuitBreaker
from ...tiers.secondary_tier import BlockBytes, Entry, Medium, NamespaceId, OffloadPolicy, Outcome, SecondaryTier, Vote
from ...tiers.types import tenant_of
from ..config.peers import PEERS_TIER
from ..telemetry.logs import get_logger
from .link import LEASE_SECONDS, PeerLease
from .pull import outcome_of

__all__ = ["PeerTier"]

_log = get_logger(__name__)

Name = tuple[NamespaceId, bytes]


@dataclass(frozen=True, slots=True)
class _Located:
    lease: PeerLease
    item: int
    nbytes: int
    until: float
    breaker: CircuitBreaker
    tenant: bytes


class PeerTier(SecondaryTier):
    """Source of located blocks. `load` runs on worker threads, all other methods on the loop."""

    type: ClassVar[str] = "peers"
    durable: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK
    local: ClassVar[bool] = False
    on_demand: ClassVar[bool] = True
    parallel_loads: ClassVar[int] = 4

    def __init__(self, deadline_seconds: float, in_flight_bytes: int) -> None:
        super().__init__(PEERS_TIER, in_flight_bytes)
        self._deadline_seconds = deadline_seconds
        self._located: dict[Name, _Located] = {}
        """Located blocks whose load has not begun, oldest first."""
        self._located_bytes = 0
        """Bytes of the located blocks, until their load has ended."""
        self._bytes_of_tenant: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def affordable(self, namespace: NamespaceId, sizes: Iterable[int]) -> int:
        """Returns how many of the leading blocks of a namespace may be located now."""
        own = self._bytes_of_tenant[tenant_of(namespace)]
        return affordable(sizes, free=self.capacity_bytes - self._located_bytes, own=own)

    def locate(
        self, lease: PeerLease, namespace: NamespaceId, bytes_of: Callable[[bytes], int], breaker: CircuitBreaker
    ) -> None:
        """Adds the blocks of a lease. `bytes_of` returns the size of a key's block."""
        self._loop = asyncio.get_running_loop()
        self.abandon(self._outdated())
        self.abandon((namespace, key) for key in lease.items)
        with self._lock:
            lease.left += len(lease.items)
            for key, item in lease.items.items():
                until = time.monotonic() + LEASE_SECONDS
                located = _Located(lease, item, bytes_of(key), until, breaker, tenant_of(namespace))
                self._located[namespace, key] = located
                self._located_bytes += located.nbytes
                self._bytes_of_tenant[located.tenant] += located.nbytes

    def abandon(self, names: Iterable[Name]) -> None:
        """Drops located blocks whose load has not begun."""
        names = list(names)
        with self._lock:
            dropped = [found for name in names if (found := self._located.pop(name, None)) is not None]
        self._end(dropped)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        with self._lock:
            found = [self._located.pop((block.namespace, block.key), None) for block in blocks]
        by_lease: defaultdict[PeerLease, list[int]] = defaultdict(list)
        for number, located in enumerate(found):
            if located is not None:
                by_lease[located.lease].append(number)
        outcomes = [Outcome.MISSING] * len(blocks)
        for lease, numbers in by_lease.items():
            wanted = [located for number in numbers if (located := found[number]) is not None]
            try:
                pulled = self._pull(lease, wanted, [blocks[number] for number in numbers])
            finally:
                self._end(wanted)
            for number, outcome in zip(numbers, pulled, strict=True):
                outcomes[number] = outcome
        return outcomes

    def on_new_request(self, request: RequestInfo) -> Vote:
        return Vote(OffloadPolicy.BLOCK_LEVEL, "nothing is stored at other servers")

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Stores nothing. The core stores no blocks in a tier that is `on_demand`."""
        return [Outcome.FAILED] * len(blocks)

    def remove(self, keys: Sequence[Name]) -> None:
        pass

    def close(self) -> None:
        pass

    def _pull(self, lease: PeerLease, wanted: Sequence[_Located], blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Pulls blocks of one lease, rank after rank. Returns an outcome per block."""
        breaker = wanted[0].breaker
        if not breaker.permits():
            return [Outcome.FAILED] * len(blocks)
        damaged: set[int] = set()
        deadline = time.monotonic() + self._deadline_seconds
        try:
            for rank, streams in enumerate(lease.streams):
                parts = [block.parts[rank] for block in blocks]
                items = [located.item for located in wanted]
                digests = streams.pull(lease.id, items, parts, deadline - time.monotonic())
                damaged.update(_damaged(blocks, rank, digests))
            self._confirm(lease, [wanted[number].item for number in sorted(damaged)], deadline)
        except KVTierError as error:
            outcome = outcome_of(error)
            if outcome is Outcome.MISSING:
                breaker.succeeded()
            self._failed(None if outcome is Outcome.MISSING else breaker, lease, error)
            return [outcome] * len(blocks)
        except Exception as error:  # noqa: BLE001 - the other server's bytes must not fail other loads of the job
            self._failed(breaker, lease, error)
            return [Outcome.FAILED] * len(blocks)
        breaker.succeeded()
        return [Outcome.CORRUPT if number in damaged else Outcome.DONE for number in range(len(blocks))]

    def _confirm(self, lease: PeerLease, damaged: Sequence[int], deadline: float) -> None:
        """Raises `LeaseLost` if the lease ended during the pull, TimeoutError."""
        assert self._loop is not None
        answer = asyncio.run_coroutine_threadsafe(lease.link.confirm(lease, damaged), self._loop)
        try:
            confirmed = answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            answer.cancel()
            raise
        if not confirmed:
            raise LeaseLost("the lease has ended", "LEASE_NOT_FOUND")

    @staticmethod
    def _failed(breaker: CircuitBreaker | None, lease: PeerLease, error: Exception) -> None:
        if breaker is not None:
            breaker.failed(f"{type(error).__name__}: {error}")
        _log.warning("blocks not loaded from another server", server=lease.link.name, reason=f"{error}")

    def _outdated(self) -> list[Name]:
        """Returns the blocks whose lease has run out, for example after a load was given up."""
        now = time.monotonic()
        with self._lock:
            return [name for name, _ in itertools.takewhile(lambda item: item[1].until <= now, self._located.items())]

    def _end(self, ended: Sequence[_Located]) -> None:
        """Records that blocks are loaded or given up. Releases leases without further blocks."""
        released = []
        with self._lock:
            for located in ended:
                self._located_bytes -= located.nbytes
                self._bytes_of_tenant[located.tenant] -= located.nbytes
                if not self._bytes_of_tenant[located.tenant]:
                    del self._bytes_of_tenant[located.tenant]
                located.lease.left -= 1
                if not located.lease.left:
                    released.append(located.lease)
        for lease in released:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(lease.link.release, lease)


def _damaged(blocks: Sequence[BlockBytes], rank: int, digests: Sequence[int]) -> Iterator[int]:
    """Yields the positions of the blocks whose part does not match its digest."""
    for number, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
        if digest and part_digest(block.namespace, block.key, rank, block.parts[rank]) != digest:
            yield number
