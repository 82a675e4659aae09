"""Workload of conversations: a prompt contains all earlier turns and a new question."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Workload"]

FIRST_TOKEN, VOCABULARY = 4, 2048
"""Range of the model's token ids without special tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the conversations, in tokens.

    ``at_once`` conversations run at a time, in cyclic order. ``pool_blocks`` is the size of the
    engine's KV cache. The cache is too small for all conversations. So the engine evicts the blocks
    of each conversation before the next turn of that conversation.
    """

    conversations: int
    turns: int
    opening: int
    question: int
    answer: int
    at_once: int
    pool_blocks: int
    block_tokens: int = 32
    seed: int = 4

    @property
    def longest(self) -> int:
        """Number of tokens of a conversation at its end."""
        return self.opening + (self.turns - 1) * self.question + self.turns * self.answer

    def waves(self) -> Iterator[tuple[int, range]]:
        """Yields, in order, the turn (from 1) and the conversations that run together."""
        for turn in range(1, self.turns + 1):
            for first in range(0, self.conversations, self.at_once):
                yield turn, range(first, min(first + self.at_once, self.conversations))

    def said(self, conversation: int, turn: int) -> list[int]:
        """Returns the user's tokens of a turn. Equal arguments give equal tokens."""
        source = random.Random(f"{self.seed} {conversation} {turn}")
        return source.choices(range(FIRST_TOKEN, VOCABULARY), k=self.opening if turn == 1 else self.question)

    def prompt(self, conversation: int, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """Returns the prompt. ``answers`` are the answers to earlier turns."""
        tokens: list[int] = []
        for number in range(1, turn):
            tokens += [*self.said(conversation, number), *answers[number - 1]]
        return tokens + self.said(conversation, turn)


FULL = Workload(conversations=8, turns=4, opening=768, question=128, answer=24, at_once=2, pool_blocks=84)
QUICK = Workload(conversations=4, turns=3, opening=384, question=64, answer=8, at_once=2, pool_blocks=36)
