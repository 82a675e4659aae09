"""Screen of `kvtier top`: handles keys and draws one view for a terminal of any size.

This module does no I/O. The caller passes keys, samples and the size of the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..config.units import human_age, human_size
from ..printable import printable
from .rates import Values
from .top_views import VIEWS, Column, View, handoff_lines, summary

__all__ = ["TopScreen"]

_KEYS = ("q quit", "Tab view", "←→ sort", "r reverse", "↑↓ row", "Enter details")
_DETAIL_KEYS = ("q quit", "Tab view", "↑↓ scroll", "Esc back")
_GAP = 2
"""Spaces between two columns."""
_NAME_WIDTH = 24
"""Width that a column of names gets if the terminal is too narrow for all columns."""
_LEAST_ROWS = 3
"""Lines that the table gets at least; in a lower terminal the lines above are cut off."""
_JUMPS = {"up": -1, "k": -1, "down": 1, "j": 1}


@dataclass(slots=True)
class _ViewState:
    """What the user has chosen in one view."""

    sort: int
    reverse: bool
    row: int = 0
    selected: tuple[object, ...] | None = None
    """Identity of the selected row. None until a key selects one: then `row` stays the first."""
    first_row: int = 0
    first_column: int = 1
    """First column that is shown after the column of names."""
    detail_line: int | None = None
    """First line of the details; None if the table is shown."""
    widths: list[int] = field(default_factory=list)
    """Largest width of each column so far, so that columns do not move at each update."""


class TopScreen:
    """Screen of one server. A subclass shows other samples with other views."""

    views: ClassVar[Sequence[View]] = VIEWS

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._views = [_initial(view) for view in self.views]
        self._number = 0
        self._page = 1
        self.sample: Values | None = None
        self.holds: Values | None = None
        """Values of `kvtier handoffs`; None until the server has answered."""
        self.problem = ""
        """Why the server does not answer; empty if it does."""
        self.as_of = ""
        """Time of the sample."""

    @property
    def view(self) -> View:
        return self.views[self._number]

    @property
    def wants_holds(self) -> bool:
        return self.view.name == "hand-offs"

    def press(self, key: str) -> bool:
        """Handles a key; returns whether the user wants to quit."""
        state = self._views[self._number]
        if key in ("q", "Q"):
            return True
        if key in ("tab", "backtab"):
            self._number = (self._number + (1 if key == "tab" else -1)) % len(self.views)
        elif key.isdecimal() and 1 <= int(key) <= len(self.views):
            self._number = int(key) - 1
        elif key in ("escape", "backspace"):
            state.detail_line = None
        elif key == "enter":
            self._toggle_details(state)
        elif state.detail_line is not None:
            state.detail_line += self._step(key)
        elif key in ("left", "right"):
            state.sort = (state.sort + (1 if key == "right" else -1)) % len(self.view.columns)
            state.reverse = self.view.columns[state.sort].is_number
        elif key == "r":
            state.reverse = not state.reverse
        elif step := self._step(key):
            self._select(state, state.row + step)
        return False

    def render(self, width: int, height: int) -> Text:
        """Returns the lines of the screen."""
        state = self._views[self._number]
        rows = self._rows()
        head = self._head(width)
        foot = self._wrap("  ".join(_KEYS if state.detail_line is None else _DETAIL_KEYS), width, "dim")
        room = height - len(foot)
        head = head[: max(1, room - _LEAST_ROWS - 1)]
        room -= len(head)
        if self.sample is None:
            body = self._wrap("" if self.problem else "waiting for the first interval", width)
        elif not rows:
            body = [Text(self.view.empty)]
        elif state.detail_line is not None:
            body = self._details(state, rows, width, room)
        else:
            body = self._table(state, rows, width, room)
        lines = [*head, *body[: max(0, room)]]
        lines += [Text("")] * (height - len(foot) - len(lines))
        return Text("\n", no_wrap=True, overflow="crop").join([*lines, *foot][:height])

    def _head(self, width: int) -> list[Text]:
        sample = self.sample
        lines: list[Text] = []
        if sample is None:
            lines += self._wrap(self._title, width, "bold")
        else:
            text, style = self.headline(sample)
            lines += self._wrap(text, width, style)
        if self.problem:
            since = f"; the figures are from {self.as_of}" if sample else ""
            lines += self._wrap(f"! {self.problem}{since}", width, "bold red")
        if sample is not None:
            lines += [_cut(line, width, "red") for line in self.troubles(sample)]
            lines += self._wrap(self.summary(sample), width)
        lines += self._tabs(width)
        if sample is not None and self.wants_holds:
            lines += [line for text in handoff_lines(sample) for line in self._wrap(text, width)]
        return lines

    def headline(self, sample: Values) -> tuple[str, str]:
        """Returns the first line and its style."""
        state = "draining" if sample["draining"] else f"up {human_age(sample['uptime_seconds'])}"
        title = f"kvtier {sample['server_version']} at {self._title}, {state}, {self.as_of}"
        return title, "yellow" if sample["draining"] else "bold"

    def troubles(self, sample: Values) -> list[str]:
        """Returns a line for each problem."""
        tiers = [tier for tier in sample["tiers"] if not tier["healthy"]]
        troubles = [f"! {tier['name']}: {tier['trouble'] or 'trouble'}" for tier in tiers]
        if sample["quarantined_bytes"]:
            troubles.append(f"! {human_size(sample['quarantined_bytes'])} in quarantine")
        return troubles

    def summary(self, sample: Values) -> str:
        return summary(sample)

    def _tabs(self, width: int) -> list[Text]:
        tabs = Text()
        for number, view in enumerate(self.views):
            count = f" {self._count(view):,}" if self.sample is not None else ""
            tabs.append(f" {number + 1} {view.name}{count} ", style="reverse" if number == self._number else "")
        return list(tabs.wrap(self._console, width))

    def _count(self, view: View) -> int:
        assert self.sample is not None
        return self.sample["holds"] if view.name == "hand-offs" else len(view.rows(self.sample))

    def _rows(self) -> list[Values]:
        """Returns the rows in their order, and keeps the selected row selected."""
        state = self._views[self._number]
        if self.sample is None:
            return []
        rows = list(self.view.rows(self.sample | {"held": self.holds["handoffs"] if self.holds else []}))
        value = self.view.columns[state.sort].value
        known = [row for row in rows if value(row) is not None]
        known.sort(key=value, reverse=state.reverse)
        rows = [*known, *(row for row in rows if value(row) is None)]
        at = _identity(self.view, rows[state.row]) if state.row < len(rows) else None
        if state.selected not in (None, at):
            places = (place for place, row in enumerate(rows) if _identity(self.view, row) == state.selected)
            state.row = next(places, state.row)
        state.row = max(0, min(state.row, len(rows) - 1))
        return rows

    def _step(self, key: str) -> int:
        pages = {"pageup": -self._page, "pagedown": self._page, " ": self._page, "home": -(1 << 30), "end": 1 << 30}
        return _JUMPS.get(key, 0) or pages.get(key, 0)

    def _select(self, state: _ViewState, row: int) -> None:
        rows = self._rows()
        if rows:
            state.row = max(0, min(row, len(rows) - 1))
            state.selected = _identity(self.view, rows[state.row])

    def _toggle_details(self, state: _ViewState) -> None:
        if state.detail_line is None:
            self._rows()
            self._select(state, state.row)
        state.detail_line = 0 if state.detail_line is None else None

    def _table(self, state: _ViewState, rows: Sequence[Values], width: int, room: int) -> list[Text]:
        """Returns the header, and the rows around the selected one; the last line counts them."""
        self._page = shown = max(1, room - 2)
        last = max(0, len(rows) - shown)
        state.first_row = min(max(state.first_row, state.row - shown + 1), state.row, last)
        visible = rows[state.first_row : state.first_row + shown]
        cells = [[printable(column.text(row)) for column in self.view.columns] for row in visible]
        columns = self._choose(state, cells, width)
        headers = [_header(column, state, number) for number, column in enumerate(self.view.columns)]
        lines = [_line(((headers[number], width, column, "bold") for number, width, column in columns))]
        for place, (row, texts) in enumerate(zip(visible, cells, strict=True), start=state.first_row):
            line = _line((texts[number], width, column, column.style(row)) for number, width, column in columns)
            if place == state.row:
                line.pad_right(max(0, width - line.cell_len))
                line.stylize("reverse")
            lines.append(line)
        first, count = columns[1][0] + 1 if len(columns) > 1 else 1, len(self.view.columns)
        place_text = f"rows {state.first_row + 1}-{state.first_row + len(visible)} of {len(rows):,}"
        if len(columns) < count:
            place_text += f", columns {first}-{columns[-1][0] + 1} of {count} (←→)"
        return [*lines, _cut(place_text, width, "dim")]

    def _choose(self, state: _ViewState, cells: Sequence[Sequence[str]], width: int) -> list[tuple[int, int, Column]]:
        """Returns number, width and definition of the columns that fit, with the sorted one."""
        columns = self.view.columns
        state.widths = [
            max(old, cell_len(column.name) + 1, *(cell_len(row[number]) for row in cells))
            for number, (column, old) in enumerate(zip(columns, state.widths or [0] * len(columns), strict=True))
        ]
        widths = [
            wide if column.is_number else min(wide, max(_NAME_WIDTH, cell_len(column.name) + 1))
            for column, wide in zip(columns, state.widths, strict=True)
        ]
        widths[0] = min(widths[0], max(8, width // 3))
        left = width - widths[0]

        def needed(numbers: Iterable[int]) -> int:
            return sum(widths[number] + _GAP for number in numbers)

        start = min(state.first_column, max(1, state.sort))
        while start < state.sort and needed(range(start, state.sort + 1)) > left:
            start += 1
        while start > 1 and needed(range(start - 1, len(columns))) <= left:
            start -= 1
        state.first_column = start
        chosen = [0]
        for number in range(start, len(columns)):
            if number > start and needed(range(start, number + 1)) > left:
                break
            chosen.append(number)
        spare = left - needed(chosen[1:])
        for number in chosen:
            extra = max(0, min(spare, state.widths[number] - widths[number]))
            widths[number] += extra
            spare -= extra
        return [(number, widths[number], columns[number]) for number in chosen]

    def _details(self, state: _ViewState, rows: Sequence[Values], width: int, room: int) -> list[Text]:
        """Returns all fields of the selected row, with complete values."""
        row = rows[state.row]
        indent = max(len(column.name) for column in self.view.columns) + _GAP
        lines: list[Text] = []
        for column in self.view.columns:
            value = printable(column.text(row))
            pieces = Text(value, style=column.style(row)).wrap(self._console, max(8, width - indent), overflow="fold")
            for number, piece in enumerate(pieces):
                lines.append(Text((column.name if number == 0 else "").ljust(indent), style="dim") + piece)
        self._page = max(1, room - 1)
        state.detail_line = max(0, min(state.detail_line or 0, len(lines) - self._page))
        end = min(len(lines), state.detail_line + self._page)
        position = _cut(f"lines {state.detail_line + 1}-{end} of {len(lines)}", width, "dim")
        return [*lines[state.detail_line : end], position]

    def _wrap(self, text: str, width: int, style: str = "") -> list[Text]:
        return list(Text(printable(text), style=style).wrap(self._console, max(1, width), overflow="fold"))


def _initial(view: View) -> _ViewState:
    sort = [column.name for column in view.columns].index(view.sort)
    return _ViewState(sort, view.columns[sort].is_number)


def _identity(view: View, row: Values) -> tuple[object, ...]:
    return tuple(row[name] for name in view.key)


def _header(column: Column, state: _ViewState, number: int) -> str:
    mark = ("▼" if state.reverse else "▲") if number == state.sort else ""
    return f"{column.name}{mark}"


def _line(cells: Iterable[tuple[str, int, Column, str]]) -> Text:
    """Joins cells; cuts each to its width with an ellipsis."""
    line = Text(no_wrap=True)
    for number, (text, width, column, style) in enumerate(cells):
        cell = _cut(text, width, style)
        pad = " " * (width - cell.cell_len)
        line.append(" " * _GAP if number else "")
        line.append(pad if column.is_number else "")
        line.append_text(cell)
        line.append("" if column.is_number else pad)
    return line


def _cut(text: str, width: int, style: str) -> Text:
    cut = Text(printable(text), style=style)
    cut.truncate(max(1, width), overflow="ellipsis")
    return cut
