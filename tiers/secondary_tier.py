"""The contract of a secondary tier.

A tier stores and loads batches of blocks. The core (`core.manager.TierManager`) decides which
blocks a tier stores, promotes and evicts, and keeps a catalog of every tier. So a tier needs no
eviction policy, and no locks except those of its storage engine.

Every tier must pass the shared contract tests in `tests/contracts/secondary_tier.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from .negotiation import DEFAULT_RULES, Medium, NamespaceId, OffloadPolicy, RequestInfo, Rule, TierFilter, Vote

__all__ = [
    "BlockBytes",
    "Entry",
    "Medium",
    "NamespaceId",
    "OffloadPolicy",
    "Outcome",
    "RequestInfo",
    "SecondaryTier",
    "TierDamagedError",
    "TierError",
    "TierFilter",
    "TierInUseError",
    "TierOpenError",
    "Vote",
]


class TierError(Exception):
    """An operation of a tier failed. The message is for operators."""


class TierOpenError(TierError):
    """A tier cannot be opened: its directory is in use, not writable, or of a newer format."""


class TierDamagedError(TierOpenError):
    """The storage of a tier is damaged, and the caller did not allow a repair."""


class TierInUseError(TierOpenError):
    """Another process, probably a server, uses the tier's directory."""


class Outcome(enum.Enum):
    """Result of a job for one block."""

    DONE = "done"
    """A store has written the block, as durably as `SecondaryTier.durable` says. Or a load has
    filled the parts, and their checksum is correct."""
    MISSING = "missing"
    """The tier does not have the block."""
    CORRUPT = "corrupt"
    """The loaded bytes differ from the stored bytes. The tier no longer has the block."""
    NO_SPACE = "no_space"
    """The storage is full before the tier's capacity is used up, for example on a shared disk."""
    FAILED = "failed"
    """The storage reported an error; see `SecondaryTier.last_error`."""


class BlockBytes(NamedTuple):
    """One block and its memory: one contiguous view of the host region per rank, in rank order.

    A store writes the bytes of the views to the tier. A load fills the views completely. If the
    stored parts have other sizes, the tier reports `Outcome.CORRUPT`.
    """

    namespace: NamespaceId
    key: bytes
    parts: tuple[memoryview, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parts."""
        parts = self.parts
        return (parts[0].nbytes,) if len(parts) == 1 else tuple([part.nbytes for part in parts])

    @property
    def nbytes(self) -> int:
        """Total size of the parts."""
        parts = self.parts
        return parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])


class Entry(NamedTuple):
    """A stored block: name (namespace and key), and total size of the parts."""

    namespace: NamespaceId
    key: bytes
    nbytes: int


class SecondaryTier(ABC):
    """Base class of storage tiers below the CPU tier.

    Threads: the server calls `store`, `load`, `lookup`, `remove` and `free_disk_bytes` on worker
    threads. At most `parallel_stores` stores, or one `remove`, run at a time, together with any
    number of other calls. Two jobs never use the same block at the same time. The server never
    calls `remove` of a `shared` tier, because other servers may use the block: if the server evicts
    the block, it only forgets the block, and the storage must limit itself (for example by a time
    to live and by eviction). If storage is full, or a block is
    damaged or missing, `store` and `load` return an `Outcome` and do not raise. The server calls
    `entries` at its start and `close` at its end. The event loop calls all other methods or waits
    for them, so those must not do I/O.

    The server checks third-party tiers (`server/tier_host/guard.py`) and reports problems in
    `last_error`:

    - The tier raises, or does not return one outcome per block: all blocks of the job fail.
    - A job takes longer than `limits.tier_stall` seconds: the server continues without the tier
      until the job returns. When the server stops, it waits a few seconds for the job. If the job
      still runs then, the server does not close the tier.
    - A vote is late: the request continues without the vote. After that, the server does not
      wait for votes of this tier until a vote is in time again.
    - An entry is invalid (no name, no size, larger than the capacity, repeated): the server ignores
      the entry.
    - An entry's size differs from the loaded block: the server drops the block. Until this load,
      the used capacity in the status is wrong.
    - A load reports `DONE` but has written nothing at the beginning, middle or end of a part: the
      block counts as corrupt.

    The server cannot detect wrong bytes of a loaded block, so the tier must verify the bytes with
    `block_checksum`. If `entries()` never ends, the start of the server never ends either.
    """

    type: ClassVar[str]
    """Name of the tier type in the configuration."""

    durable: ClassVar[bool]
    """Whether blocks survive a restart of the server."""

    medium: ClassVar[Medium] = Medium.DISK
    """Where the bytes are stored. A lookup can exclude all tiers of one medium."""

    local: ClassVar[bool] = True
    """Whether the bytes are on this host. A lookup can exclude all tiers on other hosts."""

    shared: ClassVar[bool] = False
    """Whether other processes write to the storage. If so, the server calls `lookup` before it
    loads a block. It uses a positive answer for ten seconds, a negative one for a second."""

    on_demand: ClassVar[bool] = False
    """Whether the tier is a source on other hosts, in which the server stores nothing. It loads
    only blocks that the server has located there for a request (`SharedTierQueries.locate`)."""

    parallel_stores: ClassVar[int] = 1
    """Number of stores that the server runs at once; 1 if the tier is not `shared`."""

    parallel_loads: ClassVar[int] = 2
    """Number of loads that the server runs at once."""

    gather_bytes: int = 0
    """Smallest store that the server begins at once; at most an eighth of the region counts. A
    smaller one waits up to two seconds for more blocks, unless a request waits for it, a reset runs
    or the server stops. For storage in which small objects are slow or expensive, and which is not
    `durable`."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        """`capacity_bytes` limits the sum of `Entry.nbytes` of all blocks in the tier."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.last_error: str | None = None
        """Current error, or None. The tier sets it; health, status and metrics show it."""
        self.rules: Sequence[Rule] = DEFAULT_RULES
        """Configured voting rules, for `negotiation.vote`."""

    def use_region(  # noqa: B027 - the default does nothing
        self, pools: Sequence[tuple[int, int, int]], address: int, size_bytes: int
    ) -> None:
        """Receives the memory that has the parts of all blocks, before all other methods.

        This process has mapped the memory at `address`. It is composed of `pools`, which follow
        each other: begin, end, and the descriptor of shared memory whose first bytes are those of
        the range. All are valid until `close` returns. A tier can register the memory with a device
        or map it in a process of its own. Must not block. Tools that open a tier without a server
        do not call it.
        """

    def limitation(self) -> str | None:
        """Returns why the tier is slower on this machine than it could be, in one line.

        Must not block: the status calls it on the event loop.
        """
        return None

    @abstractmethod
    def on_new_request(self, request: RequestInfo) -> Vote:
        """Votes on the offload policy of a request. Called once, before the request's first lookup.

        Must not block: the engine and the event loop wait for the vote.
        """

    def on_request_finished(self, request_id: str) -> None:  # noqa: B027 - the default does nothing
        """Called exactly once per request, after the last store of the request."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yields the blocks of an earlier run, oldest first. Called once, before other methods."""

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Returns for each block whether it is present.

        Called on a worker thread, only if the tier is `shared`. May do I/O. Raises
        NotImplementedError if the tier is not `shared`.
        """
        raise NotImplementedError(f"{self.type} is not a shared tier")

    @abstractmethod
    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes blocks, and replaces stored blocks with the same keys.

        A `shared` tier may keep a stored block instead, because blocks with the same key are equal.
        Returns one outcome per block, in order. After a crash during a store, the tier must have
        each block completely or not at all.
        """

    @abstractmethod
    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Fills the parts of blocks and verifies checksums.

        Returns one outcome per block, in order. If a block's outcome is not `DONE`, the content of
        its parts is undefined.
        """

    @abstractmethod
    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Removes blocks; ignores unknown ones."""

    def free_disk_bytes(self) -> int | None:
        """Returns the free bytes of the tier's disk, for the status; None if unknown.

        Called every ten seconds on a worker thread. May do I/O.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Flushes and releases all resources.

        Called last, when no job runs; not called if a job never ends. Must return within 15
        seconds, because the process ends after this time.
        """
