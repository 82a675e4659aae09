"""Runs the code blocks of the documentation. Blocks that cannot run here are marked."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.command_line import kvtier
from harness.doc_sandbox import DocSandbox
from harness.pages import ROOT, Block, blocks_of, commands_of, pages

from kvtier.server.config.loader import load

NEEDS = {
    "needs an index": "installs from a package index, or runs other make targets",
    "needs a cluster": "a Kubernetes cluster",
    "needs a model": "transformers with a model in memory",
    "needs an engine": "an engine that serves prompts",
    "needs docker": "a docker daemon",
    "needs root": "changes the host system",
    "needs sglang": "SGLang",
    "needs several servers": "servers on several hosts",
    "needs vllm": "vLLM",
}
"""Marks of blocks that are not run, with the cause. These blocks are only checked statically."""

TESTED_ELSEWHERE = {
    "docs/security.md": "tests/server/trust, with certificates and tokens",
    "docs/commands.md": "generated from the parser",
    "docs/metrics.md": "generated from the code",
    "docs/api.md": "generated from the docstrings",
}
"""Pages whose blocks other tests cover."""

BLOCKS = [block for page in pages() for block in blocks_of(page) if block.page not in TESTED_ELSEWHERE]


def _of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.fixture
def sandbox() -> Iterator[DocSandbox]:
    """Environment of a reader. The path is short because the length of a socket path is limited."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    place = DocSandbox(path)
    yield place
    place.clear()
    shutil.rmtree(path, ignore_errors=True)


def test_every_block_has_a_known_language_and_mark() -> None:
    known = {"", *NEEDS, "own server", "no server"}
    languages = {"console", "python", "toml", "json", "yaml", "ini", "mermaid", ""}
    assert [str(block) for block in BLOCKS if block.language not in languages] == []
    strange = [f"{block}: {block.mark}" for block in BLOCKS if block.mark not in known and block.mark[:5] != "from "]
    assert strange == []


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in _of("console") if block.mark not in NEEDS], ids=str)
def test_console_block_runs(sandbox: DocSandbox, block: Block) -> None:
    """All commands of the block run in one shell and exit with 0."""
    commands = commands_of(block)
    assert commands, "a console block without a command: is the dollar missing?"
    if block.mark:
        done = sandbox.run(commands)
    else:
        with sandbox.server() as server:
            server.wait_ready()
            sandbox.serve_a_request()
            done = sandbox.run(commands)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", [block for block in _of("console") if block.mark in NEEDS], ids=str)
def test_console_block_is_valid_without_running(block: Block) -> None:
    """The shell parses it; its `kvtier` flags, `make` targets and repository files exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands_of(block):
        read = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert read.returncode == 0, read.stderr
        words = shlex.split(command, comments=True)
        if words[0] == "kvtier":
            names = words[1:3] if words[1] in ("conversations", "fleet") else words[1:2]
            known = kvtier(*names, "--help").stdout
            assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == []
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets
        for path in re.findall(r"\b(?:deploy|examples|docs)/[\w./-]+", command):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("block", [block for block in _of("python") if not block.mark], ids=str)
def test_python_block_runs(sandbox: DocSandbox, block: Block) -> None:
    """The block runs as a script while a server runs."""
    with sandbox.server() as server:
        server.wait_ready()
        done = sandbox.run_python(block.text)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", [block for block in _of("python") if block.mark in NEEDS], ids=str)
def test_python_block_is_valid_without_running(block: Block) -> None:
    """The block compiles, and the names that it imports from kvtier exist."""
    compile(block.text, str(block), "exec")
    for module, names in re.findall(r"^from (kvtier[\w.]*) import (.+)$", block.text, re.MULTILINE):
        source = ROOT.joinpath(*module.split(".")[1:])
        text = (source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text()
        assert [name for name in names.split(", ") if f'"{name}"' not in text] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark.startswith("from ")], ids=str)
def test_excerpt_matches_its_file(block: Block) -> None:
    """The excerpt occurs in the file line by line, so the file's own tests cover the page."""
    file = (ROOT / block.mark.removeprefix("from ")).read_text()
    for piece in block.text.split("\n...\n"):
        assert piece.strip("\n") in file


@pytest.mark.parametrize("block", _of("toml"), ids=str)
def test_toml_block_is_a_valid_configuration(tmp_path: Path, block: Block) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(block.text)
    load({"data_dir": f"{tmp_path}/data"}, file=file)


@pytest.mark.parametrize("block", _of("json"), ids=str)
def test_json_block_parses(block: Block) -> None:
    json.loads(block.text)


def test_the_tests_of_the_threats_exist() -> None:
    """Each test or class that the table of threats names is in `tests/hostile` or at its path."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())
    assert named
    for file, name in named:
        text = (ROOT / ("tests" if "/" in file else "tests/hostile") / file).read_text()
        assert re.search(rf"^(async def|def|class) {name}\b", text, re.MULTILINE), f"{file}::{name}"
