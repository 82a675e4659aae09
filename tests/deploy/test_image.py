"""The Dockerfile, as far as it can be checked without a Docker daemon."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
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


@needs_tools
def test_build_context_is_complete(tmp_path: Path) -> None:
    """The files that .dockerignore admits build a wheel with all modules of the repository."""
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
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        found = {name for name in wheel.namelist() if name.startswith("kvtier/")}
    listed = subprocess.run(
        ["git", "ls-files", "--", "client", "cuda", "protos", "server", "tiers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {f"kvtier/{name}" for name in listed if not fnmatch.fnmatch(name, "*.binpb")} <= found
