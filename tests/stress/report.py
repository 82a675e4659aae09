"""Output for users: a live line during the run, and a table at the end."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from stress.chaos import FaultKind
from stress.orchestrator import Facts
from stress.shape import MIB
from stress.verdict import Check

__all__ = ["ledger", "live_line", "show"]

_MARKS = {True: "[green]ok", False: "[bold red]FAILED", None: "[dim]-"}


def live_line(text: str) -> None:
    """Shows the progress, on a terminal only."""
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write(f"\r{text[: width - 1]:<{width - 1}}")
        sys.stderr.flush()


def show(facts: Facts, checks: Sequence[Check], *, whole: bool) -> None:
    """Prints what happened, the failures, and the table of checks.

    Without `whole`, prints one line and the checks that failed.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for name, text in (_what_happened(facts) if whole else _in_short(facts)).items():
        console.print(f"[bold]{name}[/bold]: {text}", markup=True)
    for title, items in _examples(facts).items():
        for item in items[:10]:
            console.print(f"{title}: {item}", markup=False)
    for text, number in facts.logged_errors.items():
        console.print(f"{number} times in the server's log: {text}", markup=False)
    shown = [check for check in checks if whole or check.ok is False]
    if shown:
        console.print(_table(shown))


def ledger(rounds: Sequence[Facts]) -> str:
    """The ledger of one or several rounds in one line."""

    def total(number: Callable[[Facts], int]) -> int:
        return sum(map(number, rounds))

    return (
        f"{total(lambda facts: facts.kills)} SIGKILLs of the server "
        f"({total(lambda facts: facts.faults[FaultKind.KILL_START.value])} while it started), "
        f"{total(lambda facts: facts.deposits)} durable acknowledgements; "
        f"after starts {total(lambda facts: facts.listed)} looked for "
        f"and {total(lambda facts: facts.audited)} read back: {total(lambda facts: len(facts.wrong))} wrong, "
        f"{total(lambda facts: len(facts.unknown))} never stored, {total(lambda facts: len(facts.missing))} lost"
    )


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("check", "found", "wanted", "", "note"):
        table.add_column(column, justify="right" if column in ("found", "wanted") else "left")
    for check in checks:
        table.add_row(check.name, check.found, check.wanted, _MARKS[check.ok], f"[dim]{check.note}")
    return table


def _in_short(facts: Facts) -> dict[str, str]:
    return {f"{facts.seconds:.0f} s, {facts.plan.large} holds all blocks": ledger([facts])}


def _examples(facts: Facts) -> dict[str, Sequence[object]]:
    return {
        "wrong": facts.wrong,
        "never stored": facts.unknown,
        "lost": facts.missing,
        "failure": facts.failures,
    }


def _what_happened(facts: Facts) -> dict[str, str]:
    seconds = [run.seconds for run in facts.server_runs]
    highest = [memory / MIB for _, memory in facts.memory_by_run]
    return {
        **_in_short(facts),
        "faults": _listed(facts.faults),
        "acts": _listed(facts.counts, "act "),
        "stores": _listed(facts.counts, "store "),
        "flushes": _listed(facts.counts, "flush "),
        "errors that clients saw": _listed(facts.counts, "error "),
        "requests": _listed(facts.counts, "requests "),
        "given up": ", ".join(f"{facts.counts[w]} {w}" for w in ("cancelled", *_GIVEN_UP) if facts.counts[w]),
        "server": f"{len(seconds)} runs of {min(seconds, default=0):.0f} to {max(seconds, default=0):.0f} s; "
        f"highest own memory per run: median {median(highest or [0]):.0f}, first {highest[0] if highest else 0:.0f}, "
        f"most {max(highest, default=0):.0f} MiB",
    }


_GIVEN_UP = ("stores given up in time", "stores given up late", "leases left to expire")


def _listed(counts: Counter[str], prefix: str = "") -> str:
    chosen = {name.removeprefix(prefix): number for name, number in counts.items() if name.startswith(prefix)}
    return ", ".join(f"{number} {name}" for name, number in sorted(chosen.items(), key=lambda item: -item[1])) or "none"
