"""What was found, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from bench.report import Report

from .configurations import ALONE
from .results import TARGET, IdleFound, Turns, hook_microseconds

__all__ = ["BUSY_LOAD", "rows_of_idle", "rows_of_turns", "show_idle", "show_load", "show_turns"]

BUSY_LOAD = 2.5
"""Of the minute before the start, on the two cores this is meant for: above it, somebody else computes too."""


UNSEEN = "These steps are compared within one engine: what the connector's background threads cost is in both columns, unseen."


def rows_of_turns(report: Report, found: Mapping[str, Turns | str]) -> None:
    """Adds a row per figure; times and rates are compared with those of the engine alone."""
    for name, turns in found.items():
        if isinstance(turns, str):
            continue
        for what, value, unit in (
            ("first token, turn 1, p50", turns.first_p50_ms, "ms"),
            ("first token, later turns, p50", turns.later_p50_ms, "ms"),
            ("first token, later turns, p95", turns.later_p95_ms, "ms"),
            ("output", turns.tokens_per_second, "tokens/s"),
            ("in all", turns.seconds, "s"),
            ("hits outside of the engine", turns.external_hits, "tokens"),
            ("prompts computed", turns.computed, "tokens"),
        ):
            compared = unit != "tokens" and name != ALONE
            report.add(f"{name}: {what}", value, unit, f"{ALONE}: {what}" if compared else None)


def rows_of_idle(report: Report, found: Mapping[str, IdleFound]) -> None:
    """Adds a row per figure."""
    for name, of_name in found.items():
        alone = f"idle step, {name}: {ALONE}"
        report.add(alone, of_name.kvtier.without_ms, "ms")
        for connector, idle in (("kvtier", of_name.kvtier), ("an empty connector", of_name.empty)):
            what = f"idle step, {name}: {connector}"
            report.add(what, idle.with_ms, "ms", alone)
            report.add(f"{what}, added", idle.added_us, "us")
            report.add(f"{what}, ratio", idle.ratio, "ratio")
            report.add(f"{what}, ratio from", idle.ratio_from, "ratio")
            report.add(f"{what}, ratio to", idle.ratio_to, "ratio")
            report.add(f"{what}, undisturbed ratio", idle.undisturbed, "ratio")
        for batch, hooks in of_name.hooks.items():
            for half in ("scheduler", "worker"):
                report.add(f"hooks, {name}, {batch} requests: {half}", hook_microseconds(hooks, half), "us/step")


def show_load(console: Console, load: float) -> None:
    """Says so when the 1-minute load at the start was not that of a quiet machine."""
    if load > BUSY_LOAD:
        console.print(f"The machine was busy (load {load:.1f} at the start): these figures are not to be quoted.")


def show_turns(console: Console, found: Mapping[str, Turns | str]) -> None:
    """Prints a line per configuration, and why where one did not run."""
    alone = found[ALONE]
    assert isinstance(alone, Turns)
    table = _table(
        (
            *("conversations", "first token ms\nturn 1, p50", "later turns\np50", "p95", "times\nfaster"),
            *("tokens/s", "times\nas many", "in all s", "hits outside\ntokens", "computed\ntokens"),
        )
    )
    for name, turns in found.items():
        if isinstance(turns, Turns):
            table.add_row(
                name,
                *(f"{value:.0f}" for value in (turns.first_p50_ms, turns.later_p50_ms, turns.later_p95_ms)),
                f"{alone.later_p50_ms / turns.later_p50_ms:.2f}",
                f"{turns.tokens_per_second:.1f}",
                f"{turns.tokens_per_second / alone.tokens_per_second:.2f}",
                f"{turns.seconds:.1f}",
                *(f"{value:,}" for value in (turns.external_hits, turns.computed)),
            )
    console.print(table)
    for name, reason in found.items():
        if isinstance(reason, str):
            console.print(f"{name} does not run here: {reason}", markup=False, soft_wrap=True)


def show_idle(console: Console, found: Mapping[str, IdleFound]) -> None:
    """Prints a line per connector, and one per batch size, with and without a server."""
    table = _table(
        (
            "idle steps",
            "connector",
            "without ms",
            "with ms",
            "ratio",
            "95 % of it",
            f"<= {TARGET}",
            "undisturbed",
            "added us",
        )
    )
    for name, of_name in found.items():
        for connector, idle in (("kvtier", of_name.kvtier), ("empty", of_name.empty)):
            table.add_row(
                name,
                connector,
                f"{idle.without_ms:.2f}",
                f"{idle.with_ms:.2f}",
                f"{idle.ratio:.4f}",
                f"{idle.ratio_from:.4f} - {idle.ratio_to:.4f}",
                idle.verdict.value,
                f"{idle.undisturbed:.4f}",
                f"{idle.added_us:.0f}",
            )
    console.print(table)
    console.print(UNSEEN)
    table = _table(("kvtier's hooks, us per step", "requests", "scheduler", "worker"))
    for name, of_name in found.items():
        for batch, hooks in of_name.hooks.items():
            table.add_row(name, batch, *(f"{hook_microseconds(hooks, half):.0f}" for half in ("scheduler", "worker")))
    console.print(table)


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
