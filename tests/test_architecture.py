"""The architecture of the package: imports, pure cores, what is loaded at start.

The arrows between folders, cycles, names and sizes are checked by `tools/import_graph.py`; its own
tests are in `test_import_graph.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import import_graph
import pytest
from import_graph import MAY_IMPORT, ROOT, Module

NEVER = {
    "tiers": {"grpc", "google", "torch"},
    "cuda": {"grpc", "google"},
}
"""For each top-level folder, packages that it may not import, not even in a function."""

VALUES = "kvtier.protos.values"
BACKOFF = "kvtier.protos.backoff"
PLAIN = (BACKOFF, VALUES, "kvtier.protos.buffers", "kvtier.protos.endpoint")
"""The modules of `protos` that tiers and cuda may import, because they load no protobuf."""

CORES = {
    "kvtier.tiers.core": ("kvtier.tiers",),
    "kvtier.tiers.eviction": ("kvtier.tiers",),
    "kvtier.tiers.stats": ("kvtier.tiers",),
    "kvtier.client.offload": ("kvtier.client.offload", BACKOFF),
    "kvtier.client.handoff": ("kvtier.client.handoff", "kvtier.client.offload", VALUES),
}
"""Packages that only decide, and the packages of kvtier that each of them may import."""

STORAGE = ("kvtier.tiers.disk", "kvtier.tiers.lmdb", "kvtier.tiers.storage")
"""Packages with I/O, which no core may import."""

PURE = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math"),
    *("operator", "struct", "types", "typing", "zlib"),
}
"""Modules of the standard library that a core may import: no I/O, no clock, no threads."""

FOREIGN_PRIVATE = {
    *("_checkpoints", "_insert_block_hash", "_maybe_evict_cached_block"),  # vLLM
    *("_collector_to_names", "_labelnames"),  # prometheus-client
    *("_exit", "_run_exitfuncs", "_shutdown"),  # Python
    "_DummyThread",  # threading
    "_foreach_mul_",  # torch
}
"""Private names of other libraries that tests use."""

NAMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Attribute, ast.Name, ast.alias)
"""The nodes that use or define a name."""

HEAVY = {"numpy", "torch", "transformers", "vllm"}
"""Packages that the server may not load at start: it is ready within 1 s and below 100 MB."""


def _module(name: str, source: str) -> Module:
    return Module(name, name.removeprefix("kvtier.").replace(".", "/") + ".py", source)


@cache
def package() -> dict[str, Module]:
    """Returns the modules of the package, which are read and parsed once."""
    return import_graph.read_modules(ROOT)


def product() -> dict[str, Module]:
    """Returns the modules of the package, generated stubs excepted."""
    return {name: module for name, module in package().items() if not name.startswith(import_graph.GENERATED)}


def forbidden_imports(module: Module) -> Iterator[str]:
    """Yields absolute imports of kvtier, and packages that the folder may never import."""
    for item in module.imports:
        package = item.target.split(".")[0]
        if package == "kvtier" and not item.relative:
            yield f"{module.path}:{item.line}: import {item.target} relatively"
        elif package in NEVER.get(module.folder, set()):
            yield f"{module.path}:{item.line}: {module.folder} may not import {package}"
        elif module.folder in NEVER and loads_protobuf(item.target):
            yield f"{module.path}:{item.line}: {module.folder} may not import {item.target}"


def loads_protobuf(target: str) -> bool:
    """Returns whether an import is of `protos`, but not of one of its plain modules."""
    plain = tuple(f"{module}." for module in PLAIN)
    return f"{target}.".startswith("kvtier.protos.") and not target.startswith(plain)


def heavy_at_start(modules: dict[str, Module], entries: set[str]) -> list[str]:
    """Returns heavy imports at start of `entries` and of the modules that these import."""
    found, seen, todo = [], set(), sorted(entries)
    while todo:
        module = modules[todo.pop()]
        if module.name in seen:
            continue
        seen.add(module.name)
        for item in module.imports:
            if not item.at_start:
                continue
            if item.target.split(".")[0] in HEAVY:
                found.append(f"{module.path}:{item.line}: {item.target} is loaded at start")
            parts = item.target.split(".")
            todo += [name for end in range(len(parts)) if (name := ".".join(parts[: end + 1])) in modules]
    return found


def impure_imports(module: Module, core: str) -> list[str]:
    """Returns imports of a core that are neither pure modules nor packages that it may know."""
    return [
        f"{module.path}:{item.line}: {item.target}"
        for item in module.imports
        if item.target.split(".")[0] not in PURE
        and (
            not f"{item.target}.".startswith(tuple(f"{known}." for known in CORES[core]))
            or f"{item.target}.".startswith(tuple(f"{storage}." for storage in STORAGE))
        )
    ]


def private_uses(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the private attributes that a module reads or calls."""
    uses = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return {name for name in uses if name.startswith("_") and not name.startswith("__")}


def definitions(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names that a module assigns, defines or imports."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name


def nodes_of(source: str) -> list[ast.AST]:
    """Returns the nodes of a module that use or define a name."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, NAMES)]


def test_top_level_folders_import_only_what_they_may() -> None:
    """The arrows are those of docs/architecture.md; nothing imports the server."""
    modules = package()
    assert {module.folder for module in modules.values()} == {"", *MAY_IMPORT}
    assert import_graph.against_the_arrows(import_graph.arrows_of(modules)) == []


def test_no_import_cycles() -> None:
    """Neither between files nor between folders, functions and `TYPE_CHECKING` included."""
    arrows = import_graph.arrows_of(package())
    assert import_graph.file_cycles(arrows) == []
    assert import_graph.folder_cycles(arrows) == []


def test_no_forbidden_imports() -> None:
    """Product code imports itself relatively; tiers and cuda know neither gRPC nor protobuf."""
    assert [line for module in product().values() for line in forbidden_imports(module)] == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("kvtier.tiers.secondary_tier", "import grpc", "tiers may not import grpc"),
        (
            "kvtier.tiers.secondary_tier",
            "from ..protos.v1 import cache_pb2",
            "tiers may not import kvtier.protos.v1.cache_pb2",
        ),
        ("kvtier.tiers.secondary_tier", "from .. import protos", "tiers may not import kvtier.protos"),
        ("kvtier.cuda.host.copy", "from ...protos import endpoint", "cuda may not import kvtier.protos.endpoint"),
        ("kvtier.tiers.lmdb.tier", "def f():\n    from torch import nn", "tiers may not import torch"),
        ("kvtier.cuda.host.copy", "from google import protobuf", "cuda may not import google"),
        ("kvtier.server.cli", "from kvtier.tiers import base", "relatively"),
    ],
)
def test_a_planted_forbidden_import_is_found(module: str, source: str, expected: str) -> None:
    """The check can fail."""
    assert [line for line in forbidden_imports(_module(module, source)) if expected in line]


def test_server_and_tiers_load_nothing_heavy_at_start() -> None:
    """Neither torch nor numpy is loaded by importing any module of the server or of the tiers."""
    modules = product()
    entries = {name for name, module in modules.items() if module.folder in {"server", "tiers"}}
    assert heavy_at_start(modules, entries) == []


def test_client_loads_no_engine_at_start() -> None:
    """Importing the client, its engine adapters excepted, loads neither torch nor an engine."""
    modules = product()
    entries = {name for name, m in modules.items() if m.folder == "client" and "engines" not in name.split(".")}
    assert [line for line in heavy_at_start(modules, entries) if "numpy" not in line] == []


def test_a_planted_heavy_import_is_found() -> None:
    """Heavy imports count in other modules and packages, not in functions or for types only."""
    sources = {
        "kvtier.server.cli": "from ..cuda.region import Region",
        "kvtier.cuda": "import numpy as np",
        "kvtier.cuda.region": "from .pages import touch",
        "kvtier.cuda.pages": "class C:\n    import torch",
        "kvtier.cuda.copy": "import torch",
        "kvtier.server.lazy": "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
    }
    modules = {name: _module(name, source) for name, source in sources.items()}
    modules["kvtier.cuda"] = Module("kvtier.cuda", "cuda/__init__.py", sources["kvtier.cuda"])
    found = heavy_at_start(modules, {"kvtier.server.cli", "kvtier.server.lazy"})
    assert sorted(found) == [
        "cuda/__init__.py:1: numpy is loaded at start",
        "cuda/pages.py:2: torch is loaded at start",
    ]


@pytest.mark.parametrize("core", CORES)
def test_a_core_is_pure(core: str) -> None:
    """B2 B4: a core does no I/O, reads no clock, starts no thread and knows no engine."""
    members = [module for name, module in product().items() if f"{name}.".startswith(f"{core}.")]
    assert len(members) > 4
    assert [line for module in members for line in impure_imports(module, core)] == []


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_load_no_protobuf(name: str) -> None:
    """They import the standard library only. Those that a core uses are pure."""
    module = product()[name]
    assert {item.target.split(".")[0] for item in module.imports} <= sys.stdlib_module_names
    if name in (BACKOFF, VALUES):
        assert impure_imports(module, "kvtier.tiers.core") == []


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    "line",
    ["import time", "import threading", "from os import path", "from ...tiers.lmdb import tier", "import vllm"],
)
def test_a_planted_impurity_is_found(line: str, core: str) -> None:
    """The check of the cores can fail."""
    assert impure_imports(_module(f"{core}.core", f"def f():\n    {line}"), core)


def test_private_names_of_tests_exist() -> None:
    """Fails also for tests that run late, such as those of engines, if a name has changed."""
    known, uses = set(FOREIGN_PRIVATE), {}
    for folder in (*MAY_IMPORT, "bench", "examples", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = nodes_of(path.read_text())
            known.update(definitions(nodes))
            if folder == "tests":
                uses[path.relative_to(ROOT)] = private_uses(nodes)
    assert not {f"{path}: {name}" for path, names in uses.items() for name in names - known}


def test_a_planted_private_name_is_found() -> None:
    nodes = nodes_of("self._a = _b = x._c = y\ndef _e(): ...\nfrom m import _f, g as _h\n")
    assert private_uses(nodes) - set(definitions(nodes)) == {"_c"}
    assert {"_b", "_e", "_f", "_h"} <= set(definitions(nodes))


def test_offloading_does_not_know_the_hand_off() -> None:
    """`client/handoff` may import `client/offload`, not the other way round."""
    module = _module("kvtier.client.offload.core", "from ..handoff import core")
    assert impure_imports(module, "kvtier.client.offload")
