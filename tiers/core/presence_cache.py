"""What tiers answer that do not know by heart what they hold: those whose storage others write to as well."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import NamespaceId

__all__ = ["Name", "Questions"]

Name = tuple[NamespaceId, bytes]

VALID_SECONDS = 10.0
"""How long an answer is taken for the truth; whether it still is shows when the block is loaded."""
MOST_ANSWERS = 1 << 16


class Questions:
    """Names that one tier was asked about, and what it said."""

    def __init__(self) -> None:
        self._answers: dict[Name, tuple[bool, float]] = {}
        """Per name whether the tier has it, and when that was said; the oldest first."""
        self._open: set[Name] = set()
        self._new: list[Name] = []

    def knows(self, name: Name) -> bool | None:
        """Returns what the tier said, or None if it has not been asked; then it will be."""
        answer = self._answers.get(name)
        if answer is not None:
            return answer[0]
        if name not in self._open:
            self._open.add(name)
            self._new.append(name)
        return None

    def take_new(self) -> list[Name]:
        """Returns the questions that have come up since the last call."""
        new, self._new = self._new, []
        return new

    def answered(self, names: Sequence[Name], answers: Sequence[bool], now: float) -> None:
        """Takes in answers, in the order of the names; a name without an answer counts as not there."""
        for number, name in enumerate(names):
            self._open.discard(name)
            self.set(name, there=number < len(answers) and answers[number] is True, now=now)

    def set(self, name: Name, *, there: bool, now: float) -> None:
        """Takes note of what is true now."""
        self._answers.pop(name, None)
        self._answers[name] = (there, now)
        if len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def forget(self, name: Name) -> None:
        """Forgets an answer: it may have changed."""
        self._answers.pop(name, None)

    def tick(self, now: float) -> None:
        """Forgets answers that are too old."""
        while self._answers:
            name, (_, said_at) = next(iter(self._answers.items()))
            if now - said_at < VALID_SECONDS:
                return
            del self._answers[name]
