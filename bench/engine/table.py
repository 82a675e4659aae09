"""Results as printed tables and as rows of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.measure import percentile
from bench.report import Report

from .configurations import ALONE, CONFIGURATIONS
from .results import TARGET, IdleFound, Processes, Runs, hook_microseconds, verdict
from .stores import LATER, NEW, STORE_TARGET, StoreFound

__all__ = [
    "BUSY_LOAD",
    "rows_of_idle",
    "rows_of_processes",
    "rows_of_stores",
    "rows_of_turns",
    "show_idle",
    "show_load",
    "show_processes",
    "show_stores",
    "show_turns",
]

BUSY_LOAD = 2.5
"""Load average (1 minute, two cores) above which other processes disturb the measurement."""


UNSEEN = "Compared within one engine. The cost of the connector's background threads is in both columns, so the ratio omits it."


def rows_of_turns(report: Report, found: Mapping[str, Runs | str]) -> None:
    """Adds a row per figure. Times and rates have a ratio to the engine alone."""
    for name, runs in found.items():
        if isinstance(runs, str):
            continue
        turns, (least, most) = runs.middle, runs.later_p50s
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
        for what, value in (("least", least), ("most", most)):
            report.add(f"{name}: first token, later turns, p50, {what} of {len(runs.runs)} runs", value, "ms")


def rows_of_idle(report: Report, found: Mapping[str, IdleFound]) -> None:
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


def rows_of_processes(report: Report, found: Processes) -> None:
    """Adds a row per process, and rows for the ratio of both sides."""
    for name, values in ((ALONE, found.without_ms), ("kvtier", found.with_ms)):
        for number, value in enumerate(values, 1):
            report.add(f"idle step, whole process {number}: {name}", value, "ms")
    for what, value in zip(("", " from", " to"), (found.ratio, *found.spread), strict=True):
        report.add(f"idle step, whole processes: kvtier, ratio{what}", value, "ratio")


def rows_of_stores(report: Report, found: Sequence[StoreFound]) -> None:
    """Adds the first tokens of each dead store, and their ratios to those without a store."""
    for turn in (NEW, LATER):
        of_turn = [each for each in found if each.turn == turn]
        report.add(f"first token, {turn}, p50: without a store", percentile(of_turn[0].without, 0.5), "ms")
        for each in of_turn:
            report.add(f"first token, {turn}, p50: {each.name}", percentile(each.dead, 0.5), "ms")
            for what, value in zip(("", " from", " to"), (each.ratio, *each.confidence), strict=True):
                report.add(f"first token, {turn}: {each.name}, ratio{what}", value, "ratio")


def show_stores(console: Console, found: Sequence[StoreFound]) -> None:
    """Prints a line per dead store and kind of prompts."""
    table = _table(
        (
            "first token ms, p50",
            "prompts",
            "each",
            "no store",
            "dead store",
            "ratio",
            "95 % of it",
            f"<= {STORE_TARGET}",
        )
    )
    for each in found:
        low, high = each.confidence
        table.add_row(
            each.name,
            each.turn,
            f"{len(each.dead)}",
            f"{percentile(each.without, 0.5):.0f}",
            f"{percentile(each.dead, 0.5):.0f}",
            f"{each.ratio:.3f}",
            f"{low:.3f} - {high:.3f}",
            verdict(low, high, STORE_TARGET).value,
        )
    console.print(table)


def show_load(console: Console, load: float) -> None:
    """Prints a warning if the machine was not quiet at the start."""
    if load > BUSY_LOAD:
        console.print(f"The machine was busy (load {load:.1f} at the start): do not quote these figures.")


def show_turns(console: Console, found: Mapping[str, Runs | str]) -> None:
    """Prints a line per configuration, its settings, and the reason if it did not run."""
    alone = found[ALONE]
    assert isinstance(alone, Runs)
    table = _table(
        (
            *("conversations", "runs", "first token ms\nturn 1, p50", "later turns\np50", "of runs", "p95"),
            *("times\nfaster", "of runs", "tokens/s", "times\nas many", "in all s", "hits outside\ntokens"),
            "computed\ntokens",
        )
    )
    for name, runs in found.items():
        if isinstance(runs, Runs):
            table.add_row(name, f"{len(runs.runs)}", *_cells(runs, alone))
    console.print(table)
    console.print("of runs: lowest and highest. With a single run the table cannot show the spread.")
    for configuration in CONFIGURATIONS:
        if configuration.name in found and configuration.settings:
            console.print(f"{configuration.name}: {configuration.settings}", markup=False, soft_wrap=True)
    for name, reason in found.items():
        if isinstance(reason, str):
            console.print(f"{name} does not run here: {reason}", markup=False, soft_wrap=True)


def _cells(runs: Runs, alone: Runs) -> Iterator[str]:
    turns, base, several = runs.middle, alone.middle, len(runs.runs) > 1
    yield f"{turns.first_p50_ms:.0f}"
    yield f"{turns.later_p50_ms:.0f}"
    yield "{:.0f} - {:.0f}".format(*runs.later_p50s) if several else ""
    yield f"{turns.later_p95_ms:.0f}"
    yield f"{base.later_p50_ms / turns.later_p50_ms:.1f}"
    yield "{:.1f} - {:.1f}".format(*runs.faster(alone)) if several and runs is not alone else ""
    yield f"{turns.tokens_per_second:.1f}"
    yield f"{turns.tokens_per_second / base.tokens_per_second:.2f}"
    yield f"{turns.seconds:.1f}"
    yield f"{turns.external_hits:,}"
    yield f"{turns.computed:,}"


def show_idle(console: Console, found: Mapping[str, IdleFound]) -> None:
    """Prints a line per connector and a line per batch size, with and without a server."""
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


def show_processes(console: Console, found: Processes) -> None:
    table = _table(("idle steps of whole processes", "without ms, each", "with ms, each", "ratio", "least - most"))
    sides = (", ".join(f"{value:.2f}" for value in side) for side in (found.without_ms, found.with_ms))
    table.add_row("kvtier, shm, from its start", *sides, f"{found.ratio:.4f}", "{:.4f} - {:.4f}".format(*found.spread))
    console.print(table)
    console.print(
        "These figures include background threads, and the noise between processes. No verdict depends on them."
    )


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
