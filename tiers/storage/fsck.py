"""Check of stored blocks against their checksums, in slices, offline or next to a running server.

A checkable tier has the two methods of `Checkable`. They are not part of the tier contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..base import TierError

__all__ = ["NAMESPACE_BYTES", "Checkable", "Finding", "Slice", "check"]

NAMESPACE_BYTES = 16
"""Length of the namespace at the start of a name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged block. It cannot be loaded, and its bytes are never served."""

    name: bytes
    """Namespace (16 bytes) and key; for a damaged index, the stored bytes."""
    nbytes: int
    """Size of all parts; 0 if unknown."""
    problem: str
    repaired: bool
    """Whether it was removed from the index and its space is not reused."""

    def __str__(self) -> str:
        return f"{self.name[:NAMESPACE_BYTES].hex()} {self.name[NAMESPACE_BYTES:].hex()}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Slice:
    last: bytes | None
    """The name to continue after; None at the end."""
    blocks: int
    nbytes: int
    findings: tuple[Finding, ...]


@runtime_checkable
class Checkable(Protocol):
    """A tier whose blocks can be verified."""

    name: str

    def blocks_to_check(self) -> int:
        """Returns the approximate number of blocks. Called on any thread."""
        ...

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        """Verifies the next blocks by name, a few megabytes.

        With `repair` quarantines damaged ones.

        `after` is `b""` for the first slice. Called on any thread, next to loads and one store or
        removal; takes milliseconds. A block that is stored, replaced or removed meanwhile is never
        reported.
        """
        ...


def check(tier: object, *, repair: bool) -> Iterator[Slice]:
    """Yields one slice after another. The tier may be used between two of them, but not closed.

    A server runs each step on a worker thread (`server/services/online_fsck.py`), and tells the
    core which blocks were removed by a repair.

    Raises TierError if the tier cannot be checked.
    """
    if not isinstance(tier, Checkable):
        raise TierError(f"{type(tier).__name__} has no check of its own")
    return _slices(tier, repair=repair)


def _slices(tier: Checkable, *, repair: bool) -> Iterator[Slice]:
    after: bytes | None = b""
    while after is not None:
        step = tier.check_slice(after, repair=repair)
        yield step
        after = step.last
