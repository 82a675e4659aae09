"""`make dist` refuses an incomplete or wrong wheel."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
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
    spec = importlib.util.spec_from_file_location("make_dist", TOOL)
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


def test_each_extra_is_installed_or_resolved(tool: ModuleType) -> None:
    """An extra that is missing here would never be tested before a release."""
    project = tomllib.loads((TOOL.parents[1] / "pyproject.toml").read_text())["project"]
    installed = {extra for extras in tool.INSTALLED for extra in extras.split(",") if extra}
    groups = (installed, set(tool.RESOLVED), set(tool.DEVELOPMENT))
    assert set.union(*groups) == set(project["optional-dependencies"])
    assert sum(map(len, groups)) == len(set.union(*groups))


def test_the_wheel_has_every_module(tool: ModuleType) -> None:
    """Types, protos and every module, but no build files."""
    files = tool.shipped_files()
    assert {
        "kvtier/py.typed",
        "kvtier/__init__.py",
        "kvtier/protos/kvtier/v1/cache.proto",
        "kvtier/server/cli.py",
    } <= files
    assert "kvtier/protos/baseline.binpb" not in files


def test_a_complete_wheel_passes(tool: ModuleType, tmp_path: Path) -> None:
    """All files once, and the licence."""
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
def test_an_incomplete_wheel_is_refused(
    tool: ModuleType, tmp_path: Path, take: set[str], add: set[str], *, licence: bool, complaint: str
) -> None:
    """Missing and duplicate files and a missing licence are named."""
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
def test_wrong_metadata_is_refused(tool: ModuleType, tmp_path: Path, name: str, told: str, complaint: str) -> None:
    """The version must be the source's, and the fields of an index must be present."""
    with pytest.raises(tool.Wrong, match=complaint):
        tool.check_metadata(_wheel(tmp_path, set(), name=name, told=told))


def test_a_client_with_server_packages_is_refused(tool: ModuleType) -> None:
    """The tests' environment has all of the server's packages."""
    with pytest.raises(tool.Wrong, match=r"installs .*lmdb, .*prometheus-client"):
        tool.check_client_is_lean(Path(sys.executable))
