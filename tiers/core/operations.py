"""Long events of the core: an operation is a generator that its caller steps.

- The caller starts an operation with `next`, and continues it with `send(now)`. Other events may
  come between two steps. `now`: monotonic seconds.
- At a `yield` a slice ends, and all invariants of the core hold. An operation yields None if its
  next slice is due, or the `Waiter` or `Change` that it waits for.
- The operation returns its answer, the value of StopIteration.
- If a caller closes an operation, or the operation raises, the operation undoes what it has done:
  it ends the leases, stores and holds that no client will know.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

from .commands import Change, Waiter

__all__ = ["Operation", "run_to_end"]

T = TypeVar("T")

Operation: TypeAlias = Generator[Waiter | Change | None, float, T]


def run_to_end(operation: Operation[T], now: float = 0.0) -> T:
    """Performs an operation in one piece: one that is short, or if no other event comes between."""
    try:
        next(operation)
        while True:
            operation.send(now)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
