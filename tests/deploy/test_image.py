"""The Dockerfile, as far as it can be checked without a Docker daemon."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "deploy" / "docker" / "Dockerfile"
TOOLS = ROOT / "build" / "deploy" / "bin"

needs_tools = pytest.mark.skipif(not TOOLS.exists(), reason="`make test-deploy` installs hadolint")


@needs_tools
def test_dockerfile_lints_without_findings() -> None:
    done = subprocess.run([TOOLS / "hadolint", RECIPE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_image_matches_the_documentation() -> None:
    """User 10001, SIGTERM, a health check by `kvtier status`, no pip in the last stage."""
    text = RECIPE.read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", last, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .*CMD \["kvtier", "status"', last, re.MULTILINE)
    assert "pip" not in re.sub(r"#.*", "", last)
    assert "ARG EXTRAS=server\n" in text
    compose = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())["services"]["kvtier"]
    assert compose["stop_grace_period"] == "40s"
    assert compose["read_only"] is True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from the files that .dockerignore admits."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    admitted = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    context = tmp_path / "context"
    for name in admitted:
        source = ROOT / name
        assert source.exists(), f"{name} is admitted, but does not exist"
        if source.is_dir():
            shutil.copytree(
                source, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            context.mkdir(exist_ok=True)
            shutil.copy(source, context)
    built = subprocess.run(
        [TOOLS / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, context],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return next(tmp_path.glob("*.whl"))


@needs_tools
def test_build_context_is_complete(wheel: Path) -> None:
    """The files that .dockerignore admits build a wheel with all modules of the repository."""
    with zipfile.ZipFile(wheel) as packed:
        found = {name for name in packed.namelist() if name.startswith("kvtier/")}
    listed = subprocess.run(
        ["git", "ls-files", "--", "client", "cuda", "protos", "server", "tiers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {f"kvtier/{name}" for name in listed if not fnmatch.fnmatch(name, "*.binpb")} <= found


@needs_tools
def test_engine_gets_kvtier_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """The manifest's own commands add kvtier to an environment, and replace no other package.

    The files fit into a ConfigMap, which has at most 1 MiB.
    """
    manifest = (ROOT / "deploy" / "kubernetes" / "vllm.yaml").read_text()
    for command in re.findall(r"^#   ((?:python3|tar) .*)", manifest, re.MULTILINE):
        words = command.replace("dist/kvtier-0.1.0-py3-none-any.whl", str(wheel)).replace("build/", "").split()
        subprocess.run(words, cwd=tmp_path, check=True)
    packed = tmp_path / "kvtier.tar.xz"
    assert packed.stat().st_size < 1 << 20
    pod = yaml.safe_load(manifest)["spec"]["template"]["spec"]
    [container], [engine] = pod["initContainers"], pod["containers"]
    assert container["image"] == engine["image"], "compiled packages must fit the engine's Python"
    [path] = [entry["value"] for entry in engine["env"] if entry["name"] == "PYTHONPATH"]
    installed = tmp_path / "installed"
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    [script] = container["args"]
    done = subprocess.run(
        [*container["command"], script.replace("/packages", str(tmp_path)).replace(path, str(installed))],
        env={**os.environ, "HOME": str(tmp_path), "PATH": f"{python.parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {found.name for found in installed.iterdir() if "-" not in found.name} == {"kvtier", "xxhash"}
    used = subprocess.run(
        [sys.executable, "-c", "import kvtier.client, xxhash; print(kvtier.__file__, xxhash.__file__)"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(file.startswith(f"{installed}/") for file in used.stdout.split())
