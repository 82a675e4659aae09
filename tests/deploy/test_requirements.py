"""The image's requirements with hashes, compared with constraints.txt and pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "docker" / "requirements"
EXTRAS = ("server", "s3", "encryption", "events", "tracing")
IMAGE = {"python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux", "extra": ""}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(text: str) -> dict[str, str]:
    """Returns the version of each pinned package."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def applying(texts: list[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in texts]
    return [each for each in requirements if each.marker is None or each.marker.evaluate(dict(IMAGE))]


def test_each_extra_of_the_image_has_a_file() -> None:
    """The recipe reads the file of each extra, and `make requirements` writes these files."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*EXTRAS, "build"}
    assert f"IMAGE_EXTRAS := {' '.join(EXTRAS)}\n" in (ROOT / "Makefile").read_text()
    recipe = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert "--require-hashes" in recipe
    assert "PIP_ONLY_BINARY=:all:" in recipe
    assert "python:3.13" in recipe


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_each_line_pins_a_version_and_its_hashes(path: Path) -> None:
    """No line names another file or index, from which pip would install without a hash."""
    entries = path.read_text().replace("\\\n", " ").splitlines()
    assert entries
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", entry), entry


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_versions_are_those_of_the_constraints(extra: str) -> None:
    found = pinned((FOLDER / f"{extra}.txt").read_text())
    constraints = pinned((ROOT / "constraints.txt").read_text())
    assert {name: constraints.get(name) for name in found} == found


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_file_has_all_packages_that_the_extra_needs(extra: str) -> None:
    """The ranges of pyproject.toml, and what the installed packages need in turn."""
    found = pinned((FOLDER / f"{extra}.txt").read_text())
    project = PROJECT["project"]
    wanted = applying(project["dependencies"] + project["optional-dependencies"][extra])
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        assert name in found, f"run make requirements: {name} is missing"
        assert requirement.specifier.contains(found[name], prereleases=True), f"{requirement}, not {found[name]}"
        if name not in seen:
            seen.add(name)
            wanted += applying(metadata.requires(name) or [])
    assert seen == found.keys(), "the file has packages that nothing needs"


def test_the_build_needs_no_other_package() -> None:
    [requirement] = applying(PROJECT["build-system"]["requires"])
    [(name, version)] = pinned((FOLDER / "build.txt").read_text()).items()
    assert name == requirement.name
    assert requirement.specifier.contains(version)
