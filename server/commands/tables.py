"""Table that fits terminals of any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import TextType

__all__ = ["ResponsiveTable"]

_ANY_WIDTH = 10_000
_MIN_NAME_WIDTH = 12
"""Minimum width of a truncated name. Numbers are never truncated."""
_BORDER = 1
_PADDING = 3
"""Width of a column besides its text: a space on each side, and one border."""


class ResponsiveTable(Table):
    """Table that is transposed if the terminal is too narrow: rows become columns."""

    def __init__(self, *names: str, numbers: Sequence[str] = (), title: str | None = None) -> None:
        """Creates the left-aligned columns `names`, then the right-aligned columns `numbers`."""
        super().__init__(*names, title=title, title_justify="left")
        for header in numbers:
            self.add_column(header, justify="right")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.row_count or self._min_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        headers = [column.header for column in self.columns]
        available = options.max_width - _BORDER - _width(console, options, headers) - _PADDING
        block: list[Sequence[RenderableType]] = []
        title, left = self.title, available
        for row in rows:
            width = _width(console, options, row) + _PADDING
            if block and width > left:
                yield self._transposed(block, title)
                block, title, left = [], None, available
            block.append(row)
            left -= width
        yield self._transposed(block, title)

    def _min_width(self, console: Console, options: ConsoleOptions) -> int:
        """Returns the width of the table with all names truncated to `_MIN_NAME_WIDTH`."""
        names = [column for column in self.columns if column.justify == "left"]
        widths = [_width(console, options, [column.header, *column.cells]) for column in names]
        return _width(console, options, [self]) - sum(max(0, width - _MIN_NAME_WIDTH) for width in widths)

    def _transposed(self, rows: Sequence[Sequence[RenderableType]], title: TextType | None) -> Table:
        table = Table(title=title, title_justify="left")
        first, *others = self.columns
        table.add_column(first.header)
        for row in rows:
            table.add_column(row[0], overflow="fold")
        for index, column in enumerate(others, start=1):
            table.add_row(column.header, *(row[index] for row in rows))
        return table


def _width(console: Console, options: ConsoleOptions, pieces: Iterable[RenderableType]) -> int:
    return max(Measurement.get(console, options.update(width=_ANY_WIDTH), piece).maximum for piece in pieces)
