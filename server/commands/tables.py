"""What several commands show of a server's status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text, TextType

from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.units import human_age, human_size, seconds_of
from ..telemetry.status import hit_rate

__all__ = ["ResponsiveTable", "print_troubles", "sessions", "shares", "tiers"]


_ANY_WIDTH = 10_000


_TELLING = 12
"""Characters that a name may be cut to, and tells something still. A figure may not be cut at all."""


_BORDER = 1


_AROUND = 3
"""Characters of a column that are no text of its: blanks on both sides, and the line on one."""


class ResponsiveTable(Table):
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


def print_troubles(answer: GetStatusResponse, console: Console) -> None:
    """Prints a line for each tier with which not all is well."""
    for tier in answer.tiers:
        if not tier.healthy:
            console.print(f"{tier.name}: {tier.trouble or 'in trouble'}", style="red", markup=False)


def tiers(answer: GetStatusResponse) -> ResponsiveTable:
    """Returns the tiers, a line each."""
    table = ResponsiveTable("tier", "type", title="tiers", title_justify="left")
    for column in ("used", "of", "fill", "blocks", "hits", "misses", "hit rate", "evicted", "damaged", "jobs"):
        table.add_column(column, justify="right")
    table.add_column("health")
    for tier in answer.tiers:
        capacity = human_size(tier.capacity_bytes)
        if tier.available_bytes < tier.capacity_bytes:
            capacity += f" ({human_size(tier.available_bytes)} ready)"
        fill = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0
        rate = hit_rate(tier)
        table.add_row(
            Text(tier.name),
            Text(tier.type),
            human_size(tier.used_bytes),
            capacity,
            f"{fill:.1%}",
            f"{tier.blocks:,}",
            f"{tier.hits:,}",
            f"{tier.misses:,}",
            "-" if rate is None else f"{rate:.1%}",
            f"{tier.evictions:,}",
            f"{tier.damaged_blocks:,}",
            f"{tier.jobs:,}",
            "ok" if tier.healthy else "trouble",
        )
    return table


def shares(answer: GetStatusResponse) -> ResponsiveTable:
    """Returns who has what of each tier."""
    table = ResponsiveTable("tenant", "tier", title="tenants", title_justify="left")
    for column in ("used", "quota", "limit", "retained"):
        table.add_column(column, justify="right")
    for tier in answer.tiers:
        for share in tier.shares:
            table.add_row(
                Text(share.tenant or "(the rest)"),
                Text(tier.name),
                human_size(share.used_bytes),
                human_size(share.quota_bytes) if share.quota_bytes else "-",
                human_size(share.limit_bytes) if share.HasField("limit_bytes") else "-",
                human_size(share.retained_bytes),
            )
    return table


def sessions(answer: GetStatusResponse) -> ResponsiveTable:
    """Returns who is there, a line each."""
    columns = ("client", "engine", "rank", "transport", "model", "pid", "age", "region")
    table = ResponsiveTable(*columns, title="sessions", title_justify="left")
    for session in answer.sessions:
        table.add_row(
            Text(session.client_name),
            Text(session.engine_id),
            str(session.rank) if session.HasField("rank") else "scheduler",
            Text(session.transport),
            Text(session.model),
            str(session.pid),
            human_age(seconds_of(session.age)),
            "mapped" if session.attached else "-",
        )
    return table
