"""Tables that stay legible where there is little room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import TextType

__all__ = ["Sheet"]

_ANY_WIDTH = 10_000
_TELLING = 12
"""Characters that a name may be cut to, and tells something still. A figure may not be cut at all."""


class Sheet(Table):
    """A table that is turned on its side where the terminal is too narrow for it: what was a line is a column then.

    As many of them stand beside each other as there is room for, and the next ones below.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.row_count or self._least(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        title = self.title
        while rows:
            taken = len(rows)
            while taken > 1 and _width(console, options, [self._turned(rows[:taken], title)]) > options.max_width:
                taken -= 1
            yield self._turned(rows[:taken], title)
            rows, title = rows[taken:], None

    def _least(self, console: Console, options: ConsoleOptions) -> int:
        """Returns how wide it must be to be read."""
        names = [column for column in self.columns if column.justify == "left"]
        widths = [_width(console, options, [column.header, *column.cells]) for column in names]
        return _width(console, options, [self]) - sum(max(0, width - _TELLING) for width in widths)

    def _turned(self, rows: Sequence[Sequence[RenderableType]], title: TextType | None) -> Table:
        turned = Table(title=title, title_justify="left")
        first, *others = self.columns
        turned.add_column(first.header)
        for row in rows:
            turned.add_column(row[0], overflow="fold")
        for index, column in enumerate(others, start=1):
            turned.add_row(column.header, *(row[index] for row in rows))
        return turned


def _width(console: Console, options: ConsoleOptions, pieces: Iterable[RenderableType]) -> int:
    return max(Measurement.get(console, options.update(width=_ANY_WIDTH), piece).maximum for piece in pieces)
