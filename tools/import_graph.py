"""Import graph of the package: prints it and checks its rules.

    python tools/import_graph.py [--folders | --check]

Reads the source files and does not import them. The root of the repository is the package `kvtier`.
Imports inside functions and under `TYPE_CHECKING` count like all others. The rules are in
docs/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "kvtier"

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "protos": frozenset(),
    "tiers": frozenset({"protos"}),
    "cuda": frozenset({"protos"}),
    "server": frozenset({"protos", "tiers", "cuda", "client"}),
    "client": frozenset({"protos", "cuda"}),
}
"""For each top-level folder, the other top-level folders that it may import."""

GENERATED = "kvtier.protos.v1"

MIRRORED_ERRORS = frozenset({"LimitExceeded", "NotOwner"})
"""Exceptions that exist in the client and in the tiers, each with the same reason on the wire. The
core raises a `CoreError`, and callers of the client catch a `KVTierError`."""

MOST_LINES = 450
MOST_FUNCTION_LINES = 60
FEW_LINES = 80
"""A file with fewer lines needs at least two importers, unless `SMALL_FILES` excuses it."""

SMALL_FILES = {
    "*/__init__.py": "a package's own file",
    "*/__main__.py": "an entry point",
    "/server/cli.py": "an entry point",
    "/server/commands/*.py": "one module per command, imported by name when the command runs",
    "/server/process/gc_tuning.py": "a dependency of its own: the garbage collector",
    "/server/process/systemd.py": "a dependency of its own: systemd's notify socket",
    "/server/telemetry/grpc_health.py": "a dependency of its own: grpc_health",
    "/client/engines/*/config.py": "the same role has the same name in each adapter",
    "/client/engines/*/layout.py": "the same role has the same name in each adapter",
    "/client/engines/vllm/sleep.py": "a dependency of its own: vLLM's sleep mode",
    "/client/engines/vllm_tier/compat.py": "a dependency of its own: vLLM's tiering",
    "/tiers/eviction/lru.py": "one module per eviction policy",
    "/tiers/disk/check.py": "one module per tier and check, as tiers/lmdb/check.py",
    "/tiers/lmdb/check.py": "one module per tier and check, as tiers/disk/check.py",
}
"""Small files that may have fewer than two importers, each with the reason."""


@dataclass(frozen=True)
class Import:
    """One imported name. `from a import b` imports `a.b`.

    `at_start` is False for an import in a function or under `TYPE_CHECKING`.
    """

    target: str
    line: int
    relative: bool
    at_start: bool


@dataclass(frozen=True)
class Module:
    """One module of the package."""

    name: str
    path: str
    source: str

    @property
    def is_package(self) -> bool:
        return self.path.rpartition("/")[2] == "__init__.py"

    @property
    def folder(self) -> str:
        """Top-level folder of the module; empty for the `__init__.py` of the root."""
        return self.path.partition("/")[0] if "/" in self.path else ""

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(imports_of(self.source, self.name, is_package=self.is_package))


@dataclass(frozen=True)
class Arrow:
    """The module `source` imports the module `target`."""

    source: Module
    target: Module
    line: int
    at_start: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yields the imports of a source text; resolves relative imports."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, relative=False, at_start=at_start)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{prefix}.{alias.name}", node.lineno, relative=node.level > 0, at_start=at_start)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, at_start=False)
            for child in node.orelse:
                yield from visit(child, at_start=at_start)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_start=at_start and not inside)

    yield from visit(ast.parse(source), at_start=True)


def read_modules(root: Path) -> dict[str, Module]:
    """Returns the modules of the package by their full names, generated stubs included."""
    paths = [path for folder in sorted(MAY_IMPORT) for path in sorted((root / folder).rglob("*.py"))]
    modules = {}
    for path in [root / "__init__.py", *paths]:
        if path.exists():
            relative = path.relative_to(root)
            name = ".".join([PACKAGE, *relative.with_suffix("").parts]).removesuffix(".__init__")
            modules[name] = Module(name, relative.as_posix(), path.read_text())
    return modules


def arrows_of(modules: Mapping[str, Module]) -> list[Arrow]:
    """Returns the imports between modules.

    The target of `from a import b` is `a.b` if that is a module, else `a`.
    """
    found = []
    for module in modules.values():
        for item in module.imports:
            target = modules.get(item.target) or modules.get(item.target.rpartition(".")[0])
            if target is not None and target != module:
                found.append(Arrow(module, target, item.line, item.at_start))
    return found


def folder_counts(arrows: Iterable[Arrow]) -> Counter[tuple[str, str]]:
    """Returns the number of imports between each two top-level folders."""
    return Counter(
        (arrow.source.folder, arrow.target.folder)
        for arrow in arrows
        if arrow.source.folder != arrow.target.folder and arrow.target.folder
    )


def subfolder_counts(arrows: Iterable[Arrow]) -> Counter[tuple[str, str]]:
    """Returns the number of imports between each two folders of any depth."""
    folders = [(_parent(arrow.source), _parent(arrow.target)) for arrow in arrows]
    return Counter((source, target) for source, target in folders if source != target and target)


def _parent(module: Module) -> str:
    return module.path.rpartition("/")[0]


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns one shortest cycle for each strongly connected component with more than one node."""
    found, done = [], set[str]()
    for start in sorted(graph):
        if start in done:
            continue
        path = _shortest_path_back(graph, start)
        if path:
            found.append(path)
            done.update(node for node in graph if _reaches(graph, start, node) and _reaches(graph, node, start))
    return found


def _shortest_path_back(graph: Mapping[str, Iterable[str]], start: str) -> list[str]:
    queue, before = [start], dict[str, str]()
    for node in queue:
        for following in sorted(graph.get(node, ())):
            if following == start:
                path = [node]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1]
            if following not in before:
                before[following] = node
                queue.append(following)
    return []


def _reaches(graph: Mapping[str, Iterable[str]], start: str, end: str) -> bool:
    seen, todo = {start}, [start]
    while todo:
        for following in graph.get(todo.pop(), ()):
            if following == end:
                return True
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return start == end


def file_cycles(arrows: Iterable[Arrow]) -> list[str]:
    """Returns cycles between files."""
    graph = defaultdict(set)
    for arrow in arrows:
        graph[arrow.source.path].add(arrow.target.path)
    return [f"import cycle between files: {' -> '.join([*path, path[0]])}" for path in cycles(graph)]


def folder_cycles(arrows: Iterable[Arrow]) -> list[str]:
    """Returns cycles between the entries (sub-folders and files) of each folder."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for arrow in arrows:
        source, target = arrow.source.path.split("/"), arrow.target.path.split("/")
        depth = next(index for index, (a, b) in enumerate(zip(source, target, strict=False)) if a != b)
        graphs["/".join(source[:depth])]["/".join(source[: depth + 1])].add("/".join(target[: depth + 1]))
    return [
        f"import cycle between folders: {' -> '.join([*path, path[0]])}"
        for folder in sorted(graphs)
        for path in cycles(graphs[folder])
        if not all(node.endswith(".py") for node in path)  # `file_cycles` has these
    ]


def against_the_arrows(arrows: Iterable[Arrow]) -> list[str]:
    """Returns imports of another top-level folder that `MAY_IMPORT` does not allow."""
    found = []
    for arrow in arrows:
        source, target = arrow.source.folder, arrow.target.folder
        if not source or not target or target in MAY_IMPORT[source] | {source}:
            continue
        found.append(f"{arrow.source.path}:{arrow.line}: {source} may not import {target} ({arrow.target.path})")
    return found


def public_classes(modules: Iterable[Module]) -> dict[str, list[Module]]:
    """Returns the modules that define a public class, by the name of the class."""
    homes = defaultdict(list)
    for module in modules:
        for node in ast.parse(module.source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return homes


def duplicate_classes(modules: Iterable[Module]) -> list[str]:
    """Returns names that several public classes have.

    A mirrored exception may exist once in the client and once in the tiers.
    """
    return [
        f"public class {name} exists {len(homes)} times: {', '.join(module.path for module in homes)}"
        for name, homes in sorted(public_classes(modules).items())
        if len(homes) > 1
        and not (name in MIRRORED_ERRORS and sorted(module.folder for module in homes) == ["client", "tiers"])
    ]


def sizes(modules: Iterable[Module], arrows: Iterable[Arrow]) -> list[str]:
    """Returns files that are too long, and short ones with fewer than two importers."""
    importers = defaultdict(set)
    for arrow in arrows:
        importers[arrow.target.path].add(arrow.source.path)
    found = []
    for module in modules:
        lines, users = module.source.count("\n"), sorted(importers[module.path])
        excused = any(fnmatch(f"/{module.path}", pattern) for pattern in SMALL_FILES)
        if lines > MOST_LINES:
            found.append(f"{module.path}: {lines} lines; {MOST_LINES} at most")
        elif lines < FEW_LINES and len(users) <= 1 and not excused:
            found.append(f"{module.path}: {lines} lines and {f'one importer ({users[0]})' if users else 'no importer'}")
    return found


def long_functions(modules: Iterable[Module]) -> list[str]:
    """Returns functions that are too long."""
    return [
        f"{module.path}: {node.name} has {lines} lines; {MOST_FUNCTION_LINES} at most"
        for module in modules
        for node in ast.walk(ast.parse(module.source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > MOST_FUNCTION_LINES
    ]


def check(root: Path) -> list[str]:
    """Returns all violations of the rules."""
    modules = read_modules(root)
    arrows = arrows_of(modules)
    product = [module for module in modules.values() if not f"{module.name}.".startswith(f"{GENERATED}.")]
    return [
        *against_the_arrows(arrows),
        *file_cycles(arrows),
        *folder_cycles(arrows),
        *duplicate_classes(product),
        *sizes(product, arrows),
        *long_functions(product),
    ]


def print_arrows(counts: Counter[tuple[str, str]]) -> None:
    """Prints one line per importing folder."""
    for source in sorted({source for source, _ in counts}):
        targets = ", ".join(f"{target} ({counts[source, target]})" for s, target in sorted(counts) if s == source)
        print(f"{source or PACKAGE} -> {targets}")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Prints the import graph of the package and checks its rules.")
    parser.add_argument("--folders", action="store_true", help="also print the imports between sub-folders")
    parser.add_argument("--check", action="store_true", help="print only violations; exit with 1 if there are any")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository (default: this one)")
    options = parser.parse_args(arguments)
    if options.check:
        found = check(options.root)
        print("\n".join(found) or "the import graph and the sizes of files and functions are as they should be")
        return int(bool(found))
    arrows = arrows_of(read_modules(options.root))
    print_arrows(subfolder_counts(arrows) if options.folders else folder_counts(arrows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
