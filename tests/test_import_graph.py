"""The tool `import_graph.py`: each of its rules is shown to fail on a planted tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import import_graph
import pytest

LONG = "x = 1\n" * import_graph.FEW_LINES
"""Makes a file long enough to need no second importer."""


def _plant(root: Path, files: Mapping[str, str]) -> Path:
    for path, source in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source + LONG)
        for folder in file.relative_to(root).parents:
            (root / folder / "__init__.py").touch()
    return root


def test_a_tree_without_violations_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Siblings, allowed folders, foreign packages pass."""
    _plant(
        tmp_path,
        {
            "server/app.py": "from ..client import sync\nfrom ..tiers.secondary_tier import V\nfrom ..protos.v1 import cache_pb2\n",
            "client/transport/tcp.py": "from ... import __version__\nfrom ...cuda.host import copy\n",
            "cuda/host/copy.py": "class Copy: ...\n",
            "client/sync.py": "import grpc\n",
            "tiers/secondary_tier.py": "from ..protos.v1 import cache_pb2\nclass V: ...\n",
            "protos/v1/cache_pb2.py": "",
        },
    )
    assert import_graph.check(tmp_path) == []
    assert import_graph.main(["--check", "--root", str(tmp_path)]) == 0
    assert import_graph.main(["--root", str(tmp_path)]) == 0
    arrows = "client -> cuda (1)\nserver -> client (1), protos (1), tiers (1)\ntiers -> protos (1)\n"
    assert arrows in capsys.readouterr().out
    assert import_graph.main(["--folders", "--root", str(tmp_path)]) == 0
    assert "client/transport -> cuda/host (1)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("tiers/lmdb/tier.py", "def f():\n    from ...cuda import host\n", "tiers may not import cuda"),
        ("tiers/secondary_tier.py", "from ..client import errors\n", "tiers may not import client"),
        ("cuda/copy.py", "from .. import tiers\n", "cuda may not import tiers"),
        ("protos/endpoint.py", "from ..cuda import host\n", "protos may not import cuda"),
        ("client/sync.py", "from ..server import config\n", "client may not import server"),
        ("client/engines/vllm/worker.py", "from ....tiers import base\n", "client may not import tiers"),
        ("client/sync.py", "import kvtier.server.config\n", "client may not import server"),
        ("client/sync.py", "if TYPE_CHECKING:\n    from ..server import config\n", "client may not import server"),
        ("client/sync.py", "def f():\n    from ..server import config\n", "client may not import server"),
    ],
)
def test_an_import_against_the_arrows_is_found(path: str, source: str, expected: str, tmp_path: Path) -> None:
    """Relative or absolute, at start, in a function or for types only."""
    others = (
        "cuda/host/a.py",
        "protos/v1/cache_pb2.py",
        "tiers/secondary_tier.py",
        "server/config/b.py",
        "client/sync.py",
    )
    _plant(tmp_path, {**dict.fromkeys((*others, "client/transport/c.py"), ""), path: source})
    assert [line for line in import_graph.check(tmp_path) if line.startswith(f"{path}:") and expected in line]


@pytest.mark.parametrize(
    "back",
    [
        "from .a import A\n",
        "from . import a\n",
        "def f():\n    from .a import A\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n",
        "if typing.TYPE_CHECKING:\n    from ...tiers.core import a\n",
    ],
)
def test_a_cycle_between_files_is_found(back: str, tmp_path: Path) -> None:
    """However the import back is written."""
    _plant(tmp_path, {"tiers/core/a.py": "from .b import B\n", "tiers/core/b.py": back})
    assert import_graph.check(tmp_path) == [
        "import cycle between files: tiers/core/a.py -> tiers/core/b.py -> tiers/core/a.py"
    ]


def test_a_cycle_through_a_package_file_is_found(tmp_path: Path) -> None:
    """A name that `__init__.py` defines is imported from it."""
    _plant(tmp_path, {"client/sync.py": "from . import Client\n"})
    (tmp_path / "client/__init__.py").write_text("from .sync import Client\n")
    assert import_graph.check(tmp_path) == [
        "import cycle between files: client/__init__.py -> client/sync.py -> client/__init__.py"
    ]


def test_a_cycle_between_sub_folders_is_found(tmp_path: Path) -> None:
    """A sub-folder counts as a whole: no file of it needs to be in a cycle itself."""
    _plant(tmp_path, {"tiers/core/a.py": "from ..stats.b import B\n", "tiers/core/c.py": ""})
    _plant(tmp_path, {"tiers/stats/b.py": "", "tiers/stats/d.py": "from ..core.c import C\n"})
    assert import_graph.check(tmp_path) == ["import cycle between folders: tiers/core -> tiers/stats -> tiers/core"]


def test_a_file_beside_sub_folders_counts_as_itself(tmp_path: Path) -> None:
    """One file above a sub-folder and another one below it are no cycle."""
    folder = "client/engines/vllm"
    _plant(tmp_path, {f"{folder}/a.py": "", f"{folder}/b.py": "from .worker import c\n"})
    _plant(tmp_path, {f"{folder}/worker/c.py": "", f"{folder}/worker/d.py": "from ..a import A\n"})
    assert import_graph.check(tmp_path) == []


def test_a_cycle_of_nested_folders_is_found(tmp_path: Path) -> None:
    """Between a file and a sub-folder, one level deeper."""
    worker = "client/engines/vllm/worker"
    _plant(tmp_path, {"client/engines/vllm/a.py": "from .worker.c import C\n", f"{worker}/c.py": ""})
    _plant(tmp_path, {f"{worker}/d.py": "def f():\n    from ..a import A\n"})
    assert import_graph.check(tmp_path) == [
        f"import cycle between folders: client/engines/vllm/a.py -> {worker} -> client/engines/vllm/a.py"
    ]


def test_each_cycle_is_reported_once() -> None:
    """Two cycles are two findings, and a file that only leads to one belongs to none."""
    graph = {"a": "b", "b": "a", "c": "d", "d": "c", "e": "a"}
    assert import_graph.cycles({node: [to] for node, to in graph.items()}) == [["a", "b"], ["c", "d"]]


def test_two_public_classes_of_one_name_are_found(tmp_path: Path) -> None:
    """Private classes, nested ones and generated stubs do not count."""
    twice = "class Line: ...\nclass _Run: ...\nclass Outer{}:\n    class Inner: ...\n"
    _plant(tmp_path, {"tiers/a.py": twice.format(1), "server/b.py": twice.format(2)})
    _plant(tmp_path, {"protos/v1/cache_pb2.py": "class Outer1: ...\n"})
    assert import_graph.check(tmp_path) == ["public class Line exists 2 times: server/b.py, tiers/a.py"]


def test_mirrored_exceptions_are_one_of_the_client_and_one_of_the_tiers(tmp_path: Path) -> None:
    """The core and the client have exceptions of their own for the same reason."""
    _plant(tmp_path, {"tiers/errors.py": "class NotOwner: ...\n", "client/errors.py": "class NotOwner: ...\n"})
    assert import_graph.check(tmp_path) == []
    _plant(tmp_path, {"client/sync.py": "class NotOwner: ...\n"})
    assert len(import_graph.check(tmp_path)) == 1


def test_a_long_file_is_found(tmp_path: Path) -> None:
    """450 lines at most."""
    _plant(tmp_path, {"tiers/a.py": ""})
    (tmp_path / "tiers/a.py").write_text("x = 1\n" * (import_graph.MOST_LINES + 1))
    assert import_graph.check(tmp_path) == ["tiers/a.py: 451 lines; 450 at most"]


@pytest.mark.parametrize("lines", [60, 61])
def test_a_long_function_is_found(tmp_path: Path, lines: int) -> None:
    """60 lines at most, with its docstring."""
    source = "class A:\n    async def f():\n" + "        x = 1\n" * (lines - 1)
    _plant(tmp_path, {"server/a.py": ""})
    (tmp_path / "server/__init__.py").write_text(source)
    expected = [] if lines == 60 else [f"server/__init__.py: f has {lines} lines; 60 at most"]
    assert [line for line in import_graph.check(tmp_path) if " f has " in line] == expected


def test_a_small_file_needs_a_second_importer_or_an_excuse(tmp_path: Path) -> None:
    """Entry points and packages' own files are excused."""
    _plant(tmp_path, {"tiers/a.py": "from . import small\n", "tiers/b.py": "", "server/__main__.py": ""})
    (tmp_path / "tiers/small.py").write_text("x = 1\n")
    (tmp_path / "server/__main__.py").write_text("x = 1\n")
    assert import_graph.check(tmp_path) == ["tiers/small.py: 1 lines and one importer (tiers/a.py)"]
    (tmp_path / "tiers/b.py").write_text("from .small import x\n" + LONG)
    assert import_graph.check(tmp_path) == []
