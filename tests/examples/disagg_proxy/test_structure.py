"""What is decided stays apart from what is done."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import disagg_proxy
import pytest

FOLDER = Path(disagg_proxy.__file__).parent
DECIDES = {"transfer", "turns", "conversations", "events", "fleet"}
PURE = {"__future__", "collections", "dataclasses", "enum", "hashlib", "json", "re", "typing"}


def _imports(module: Path) -> Iterator[str]:
    """The first names of what it imports; a sibling's begins with a dot."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "").split(".")[0]


@pytest.mark.parametrize("name", sorted(DECIDES))
def test_decisions_are_pure(name: str) -> None:
    """No socket, no clock, no task: time and answers come in as arguments."""
    assert set(_imports(FOLDER / f"{name}.py")) <= PURE | {f".{other}" for other in DECIDES}


def test_the_folder_runs_anywhere() -> None:
    """It can be copied away from this repository: it imports nothing of kvtier."""
    assert not {name for module in FOLDER.glob("*.py") for name in _imports(module) if name == "kvtier"}
