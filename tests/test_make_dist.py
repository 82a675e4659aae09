"""`make dist` refuses a wheel that is not what it is to be."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from kvtier import __version__

TOOL = Path(__file__).resolve().parent.parent / "tools" / "make_dist.py"
WHEEL = f"kvtier-{__version__}-py3-none-any.whl"
ACCOUNT = f"kvtier-{__version__}.dist-info"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, as a module."""
    spec = importlib.util.spec_from_file_location("make_dist", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _wheel(directory: Path, files: set[str], *, licence: bool = True, told: str = "", name: str = WHEEL) -> Path:
    wheel = directory / name
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted(files):
            archive.writestr(file, "")
        archive.writestr(f"{ACCOUNT}/METADATA", told)
        if licence:
            archive.writestr(f"{ACCOUNT}/licenses/LICENSE", "Apache")
    return wheel


def test_what_is_to_be_shipped_is_what_the_rooms_have(tool: ModuleType) -> None:
    """Types, protos and every module; nothing that only builders need."""
    files = tool.shipped_files()
    assert {
        "kvtier/py.typed",
        "kvtier/__init__.py",
        "kvtier/protos/kvtier/v1/cache.proto",
        "kvtier/server/cli.py",
    } <= files
    assert "kvtier/protos/baseline.binpb" not in files


def test_a_whole_wheel_passes(tool: ModuleType, tmp_path: Path) -> None:
    """All files, once each, and the licence."""
    files = tool.shipped_files()
    tool.check_contents(_wheel(tmp_path, files), files)


@pytest.mark.parametrize(
    ("take", "add", "licence", "complaint"),
    [
        ({"kvtier/py.typed"}, set(), True, "lacks kvtier/py.typed"),
        (set(), {"client/sync.py"}, True, "unexpected or doubled files: client/sync.py"),
        (set(), set(), False, "no licence"),
    ],
)
def test_a_wheel_that_is_not_whole_is_refused(
    tool: ModuleType, tmp_path: Path, take: set[str], add: set[str], *, licence: bool, complaint: str
) -> None:
    """A file that is missing, packages that are there twice, no licence: each is said."""
    files = tool.shipped_files()
    with pytest.raises(tool.Wrong, match=complaint):
        tool.check_contents(_wheel(tmp_path, (files - take) | add, licence=licence), files)


@pytest.mark.parametrize(
    ("name", "told", "complaint"),
    [
        ("kvtier-9.9.9-py3-none-any.whl", "", "does not have version"),
        (WHEEL, "Metadata-Version: 2.4\nName: kvtier\nVersion: 1\nSummary: x\n", "lacks License-Expression"),
    ],
)
def test_metadata_that_does_not_hold_is_refused(
    tool: ModuleType, tmp_path: Path, name: str, told: str, complaint: str
) -> None:
    """Another version than the source's, or fields that people look for."""
    with pytest.raises(tool.Wrong, match=complaint):
        tool.check_metadata(_wheel(tmp_path, set(), name=name, told=told))


def test_a_client_with_the_servers_packages_is_refused(tool: ModuleType) -> None:
    """The environment of these tests has them all."""
    with pytest.raises(tool.Wrong, match=r"installs .*lmdb, .*prometheus-client"):
        tool.check_client_is_lean(Path(sys.executable))
