"""The contract of a secondary tier.

A tier stores and loads batches of blocks. The core (`core.manager.TierManager`) decides what is
stored, promoted and evicted, and keeps a catalog of every tier. So a tier needs no policy, and no
locks beyond those of its storage engine.

Every tier passes the shared contract suite, `tests/contracts/secondary_tier.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    """A tier cannot do what was requested. The message is for operators."""


class TierOpenError(TierError):
    """A tier cannot be opened: its directory is in use, not writable, or of a newer format."""


class TierDamagedError(TierOpenError):
    """The storage of a tier is damaged as a whole, and repair was not allowed."""


class TierInUseError(TierOpenError):
    """Another process, probably a server, uses the tier's directory."""


class Outcome(enum.Enum):
    """Result of a job for one block."""

    DONE = "done"
    """Stored (as durable as the tier declares), or loaded with a verified checksum."""
    MISSING = "missing"
    """The tier does not have the block."""
    CORRUPT = "corrupt"
    """The loaded bytes differ from the stored ones. The tier no longer holds the block."""
    NO_SPACE = "no_space"
    """The storage is full although the core kept to the capacity, e.g. on a shared disk."""
    FAILED = "failed"
    """The storage reported an error; see `SecondaryTier.last_error`."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """One block and its memory: one contiguous view of the host region per rank, in rank order.

    A store writes the views. A load fills them completely; if the stored parts have other sizes,
    the tier reports `Outcome.CORRUPT`.
    """

    namespace: NamespaceId
    key: bytes
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of all parts."""
        parts = self.parts
        return parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that a tier holds: its name and the size of all parts."""

    namespace: NamespaceId
    key: bytes
    nbytes: int


class SecondaryTier(ABC):
    """A storage tier below the CPU tier.

    Threads: the server calls `store`, `load`, `lookup` and `remove` on worker threads. At most one
    `store` or `remove` runs at a time, together with any number of `load`s and `lookup`s. Jobs
    never overlap on the same block, except in a `shared` tier, whose evicted blocks can be found
    until they are removed. These methods do not raise for the state of data (full, damaged,
    missing) but return an `Outcome`. All other methods are called on the event loop, or while it
    waits, and must return without I/O.

    The server checks third-party tiers (`server/tier_host/guard.py`) and reports problems in
    `last_error`:

    - The tier raises, or does not return one outcome per block: all blocks of the job have failed.
    - A job takes longer than `limits.tier_stall` seconds: the server continues without the tier
      until the job returns. A server that stops waits some more seconds, and then does not close
      the tier.
    - A vote is late: the request continues without it. After a late vote, the server does not wait
      for votes until one is in time again.
    - An entry is invalid (no name, no size, larger than the capacity, repeated): it is left out.
    - An entry's size differs from the loaded block: the block is dropped. Until then the used
      capacity is wrong.
    - A load reports `DONE` but has written nothing at the beginning, middle or end of a part: the
      block is corrupt.

    The server cannot detect loaded bytes that differ from the stored ones (verify them with
    `block_checksum`), or a list of entries that never ends.
    """

    type: ClassVar[str]
    """Name of the tier type in the configuration."""

    durable: ClassVar[bool]
    """Whether blocks survive a restart of the server."""

    medium: ClassVar[Medium] = Medium.DISK
    """Where the bytes are stored; lookups can leave out media."""

    local: ClassVar[bool] = True
    """Whether the bytes are on this host; lookups can leave out other tiers."""

    shared: ClassVar[bool] = False
    """Whether other processes write to the storage. Then `lookup` is called for blocks unknown to
    the core."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        """`capacity_bytes` limits the sum of `Entry.nbytes` of all blocks in the tier."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.last_error: str | None = None
        """Current error for operators, or None. Set by the tier; shown by health, status and
        metrics."""
        self.rules: Sequence[Rule] = DEFAULT_RULES
        """Configured voting rules, for `negotiation.vote`."""

    @abstractmethod
    def on_new_request(self, request: RequestInfo) -> Vote:
        """Votes on how a request is offloaded. Called once per request, before its first lookup.

        Must not block: the engine and the event loop wait for it.
        """

    def on_request_finished(self, request_id: str) -> None:  # noqa: B027 - nothing is a sound default
        """Called exactly once per request, when no more stores come for it."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yields the blocks of an earlier run, oldest first.

        Called once, before all other methods.
        """

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Returns for each block whether it is present.

        Called for `shared` tiers only, on a worker thread.

        May do I/O.

        Raises:
            NotImplementedError: the tier is not shared.
        """
        raise NotImplementedError(f"{self.type} is not a shared tier")

    @abstractmethod
    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes blocks, replacing those with the same keys.

        Returns one outcome per block, in order.

        A block reported as `DONE` must be complete: no later crash may leave a part of it.
        """

    @abstractmethod
    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Fills the parts of blocks and verifies checksums.

        Returns one outcome per block, in order.

        The parts of a block that is not `DONE` may contain anything afterwards.
        """

    @abstractmethod
    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Removes blocks; ignores unknown ones."""

    @abstractmethod
    def close(self) -> None:
        """Flushes and releases all resources.

        Called last, when no job runs; not called if a job never ends.

        The process ends after 15 seconds.
        """
