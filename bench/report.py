"""Rows of the report: one table for people, one list for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["Report", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    """How near it comes to the limit: 1 is as good as the limit, for rates as for times."""
    limit: str | None = None
    """Name of the row that it is compared with."""


class Report:
    """Collects rows; those that are limits first become known by name."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, limit: str | None = None) -> None:
        """Adds a figure and compares it with the row `limit`, which is there already and has the same unit."""
        ratio = None
        if limit is not None:
            base = next(row for row in self.rows if row.name == limit)
            if base.unit != unit:
                raise ValueError(f"{name} is in {unit}, {limit} in {base.unit}")
            ratio = value / base.value if unit.endswith("/s") else base.value / value
        self.rows.append(Row(name, value, unit, ratio, limit))

    def write_json(self, path: Path, facts: Mapping[str, str] | None = None) -> None:
        """Writes the rows as a list of objects; the machine's facts, where they are to be kept, are the first of them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps([{"facts": dict(facts)}, *rows] if facts else rows, indent=1) + "\n")

    def show(self, facts: Mapping[str, str]) -> None:
        """Prints the machine's facts and the table on standard output."""
        console = Console()
        if not console.is_terminal:
            console.width = 120
        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(f"[dim]{name}", value)
        console.print(grid)
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("of limit", justify="right")
        table.add_column("limit", style="dim")
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            table.add_row(row.name, f"{row.value:.3g}", row.unit, ratio, row.limit or "")
        console.print(table)
