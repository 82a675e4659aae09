"""Report: rows of figures, printed as a table and written as JSON."""

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
    name: str
    value: float
    unit: str
    ratio: float | None = None
    """Fraction of the limit that is reached, for rates and for times; 1 equals the limit."""
    limit: str | None = None
    """Name of the row to compare with."""


class Report:
    """Rows of figures. Add a limit before the rows that refer to this limit."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, limit: str | None = None) -> None:
        """Adds a figure, compared with the earlier row `limit` of the same unit."""
        ratio = None
        if limit is not None:
            base = next(row for row in self.rows if row.name == limit)
            if base.unit != unit:
                raise ValueError(f"{name} is in {unit}, {limit} in {base.unit}")
            ratio = value / base.value if unit.endswith("/s") else base.value / value
        self.rows.append(Row(name, value, unit, ratio, limit))

    def write_json(self, path: Path, facts: Mapping[str, str] | None = None) -> None:
        """Writes the rows as a JSON list; `facts` come first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps([{"facts": dict(facts)}, *rows] if facts else rows, indent=1) + "\n")

    def show(self, facts: Mapping[str, str]) -> None:
        """Prints the facts and the table on standard output."""
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
