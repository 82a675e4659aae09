"""Check of stored blocks against their checksums, in slices, offline or in a running server.

A tier that supports the check has the two methods of `Checkable`, which are not part of the tier
contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..secondary_tier import TierError
from ..types import NAMESPACE_BYTES

__all__ = ["SLICE_BLOCKS", "SLICE_BYTES", "Checkable", "Counted", "Finding", "Slice", "check"]

SLICE_BLOCKS = 256
SLICE_BYTES = 8 << 20
"""A slice of a check ends when it has this many blocks or bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged block. The server never serves it."""

    name: bytes
    """Namespace (32 bytes) and key. In a damaged index these are unchecked bytes. Empty if the
    names of the damaged blocks are unknown."""
    nbytes: int
    """Size of all parts; 0 if unknown."""
    problem: str
    repaired: bool
    """Whether the block was removed from the index and its space quarantined."""

    def __str__(self) -> str:
        if not self.name:
            return self.problem
        return f"{self.name[:NAMESPACE_BYTES].hex()} {self.name[NAMESPACE_BYTES:].hex()}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Slice:
    last: bytes | None
    """Name of the last verified block, where the next slice begins; None if no blocks are left."""
    blocks: int
    nbytes: int
    findings: tuple[Finding, ...]


@runtime_checkable
class Checkable(Protocol):
    name: str

    def blocks_to_check(self) -> int:
        """Returns the approximate number of blocks. Called on any thread."""
        ...

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        """Verifies a few megabytes of blocks: those whose names follow `after`, in this order.

        This takes milliseconds. `after` is `b""` for the first slice. With `repair`, removes
        damaged blocks from the index and quarantines their space. Called on any thread, while loads
        and one store or removal may run. Does not report a block that is stored, replaced or
        removed during the check.
        """
        ...


@runtime_checkable
class Counted(Protocol):
    """A `Checkable` tier that knows how many blocks it should have."""

    def check_count(self, *, repair: bool) -> Finding | None:
        """Returns how many stored blocks the index lacks; None if it lacks none.

        With `repair`, the index as it is becomes the new expectation. Called on any thread, after
        the last slice, while loads and one store or removal may run.
        """
        ...


def check(tier: object, *, repair: bool) -> Iterator[Slice]:
    """Checks a tier in slices and yields the result of each slice.

    The caller may use the tier between two slices, but must not close it. The server runs each
    slice on a worker thread (`server/services/online_fsck.py`), and tells the core which blocks a
    repair has removed. Raises TierError if the tier is not `Checkable`.
    """
    if not isinstance(tier, Checkable):
        raise TierError(f"{type(tier).__name__} cannot be checked: it is not Checkable")
    return _slices(tier, repair=repair)


def _slices(tier: Checkable, *, repair: bool) -> Iterator[Slice]:
    after: bytes | None = b""
    while after is not None:
        step = tier.check_slice(after, repair=repair)
        yield step
        after = step.last
    if isinstance(tier, Counted) and (finding := tier.check_count(repair=repair)):
        yield Slice(None, 0, 0, (finding,))
