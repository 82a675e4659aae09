"""Calls to the server for the pages of one host pool.

SGLang's threads make these calls: one looks up, one loads, one stores. Each call ends by the
thread's deadline (`deadlines`). A failure is logged, and the pages are misses or are not stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from ....cuda.host.copy import copy_batch
from ... import KeyStatus, KVTierError, Lease, StoreStatus, make_key
from ..failures import RateLimitedWarnings
from .config import StorageConfig
from .deadlines import COPY_SECONDS, DeadlineClient
from .found_pages import LEASE_SECONDS, FoundPages, LeasedPages
from .layout import HostPool
from .stats import TransferStats

__all__ = ["PoolLink"]

_BATCH_BYTES = 64 << 20
_FOUND = frozenset((KeyStatus.HIT, KeyStatus.HIT_PENDING))
_STORED = frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))


class PoolLink:
    """One host pool and its group of blocks in the server. Thread-safe, like the client."""

    def __init__(
        self,
        pool: HostPool,
        group: int,
        client: DeadlineClient,
        settings: StorageConfig,
        stats: TransferStats,
        log: RateLimitedWarnings,
    ) -> None:
        self._pool, self._group, self._client = pool, group, client
        self._settings, self._stats, self._log = settings, stats, log
        self._found = FoundPages()
        self._starts = [end - size for end, size in zip(accumulate(pool.pieces), pool.pieces, strict=True)]

    def find(self, hashes: Sequence[str]) -> int:
        """Returns the number of leading pages that the server has, and leases them for a load.

        Blocks that are being promoted from a lower tier count. The load waits for them.
        """
        statuses = self._lookup(hashes, prefix=True)
        return next((number for number, status in enumerate(statuses) if status not in _FOUND), len(statuses))

    def find_each(self, hashes: Sequence[str]) -> list[bool]:
        """As `find`, but returns for each page whether the server has it."""
        found = [status in _FOUND for status in self._lookup(hashes, prefix=False)]
        return found + [False] * (len(hashes) - len(found))

    def load(self, hashes: Sequence[str], indices: torch.Tensor) -> int:
        """Copies leading pages into the host pool. Returns their number.

        The content of the other pages is undefined. No copy continues after the return.
        """
        begun, loaded, pieces = time.monotonic(), 0, len(self._pool.pieces)
        try:
            addresses = self._pool.addresses(indices, len(hashes))
            leased = self._leased(self._keys(hashes))
            try:
                for first, end in self._batches(len(leased.items)):
                    # The end of the `with` block checks the lease.
                    with self._client.read(leased.lease, leased.items[first:end]) as memory:
                        slots = self._pieces(memory.address, memory.offsets)
                        copy_batch(addresses[first * pieces : end * pieces], slots, self._pool.pieces * (end - first))
                    loaded = end
            finally:
                if leased.last:
                    leased.lease.release()
        except KVTierError as error:
            self._log.warn("load", f"pages were not loaded, so the engine computes them: {error}")
        self._stats.loaded(loaded, loaded * self._pool.part_bytes, time.monotonic() - begun)
        return loaded

    def store(self, hashes: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Copies pages into the server. Returns for each page whether the server then has it."""
        begun, copied, pieces = time.monotonic(), 0, len(self._pool.pieces)
        stored: list[bool] = []
        try:
            addresses, keys = self._pool.addresses(indices, len(hashes)), self._keys(hashes)
            for first, end in self._batches(len(keys)):
                with self._client.write(keys[first:end]) as memory:
                    slots = self._pieces(memory.address, memory.offsets)
                    pages = [(first + number) * pieces for number in memory.wanted]
                    sources = [address for page in pages for address in addresses[page : page + pieces]]
                    copy_batch(slots, sources, self._pool.pieces * len(pages))
                copied += len(pages)
                stored += [status in _STORED for status in memory.statuses]
        except KVTierError as error:
            self._log.warn("store", f"pages were not stored: {error}")
        self._stats.stored(copied, copied * self._pool.part_bytes, time.monotonic() - begun)
        return stored + [False] * (len(hashes) - len(stored))

    def _keys(self, hashes: Sequence[str]) -> list[bytes]:
        return [make_key(bytes.fromhex(page), self._group) for page in hashes]

    def _lookup(self, hashes: Sequence[str], *, prefix: bool) -> bytes:
        """Returns the statuses of the first pages; of none if there is no server."""
        try:
            keys = self._keys(hashes)[: self._client.max_keys]
            lease = self._client.lookup(keys, prefix=prefix, lease=LEASE_SECONDS, slots=True)
            if KeyStatus.RETRY in lease.statuses:  # a shared tier has not answered yet
                lease.release()
                wait = self._wait(self._settings.lookup_timeout_s)
                lease = self._client.lookup(keys, prefix=prefix, lease=LEASE_SECONDS, wait=wait, slots=True)
        except KVTierError as error:
            self._log.warn("lookup", f"a lookup failed, so its pages are computed: {error}")
            return b""
        hits = {key: item for item, key in enumerate(keys) if lease.statuses[item] == KeyStatus.HIT}
        if hits:
            self._found.add(lease, hits)
        else:
            lease.release()
        return lease.statuses

    def _leased(self, keys: Sequence[bytes]) -> LeasedPages:
        """Returns the lease of an earlier lookup, or looks up again and waits for lower tiers."""
        leased = self._found.take(keys)
        if leased is not None:
            return leased
        wait = self._wait(self._settings.load_timeout_s)
        lease: Lease = self._client.lookup(keys, lease=LEASE_SECONDS + wait, wait=wait, slots=True)
        return LeasedPages(lease, range(lease.prefix_hits), last=True)

    def _wait(self, longest: float) -> float:
        """Returns the seconds to wait for tiers. Raises DeadlineExceeded."""
        return max(0.0, min(longest, self._client.deadline.left() - COPY_SECONDS))

    def _pieces(self, address: int, offsets: Sequence[int]) -> list[int]:
        """Returns the addresses of the pieces of the parts at these offsets."""
        return [address + offset + start for offset in offsets for start in self._starts]

    def _batches(self, pages: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of at most _BATCH_BYTES (or one page) and the server's maximum of keys.

        Raises DeadlineExceeded when too little time is left for the next range.
        """
        most = min(max(1, _BATCH_BYTES // self._pool.part_bytes), self._client.max_keys or pages or 1)
        for first in range(0, pages, most):
            self._client.deadline.check_copy()
            yield first, min(first + most, pages)
