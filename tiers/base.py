"""The contract of a secondary tier.

A tier says where its bytes are and moves batches of blocks; it does not decide. What is stored, promoted and evicted, and
when, is decided by the core (`manager.TierManager`), which keeps its own catalog of every tier. A tier therefore needs no
locks of its own beyond what its storage engine wants, and no policy.

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
    """A tier cannot do what it was asked to do; the message is for people."""


class TierOpenError(TierError):
    """A tier cannot be opened: its directory is in use, not writable, or of a newer format."""


class TierDamagedError(TierOpenError):
    """What a tier keeps is damaged as a whole, and was to be left as it is."""


class TierInUseError(TierOpenError):
    """Another process, a server most likely, has the tier's directory."""


class Outcome(enum.Enum):
    """What became of one block of a job."""

    DONE = "done"
    """Stored (and as durable as the tier declares) or loaded (and its checksum verified)."""
    MISSING = "missing"
    """A load found nothing under this key."""
    CORRUPT = "corrupt"
    """A load found bytes that are not what was stored. The tier no longer holds the block."""
    NO_SPACE = "no_space"
    """The storage is full in spite of the capacity the core kept to (the disk is shared, say)."""
    FAILED = "failed"
    """The storage reported an error; `SecondaryTier.trouble` says which."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """One block and where its bytes are: one contiguous view of the host region per rank, in rank order.

    For a store the views are what to write; for a load they are what to fill, sizes included: a tier that holds
    parts of other sizes reports `Outcome.CORRUPT`.
    """

    namespace: NamespaceId
    key: bytes
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of all parts together."""
        parts = self.parts
        return parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that a tier holds: its name and the bytes of all its parts together."""

    namespace: NamespaceId
    key: bytes
    nbytes: int


class SecondaryTier(ABC):
    """A place for blocks under the CPU tier.

    `store`, `load`, `lookup` and `remove` are called on worker threads of the server: never more than one `store` or
    `remove` at a time, any number of `load`s and `lookup`s beside it. The core never asks for a block to be loaded, stored
    or removed while another of these runs on the same block, but in a `shared` tier, where others do so anyway: there a
    block that was evicted can be found, and asked for, until it has been removed. They do not raise for what can happen
    to data (full, damaged, missing): that is an `Outcome`. The other methods are called on the event loop, or while it
    waits, and return without doing I/O.

    A tier may be anybody's, so the server looks at what it does (`server.guard`). What it notices is in `trouble`:

    - It raises, whatever it is, or does not return one outcome for each block: all blocks of the job have failed.
    - It does not come back from a job for `limits.tier_stall` seconds: the server goes on without it until it does. At the
      server's end it gets some more seconds, and is left behind then, not closed.
    - It does not vote at once: the request goes without its vote, and so do all others as long as it thinks. After a vote
      that came late none is waited for until one has come in time again.
    - It lists what cannot be (no name, no size, more than its capacity, twice, an error in the middle): that is left out.
    - It lists a block in another size than is loaded: the block is dropped then. Till then its capacity is reckoned wrong.
    - It says that it has loaded a part, and has written nothing at its beginning, middle or end: the block is corrupt.

    What nobody notices but the tier itself: other bytes than were stored (verify: `checksum`), and a list that never ends.
    """

    type: ClassVar[str]
    """The name that the configuration chooses this tier by."""

    durable: ClassVar[bool]
    """Whether blocks survive a restart of the server."""

    medium: ClassVar[Medium] = Medium.DISK
    """What its bytes lie on; a lookup can leave media out."""

    local: ClassVar[bool] = True
    """Whether its bytes are on this host; a lookup can leave the others out."""

    shared: ClassVar[bool] = False
    """Whether others than this server write to its storage: then it is asked (`lookup`) for what the core does not know of."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        """`capacity_bytes` is what the core lets the blocks here add up to (`Entry.nbytes`)."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.last_error: str | None = None
        """What is wrong, for people; None when all is well. Set by the tier, read by health and metrics."""
        self.rules: Sequence[Rule] = DEFAULT_RULES
        """How it is configured to vote; what becomes of them is the tier's business (`rules.vote`)."""

    @abstractmethod
    def on_new_request(self, request: RequestInfo) -> Vote:
        """Votes on how a request is offloaded. Called once per request, before its first lookup.

        Must not block: the engine, and for a moment the event loop, wait for it.
        """

    def on_request_finished(self, request_id: str) -> None:  # noqa: B027 - nothing is a sound default
        """Takes note that no more stores come for this request. Called exactly once."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yields what the tier holds from an earlier life, oldest first. Called once, before everything else."""

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Returns for each block whether it is there. Asked of `shared` tiers only, on a worker thread; may do I/O.

        Raises:
            NotImplementedError: the tier is not shared.
        """
        raise NotImplementedError(f"{self.type} knows by heart what it holds")

    @abstractmethod
    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes blocks, replacing what was there under the same keys. Returns an outcome per block, in order.

        A block that is reported `DONE` is complete: no crash from now on may leave a part of it.
        """

    @abstractmethod
    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Fills the parts of blocks, verifying checksums. Returns an outcome per block, in order.

        The parts of a block that is not `DONE` may hold anything afterwards.
        """

    @abstractmethod
    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Forgets blocks; unknown ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Flushes and lets go of everything. Called once, last, when no job runs; not at all if one never ends.

        Has fifteen seconds: then the process ends.
        """
