"""Tables on terminals of any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from kvtier.server.commands.tables import ResponsiveTable


def shown(table: ResponsiveTable, width: int) -> list[str]:
    """Returns the lines of a table on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def of_sessions(count: int = 2) -> ResponsiveTable:
    """Returns a table with long names and figures."""
    table = ResponsiveTable("client", "engine", numbers=("last heard", "calls", "written"), title="sessions")
    for number in range(count):
        table.add_row("python", Text(f"{number}" * 32), f"{number}.5 s", f"1,000,00{number}", "256.0 KiB")
    return table


@pytest.mark.parametrize("width", [32, 40, 60, 79, 80, 120, 10_000])
def test_every_figure_is_legible_at_any_width(width: int) -> None:
    """No figure is cut or left out, and no line is too long."""
    lines = shown(of_sessions(5), width)

    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for number in range(5):
        assert f"{number}.5 s" in text
        assert f"1,000,00{number}" in text
    assert text.count("256.0 KiB") == 5


def test_a_table_that_fits_has_a_line_per_row() -> None:
    lines = shown(of_sessions(), 120)

    assert [line.split()[1] for line in lines if line.startswith("│")] == ["python", "python"]
    assert "0" * 32 in lines[4]


def test_names_are_cut_before_a_table_is_transposed() -> None:
    """A line per row is worth more than the end of an id."""
    lines = shown(of_sessions(), 70)

    assert [line.split()[1] for line in lines if line.startswith("│")] == ["python", "python"]
    assert "…" in lines[4]


def test_a_transposed_table_has_whole_names_and_one_title() -> None:
    text = "\n".join(shown(of_sessions(3), 50))

    assert "…" not in text
    assert text.count("sessions") == 1
    assert all(str(number) * 32 in text for number in range(3))


def test_transposed_rows_are_columns_if_they_fit() -> None:
    """Tiers can then be compared in one table."""
    table = ResponsiveTable("tier", numbers=("used", "of", "fill", "blocks", "hits", "misses"))
    for tier in ("cpu", "lmdb"):
        table.add_row(tier, *["1"] * 6)

    lines = shown(table, 30)

    assert [line.strip() for line in lines[1].split("┃")[1:-1]] == ["tier", "cpu", "lmdb"]
    assert len(lines) == 3 + 6 + 1


def test_the_work_grows_linearly_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is narrow."""
    measured = 0
    original = Measurement.get

    def get(*arguments: Any) -> Measurement:
        nonlocal measured
        measured += 1
        return original(*arguments)

    monkeypatch.setattr(Measurement, "get", get)
    counts = []
    for rows in (100, 200):
        measured = 0
        assert max(map(len, shown(of_sessions(rows), 60))) <= 60
        counts.append(measured)
    assert counts[1] < 2.5 * counts[0]


def test_an_empty_table_is_printed() -> None:
    """The table has a head and no rows to transpose."""
    assert shown(ResponsiveTable("client", "engine"), 10)
