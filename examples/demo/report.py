"""The report of a demo: its table, and the differences from the expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from processes import BLOCK_TOKENS, Result, console
from rich.table import Table

__all__ = ["conclude", "differences", "show", "wanted_tokens"]


def wanted_tokens(prompt_tokens: int) -> int:
    """Returns the tokens that a later engine must load: all full blocks without the last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def differences(results: Sequence[Result], expected: Sequence[dict[str, int]], prompt_tokens: int) -> list[str]:
    """Returns the differences from the expected tokens by tier. Empty if there are none."""
    wrong = []
    for number, (result, loaded) in enumerate(zip(results, expected, strict=True), start=1):
        if result.loaded != loaded:
            wrong.append(f"engine {number} loaded {result.loaded or 'nothing'}, expected {loaded or 'nothing'}")
        if result.computed != prompt_tokens - sum(loaded.values()):
            wrong.append(f"engine {number} computed {result.computed} tokens of the prompt")
        if result.output != results[0].output:
            wrong.append(f"the output of engine {number} differs from the output of engine 1")
    return wrong


def show(title: str, results: Sequence[Result], notes: Sequence[Mapping[str, str]], tiers: Mapping[str, str]) -> None:
    """Prints the table. `notes`: the first columns of each row. `tiers`: the columns of tiers."""
    table = Table(title=title, title_justify="left")
    for column in notes[0]:
        table.add_column(column, no_wrap=True)
    for column in ("computed", *tiers.values(), "first token", "speed-up", "same output"):
        table.add_column(column, justify="right")
    base = results[0]
    for result, note in zip(results, notes, strict=True):
        table.add_row(
            *note.values(),
            f"{result.computed:,}",
            *(f"{result.loaded.get(tier, 0):,}" for tier in tiers),
            f"{result.first_token_seconds:.2f} s",
            f"{base.first_token_seconds / result.first_token_seconds:.0f}x",
            "yes" if result.output == base.output else "NO",
        )
    console.print(table)


def conclude(wrong: Sequence[str], sentence: str) -> int:
    """Prints what is wrong, or `sentence` if nothing is. Returns the exit code."""
    for line in wrong:
        console.print(f"WRONG: {line}", style="red", markup=False)
    if not wrong:
        console.print(sentence)
    return 1 if wrong else 0
