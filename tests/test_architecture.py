"""Who may import whom (DESIGN §1), read from the source: the rooms stay rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "protos": set(),
    "tiers": set(),
    "cuda": set(),
    "server": {"protos", "tiers", "cuda"},
    "client": {"protos", "cuda"},
}
"""For each room, the other rooms that it may know."""

DOORS = dict.fromkeys(
    ("kvtier.server.commands.bench", "kvtier.server.commands.bench_report"), "kvtier.client.breakeven"
)
"""Modules that may know one of another room besides, when they are called and not at start: `kvtier` is one command for all
rooms, and what it measures there is what an engine does."""

NEVER = {
    "tiers": {"grpc", "google", "torch"},
    "cuda": {"grpc", "google"},
}
"""For each room, packages that it may not import anywhere."""

CORES = {
    "kvtier.client.offload": ("kvtier.client.offload",),
    "kvtier.client.handoff": ("kvtier.client.handoff", "kvtier.client.offload"),
}
"""What decides for every engine, and does nothing else: it knows neither engines nor the client; and the cores it may know."""

PURE = {"__future__", "collections", "dataclasses", "enum", "math", "typing"}
"""All that they may import besides: no I/O, no clock, no threads."""

HEAVY = {"numpy", "torch", "transformers", "vllm"}
"""Packages that the server, and whatever it imports, may not load at start (ready in under a second, under 100 MB)."""


@dataclass(frozen=True)
class Import:
    """One imported module: its absolute name, whether it was named relatively, and whether it loads at start."""

    target: str
    line: int
    relative: bool
    at_start: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yields what a module imports; `from a import b` yields `a.b`, which may be a module or a name in one."""
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, relative=False, at_start=at_start)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            prefix = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield Import(f"{prefix}.{alias.name}", node.lineno, relative=node.level > 0, at_start=at_start)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for unloaded in node.body:
                yield from visit(unloaded, at_start=False)
            for otherwise in node.orelse:
                yield from visit(otherwise, at_start=at_start)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_start=at_start and not inside)

    yield from visit(ast.parse(source), at_start=True)


def room_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Returns what the module imports though its room may not; `module` is its full name, from `kvtier` on."""
    room = module.split(".")[1]
    found = []
    for item in imports_of(source, module, is_package=is_package):
        where = f"{module}:{item.line}"
        parts = item.target.split(".")
        if parts[0] == "kvtier":
            other = parts[1] if len(parts) > 1 else ""
            through_door = not item.at_start and f"{item.target}.".startswith(f"{DOORS.get(module, '!')}.")
            if other in MAY_IMPORT and other not in MAY_IMPORT[room] | {room} and not through_door:
                found.append(f"{where}: {room} may not know {other} ({item.target})")
            if not item.relative:
                found.append(f"{where}: siblings are imported relatively ({item.target})")
        elif parts[0] in NEVER.get(room, set()):
            found.append(f"{where}: {room} may not import {parts[0]}")
    return found


def heavy_at_start(modules: dict[str, str], packages: set[str], entries: set[str]) -> list[str]:
    """Returns heavy imports that happen when one of `entries` is imported, following imports through `modules`."""
    found, seen, todo = [], set(), sorted(entries)
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for item in imports_of(modules[module], module, is_package=module in packages):
            if not item.at_start:
                continue
            if item.target.split(".")[0] in HEAVY:
                found.append(f"{module}:{item.line}: {item.target} is loaded at start")
            parts = item.target.split(".")
            todo += [name for end in range(len(parts)) if (name := ".".join(parts[: end + 1])) in modules]
    return found


def project() -> tuple[dict[str, str], set[str]]:
    """Returns the source of every module of the package by its full name, and which of them are packages."""
    modules, packages = {}, set()
    for room in MAY_IMPORT:
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if path.parts[-2] == "v1":  # generated
                continue
            name = ".".join(["kvtier", *relative.with_suffix("").parts]).removesuffix(".__init__")
            modules[name] = path.read_text()
            if path.name == "__init__.py":
                packages.add(name)
    return modules, packages


def test_rooms_import_only_whom_they_may() -> None:
    """No module imports a room that its own may not know, nor a package that its room does without."""
    modules, packages = project()
    assert len(modules) > len(MAY_IMPORT)
    found = [
        line for name, source in modules.items() for line in room_violations(source, name, is_package=name in packages)
    ]
    assert not found, "\n".join(found)


def test_server_and_tiers_load_nothing_heavy_at_start() -> None:
    """Neither torch nor numpy is loaded by importing any module of the server or of the tiers."""
    modules, packages = project()
    entries = {name for name in modules if name.split(".")[1] in {"server", "tiers"}}
    assert heavy_at_start(modules, packages, entries) == []


def test_client_loads_no_engine_at_start() -> None:
    """Importing the client, its engine adapters aside, loads neither torch nor an engine."""
    modules, packages = project()
    entries = {name for name in modules if name.split(".")[1] == "client" and "engines" not in name.split(".")}
    assert [line for line in heavy_at_start(modules, packages, entries) if "numpy" not in line] == []


def impure(source: str, module: str, core: str, *, is_package: bool = False) -> list[str]:
    """Returns what a module of a core imports though it is to be pure."""
    return [
        f"{module}:{item.line}: {item.target}"
        for item in imports_of(source, module, is_package=is_package)
        if not f"{item.target}.".startswith(tuple(f"{known}." for known in CORES[core]))
        and item.target.split(".")[0] not in PURE
    ]


@pytest.mark.parametrize("core", CORES)
def test_a_core_imports_nothing_but_cores(core: str) -> None:
    """B2 B4: no engine, no client, no I/O, no clock and no threads in `client/offload` and `client/handoff`."""
    modules, packages = project()
    members = {name: source for name, source in modules.items() if f"{name}.".startswith(f"{core}.")}
    assert len(members) > 5
    found = [
        line for name, source in members.items() for line in impure(source, name, core, is_package=name in packages)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("line", ["import time", "from ..wire import x", "from ..engines import vllm", "import vllm"])
def test_a_planted_impurity_is_found(line: str, core: str) -> None:
    """The check of the cores can fail; and what is offloaded knows nothing of what is handed over."""
    assert impure(f"def f():\n    {line}", f"{core}.core", core)
    assert impure("from ..handoff import core", "kvtier.client.offload.core", "kvtier.client.offload")


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("kvtier.tiers.lmdb", "import grpc", "tiers may not import grpc"),
        ("kvtier.tiers.lmdb", "def f():\n    from ..cuda.region import Region", "tiers may not know cuda"),
        ("kvtier.tiers.lmdb", "from ..protos.v1 import common_pb2", "tiers may not know protos"),
        ("kvtier.cuda.copy", "from .. import tiers", "cuda may not know tiers"),
        ("kvtier.client.api", "from ..server import config", "client may not know server"),
        ("kvtier.client.engines.vllm.worker", "from ....tiers import base", "client may not know tiers"),
        ("kvtier.server.cli", "from ..client import Client", "server may not know client"),
        ("kvtier.server.cli", "def f():\n    from ..client import breakeven", "server may not know client"),
        ("kvtier.server.commands.bench", "from ...client import breakeven", "server may not know client"),
        ("kvtier.server.commands.bench", "def f():\n    from ...client import Client", "server may not know client"),
        ("kvtier.server.cli", "from kvtier.tiers import base", "siblings are imported relatively"),
        ("kvtier.client.api", "import kvtier.server.cli", "client may not know server"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, expected: str) -> None:
    """The check of the rooms can fail."""
    found = room_violations(source, module)
    assert any(expected in line for line in found), found


def test_what_is_allowed_is_not_reported() -> None:
    """Siblings, permitted rooms and foreign packages pass."""
    source = (
        "import os\nfrom . import slots\nfrom ..tiers.base import Vote\nfrom ..protos.v1 import cache_pb2\nimport grpc"
    )
    assert room_violations(source, "kvtier.server.cache") == []
    for module, door in DOORS.items():
        room, name = door.split(".")[1:]
        assert room_violations(f"def f():\n    from ...{room} import {name}", module) == []


def test_a_planted_heavy_import_is_found() -> None:
    """A heavy import is found behind another module and a package, but not inside a function or for types only."""
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"
    modules = {
        "kvtier.server.cli": "from ..cuda.region import Region",
        "kvtier.cuda": "import numpy as np",
        "kvtier.cuda.region": "from .pages import touch",
        "kvtier.cuda.pages": "class C:\n    import torch",
        "kvtier.cuda.copy": "import torch",
        "kvtier.server.lazy": lazy,
    }
    found = heavy_at_start(modules, {"kvtier.cuda"}, {"kvtier.server.cli", "kvtier.server.lazy"})
    assert sorted(found) == ["kvtier.cuda.pages:2: torch is loaded at start", "kvtier.cuda:1: numpy is loaded at start"]
