"""Decisions are separate from I/O."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import disagg_proxy
import pytest
from disagg_proxy.fleet import Fleet, Instance, Role
from disagg_proxy.metrics import Metrics

FOLDER = Path(disagg_proxy.__file__).parent
DECIDES = {"agents", "transfer", "turns", "conversations", "events", "fleet"}
PURE = {"__future__", "collections", "dataclasses", "enum", "hashlib", "json", "math", "re", "typing"}


def _imports(module: Path) -> Iterator[str]:
    """Yields the first names of a module's imports; a sibling's begins with a dot."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "").split(".")[0]


@pytest.mark.parametrize("name", sorted(DECIDES))
def test_decisions_are_pure(name: str) -> None:
    """No socket, no clock, no task: time and answers are arguments."""
    assert set(_imports(FOLDER / f"{name}.py")) <= PURE | {f".{other}" for other in DECIDES}


def test_the_folder_runs_without_kvtier() -> None:
    """Only the module that sends hints imports the client of kvtier, and only in functions."""
    importing = {module.stem for module in FOLDER.glob("*.py") if "kvtier" in _imports(module)}
    assert importing == {"hints"}
    source = "import sys; sys.modules['kvtier'] = None; import disagg_proxy.program"
    subprocess.run([sys.executable, "-c", source], check=True, cwd=FOLDER.parent)
    text = (FOLDER / "hints.py").read_text()
    assert set(re.findall(r"(?:from|import) (kvtier[\w.]*)", text)) == {"kvtier.client"}


def test_every_figure_is_explained() -> None:
    """README lists each metric by its scraped name."""
    fleet = Fleet([Instance("http://d", Role.DECODE)])
    scraped = set(re.findall(r"^# TYPE disagg_proxy_(\w+)", Metrics([fleet], int).render().decode(), re.MULTILINE))
    readme = (FOLDER / "README.md").read_text()
    assert not {name for name in scraped if f"`{name}" not in readme and not name.endswith("_created")}
