"""Planting of faults: a small change of one source file, as old and new text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CannotPlantError", "Fault", "with_fault"]


class CannotPlantError(Exception):
    """The old text of a fault is missing in its file, or not unique."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, named after what it does. `file` is relative to the root of the package."""

    name: str
    file: str
    old: str
    new: str


def with_fault(file: Path, old: str, new: str) -> str:
    """Returns the text of a file with a fault. Raises `CannotPlantError`."""
    text = file.read_text() if file.is_file() else ""
    if text.count(old) != 1:
        raise CannotPlantError(f"the old text occurs {text.count(old)} times in {file}: {old!r}")
    return text.replace(old, new)
