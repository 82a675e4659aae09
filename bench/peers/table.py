"""Results of the comparison as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import percentile, rate

from .child import BATCH
from .runner import Column

__all__ = ["Line", "as_json", "lines", "show"]

Line = tuple[str, str, list[tuple[float, float | None] | None]]
"""Row of the table: name, unit, and per column a value and its ratio to memcpy, if any."""


def lines(columns: Sequence[Column]) -> Iterator[Line]:
    """Yields rows: rates of the median round, then times, then the cost of an idle server."""
    for block_bytes in sorted({size for column in columns for size in column.movement}):
        size = f"{block_bytes >> 20} MiB" if block_bytes >= 1 << 20 else f"{block_bytes >> 10} KiB"
        for what in ("memcpy", "store", "load"):
            yield f"{what}, {BATCH} x {size}", "GB/s", [_moved(column, block_bytes, what) for column in columns]
    for what in dict.fromkeys(what for column in columns for what in column.lookups):
        for share in (50, 99):
            found = [column.lookups.get(what) for column in columns]
            values = [None if times is None else (percentile(times, share / 100), None) for times in found]
            yield f"lookup, {what}, p{share}", "ms", values
    yield from _at_rest(columns)


def _at_rest(columns: Sequence[Column]) -> Iterator[Line]:
    yield "start to first answer", "s", [_of(column.ready_seconds, float) for column in columns]
    yield "memory of the server when idle", "MiB", [_of(column.memory_bytes, lambda n: n / 2**20) for column in columns]
    yield "processor of the server when idle", "%", [_of(column.idle_share, lambda n: n * 100) for column in columns]
    yield "import of the client", "s", [_of(column.import_seconds or None, min) for column in columns]
    yield "packages installed", "", [_of(column.packages, float) for column in columns]


def as_json(columns: Sequence[Column], facts: Mapping[str, str]) -> dict[str, Any]:
    """Returns facts, columns and rows with ratios, for `python -m bench.document`."""
    return {
        "facts": dict(facts),
        "columns": [{"name": c.name, "version": c.version, "absent": c.absent} for c in columns],
        "rows": [
            {
                "name": name,
                "unit": unit,
                "values": [None if cell is None else cell[0] for cell in cells],
                "of_memcpy": [None if cell is None else cell[1] for cell in cells],
            }
            for name, unit, cells in lines(columns)
        ],
    }


def show(console: Console, columns: Sequence[Column]) -> None:
    """Prints the table, and the reasons of missing figures."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("what")
    table.add_column("unit")
    for column in columns:
        table.add_column(f"{column.name}\n{column.version}", justify="right")
    for name, unit, cells in lines(columns):
        table.add_row(name, unit, *map(cell_text, cells))
    console.print(table)
    console.print("In brackets: ratio to memcpy by one thread of the same process, measured in turns.")
    for column in columns:
        if column.absent is not None:
            console.print(f"{column.name}: figures are missing: {column.absent}", markup=False, soft_wrap=True)


def cell_text(cell: Sequence[float | None] | None) -> str:
    if cell is None or cell[0] is None:
        return "-"
    value, ratio = cell
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _moved(column: Column, block_bytes: int, what: str) -> tuple[float, float | None] | None:
    found = column.movement.get(block_bytes)
    if not found:
        return None
    value = rate(BATCH * block_bytes, found[what])
    return value, None if what == "memcpy" else statistics.median(found["memcpy"]) / statistics.median(found[what])


def _of(found: Any, value: Callable[[Any], float]) -> tuple[float, float | None] | None:
    return None if found is None else (value(found), None)
