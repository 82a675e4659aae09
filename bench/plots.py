"""Bar charts as SVG files, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bar_chart"]

COLOURS = ("#9e9e9e", "#00796b", "#4db6ac", "#b2dfdb", "#f57c00", "#5c6bc0")
WIDTH, HEIGHT = 860, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 62, 34
GAP = 0.25
"""Space between two groups, as a fraction of a group's width."""


def bar_chart(title: str, unit: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Returns an SVG with a bar per group and series. A value that is None has no bar."""
    top = _round_up(max(value for values in series.values() for value in values if value is not None))
    across, scale = (WIDTH - LEFT - RIGHT) / len(groups), (HEIGHT - TOP - BOTTOM) / top
    floor = HEIGHT - BOTTOM
    parts = [_text(LEFT, 22, title, size=15, weight="bold"), _text(WIDTH - RIGHT, 22, unit, anchor="end")]
    for step in range(6):
        y = floor - top * step / 5 * scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{top * step / 5:g}", anchor="end"))
    x = float(LEFT)
    for name, colour in zip(series, COLOURS, strict=False):
        parts.append(f'<rect x="{x:.1f}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, 46, name))
        x += 34 + 6.6 * len(name)
    width = across * (1 - GAP) / len(series)
    for place, group in enumerate(groups):
        left = LEFT + across * (place + GAP / 2)
        parts.append(_text(left + across * (1 - GAP) / 2, floor + 20, group, anchor="middle"))
        for number, (values, colour) in enumerate(zip(series.values(), COLOURS, strict=False)):
            if (value := values[place]) is None:
                continue
            x, tall = left + width * number, value * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{floor - tall:.1f}" width="{width - 1:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            )
            label = f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
            parts.append(_text(x + width / 2, floor - tall - 4, label, size=10, anchor="middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    head += ' font-family="sans-serif" font-size="12" fill="#222">'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _round_up(value: float) -> float:
    """Returns the upper end of the axis: a round number that is at least `value`."""
    power = 10.0 ** len(str(int(value))) / 10
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value)
