"""Conversations of three turns of equal shape, and a plain engine's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scenario import BLOCK, RunEngine, assert_same, generate, tokens

__all__ = [
    "FIRST",
    "LONG",
    "MORE",
    "SAID",
    "TURNS",
    "ExpectedAnswers",
    "held_by_decode",
    "local_blocks",
    "prompt_tokens",
]

TURNS = (1, 2, 3)
FIRST, SAID, MORE = 200, 80, 40
"""Tokens of the first question, of each answer, and of each further question."""

LONG = 3000
"""Tokens of a long answer, during which a test can act."""

NAMES = (
    "kept caches",
    "emptied caches",
    "streamed",
    "chat",
    "under pressure",
    "branches",
    "decode killed",
    "decode interrupted",
    "prefill killed",
    "not decoded",
    "proxy killed",
    "server killed",
    "after the server",
    "63",
    "64",
    "shorter",
    "mixed up",
    "another one",
    "salted",
    "over",
    "nearly over",
    "not over",
    "expired",
    "left decoding",
    "left waiting",
    "left before prefill",
    "refused",
    "never published",
    *(f"at once {number}" for number in range(4)),
)


class ExpectedAnswers:
    """A plain engine's answers to each turn of these conversations. `llm`: its settings."""

    def __init__(self, run_engine: RunEngine, names: Sequence[str] = NAMES, **llm: Any) -> None:
        self._names = list(names)
        steps = [generate("1", [tokens(100 + number, FIRST) for number in range(len(names))], max_tokens=SAID)]
        for turn in TURNS[1:]:
            more = [tokens(1000 * turn + number, MORE) for number in range(len(names))]
            steps.append(generate(str(turn), more, max_tokens=SAID) | {"continues": str(turn - 1)})
        self._results = run_engine([step | {"at_once": True} for step in steps], **llm)

    def prompt(self, name: str, turn: int) -> list[int]:
        """Returns a turn's prompt: all previous questions and answers, and the next question."""
        prompt: list[int] = self._results[str(turn)]["prompts"][self._names.index(name)]
        return prompt

    def answer(self, name: str, turn: int) -> list[int]:
        answered: list[int] = self._row(name, turn)["tokens"]
        return answered

    def check(self, name: str, turn: int, answered: dict[str, Any]) -> None:
        """Asserts that a row, of any length, is a prefix of the plain engine's answer."""
        count, expected = len(answered["tokens"]), self._row(name, turn)
        begun = expected | {part: expected[part][:count] for part in ("tokens", "logprobs")}
        assert_same({"rows": [begun]}, {"name": f"{name}, turn {turn}", "rows": [answered]})

    def _row(self, name: str, turn: int) -> dict[str, Any]:
        row: dict[str, Any] = self._results[str(turn)]["rows"][self._names.index(name)]
        return row


def prompt_tokens(turn: int) -> int:
    return FIRST + (turn - 1) * (SAID + MORE)


def held_by_decode(turn: int) -> int:
    """Returns what D holds after a turn: all tokens but the answer's last, which has no KV."""
    return prompt_tokens(turn) + SAID - 1


def local_blocks(count: int) -> int:
    """Returns the tokens of a request in whole blocks, which an engine's own cache keeps."""
    return count // BLOCK * BLOCK
