"""Checks what a tier keeps against its checksums, slice by slice: all of it before a server starts, or beside its work.

A tier that can be checked has the two methods of `Checkable`; the contract of tiers does not ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..base import TierError

__all__ = ["NAMESPACE_BYTES", "Checkable", "Finding", "Slice", "check"]

NAMESPACE_BYTES = 16
"""A name begins with so many bytes of its namespace."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged block: it cannot be loaded, and nothing of it is ever handed out."""

    name: bytes
    """Namespace (16 bytes) and key; for a damaged index whatever stands there."""
    nbytes: int
    """Bytes of all parts together; 0 where that cannot be known."""
    problem: str
    """What is wrong, for people."""
    repaired: bool
    """Whether it is out of the index, and its place out of use."""

    def __str__(self) -> str:
        return f"{self.name[:NAMESPACE_BYTES].hex()} {self.name[NAMESPACE_BYTES:].hex()}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Slice:
    """What one step has checked."""

    last: bytes | None
    """The name to go on after; None at the end."""
    blocks: int
    nbytes: int
    findings: tuple[Finding, ...]


@runtime_checkable
class Checkable(Protocol):
    """A tier whose blocks can be verified."""

    name: str

    def blocks_to_check(self) -> int:
        """Returns about how many blocks there are. Called on any thread."""
        ...

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        """Verifies the next blocks by name, a few megabytes of them; with `repair` quarantines those that are damaged.

        `after` is `b""` at first. Called on any thread, beside loads and one store or removal; takes milliseconds. A
        block that is stored, replaced or removed meanwhile is never reported.
        """
        ...


def check(tier: object, *, repair: bool) -> Iterator[Slice]:
    """Yields one slice after another; between two of them anything may happen to the tier, but for its end.

    A server runs each step on a worker thread (`server.fsck_online`), and tells the core of the blocks that are no
    longer in the tier because they were repaired.

    Raises:
        TierError: the tier cannot be checked.
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
