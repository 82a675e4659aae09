"""Parser and formatter of sizes and durations: "2GiB", "512MiB", "30s", "5m"."""

from __future__ import annotations

import math
import re

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "format_duration",
    "format_size",
    "human_age",
    "human_size",
    "parse_duration",
    "parse_size",
]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

# Gi is the notation of Kubernetes. G alone is refused, because it can mean 10^9 or 2^30.
_SIZES = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _SIZES |= {f"{_prefix}b": 1000**_power, f"{_prefix}i": 1024**_power, f"{_prefix}ib": 1024**_power}
_HUMAN = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_DURATIONS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_BYTES = 2**63
"""A size must fit into a signed 64-bit integer, like offsets of files and memory."""

_MOST_SECONDS = 2**63 / 1e9
"""A duration in nanoseconds must fit into a signed 64-bit integer."""

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Parses a number of bytes, or text like "2GiB", "1.5 GB", "4096". Raises `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _checked_size(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    unit = _SIZES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError('not a size; write it like "2GiB", "512MiB" or a number of bytes')
    rough = float(match[1]) * unit
    return _checked_size(rough if "." in match[1] or rough > 2 * _MOST_BYTES else int(match[1].lstrip("0") or 0) * unit)


def _checked_size(size: float) -> int:
    if size < 0:
        raise ValueError("a size must not be negative")
    if size >= _MOST_BYTES:
        raise ValueError("a size must be less than 8 EiB")
    return int(size)


def parse_duration(value: object) -> float:
    """Parses a number of seconds, or text like "30s", "5m", "250ms". Raises `ValueError`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _checked_duration(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _DURATIONS:
        raise ValueError('not a duration; write it like "30s", "5m", "250ms" or a number of seconds')
    return _checked_duration(float(match[1]) * _DURATIONS[match[2].lower()])


def _checked_duration(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError("a duration must be finite and not negative")
    if seconds >= _MOST_SECONDS:
        raise ValueError("a duration must be less than 292 years")
    return float(seconds)


def format_size(size: int) -> str:
    """Returns the shortest text that `parse_size` reads back as this size."""
    for unit, factor in _HUMAN:
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_duration(seconds: float) -> str:
    """Returns text that `parse_duration` reads back, in hours or minutes if they are whole."""
    for unit in ("h", "m"):
        if seconds and seconds % _DURATIONS[unit] == 0:
            return f"{seconds / _DURATIONS[unit]:.0f}{unit}"
    value, unit = (seconds * 1000, "ms") if 0 < seconds < 1 else (seconds, "s")
    return f"{value:.9f}".rstrip("0").rstrip(".") + unit


def human_size(size: float) -> str:
    """Returns a rounded size: "1.5 GiB". The rounded number is less than 1024, except for TiB."""
    if round(size) < KIB:
        return f"{size:.0f} B"
    unit, factor = next((pair for pair in reversed(_HUMAN) if round(size / pair[1], 1) < 1024), _HUMAN[0])
    return f"{size / factor:.1f} {unit}"


def human_age(seconds: float) -> str:
    """Returns a time span in its two largest units: "2 h 5 min". Below a minute: "59.9 s"."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(max(int(seconds), 60), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
