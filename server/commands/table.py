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
_BORDER = 1
_AROUND = 3
"""Characters of a column that are no text of its: blanks on both sides, and the line on one."""


class Sheet(Table):
    """A table that is turned on its side where the terminal is too narrow for it: what was a line is a column then.

    As many of them stand beside each other as there is room for, and the next ones below.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.row_count or self._least(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        room = (
            options.max_width - _BORDER - _width(console, options, [column.header for column in self.columns]) - _AROUND
        )
        taken: list[Sequence[RenderableType]] = []
        title, left = self.title, room
        for row in rows:
            width = _width(console, options, row) + _AROUND
            if taken and width > left:
                yield self._turned(taken, title)
                taken, title, left = [], None, room
            taken.append(row)
            left -= width
        yield self._turned(taken, title)

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
