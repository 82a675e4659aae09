"""Operations of the core in tests: performed in one piece, or step by step."""

from __future__ import annotations

import inspect
from typing import Any, Generic, TypeVar

from kvtier.tiers.core.commands import Waiter
from kvtier.tiers.core.operations import Operation, run_to_end

__all__ = ["Steps", "run_to_end"]

T = TypeVar("T")


class Steps(Generic[T]):
    """An operation that a test steps. `state` names the variable with its state."""

    def __init__(self, operation: Operation[T], state: str = "") -> None:
        self.operation = operation
        self.state: Any = inspect.getgeneratorlocals(operation)[state] if state else None
        self.waiter: Waiter | None = None
        """What the operation waits for."""
        self._result: tuple[T] | None = None
        self._has_begun = False

    @property
    def answer(self) -> T:
        assert self._result is not None, "the operation has not ended"
        return self._result[0]

    def step(self, now: float = 0.0) -> bool:
        """Runs to the next `yield`; returns whether the operation continues."""
        begun, self._has_begun = self._has_begun, True
        try:
            self.waiter = self.operation.send(now) if begun else next(self.operation)
        except StopIteration as end:
            self._result, self.waiter = (end.value,), None
            return False
        return True

    def finish(self, now: float = 0.0) -> T:
        while self.step(now):
            pass
        return self.answer
