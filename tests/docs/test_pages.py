"""Every block of the documentation that people may copy, run as they would; what cannot be run here says what it needs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.pages import ROOT, Block, blocks_of, commands_of, pages
from harness.shell import Desk

from kvtier.server.config.loader import load

NEEDS = {
    "needs an index": "installs from a package index, or starts other targets of make",
    "needs a cluster": "a cluster of Kubernetes",
    "needs a model": "transformers with a model in memory",
    "needs an engine": "an engine that serves prompts",
    "needs docker": "a docker daemon",
    "needs root": "changes the system that it runs on",
    "needs vllm": "vLLM",
}
"""Why a block is not run. Every other one is; what can be checked of these without what they need is checked."""

ELSEWHERE = {
    "docs/security.md": "tests of its own, with certificates and tokens",
    "docs/commands.md": "generated from the parser",
    "docs/metrics.md": "generated from the code",
}
"""Pages whose blocks other tests run."""

BLOCKS = [block for page in pages() for block in blocks_of(page) if block.page not in ELSEWHERE]


def _of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A reader's place. With a short name: a socket's path has a limit."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    place = Desk(path)
    yield place
    place.clear()
    shutil.rmtree(path, ignore_errors=True)


def test_every_block_says_what_it_is() -> None:
    """In a language that is looked at here, and with a mark that is known."""
    known = {"", *NEEDS, "own server", "no server"}
    languages = {"console", "python", "toml", "json", "yaml", "ini", "mermaid", ""}
    assert [str(block) for block in BLOCKS if block.language not in languages] == []
    strange = [f"{block}: {block.mark}" for block in BLOCKS if block.mark not in known and block.mark[:5] != "from "]
    assert strange == []


@pytest.mark.parametrize("block", [block for block in _of("console") if block.mark not in NEEDS], ids=str)
def test_a_console_block_works(desk: Desk, block: Block) -> None:
    """Each of its commands ends with 0, one after the other in one shell."""
    commands = commands_of(block)
    assert commands, "a console block without a command: is the dollar missing?"
    if block.mark:
        done = desk.run(commands)
    else:
        with desk.server() as server:
            server.wait_ready()
            desk.serve_a_request()
            done = desk.run(commands)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", [block for block in _of("console") if block.mark in NEEDS], ids=str)
def test_what_cannot_be_run_is_right_as_far_as_can_be_seen(block: Block) -> None:
    """The shell can read it, `kvtier` has these flags, `make` these targets, and the files are there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands_of(block):
        read = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert read.returncode == 0, read.stderr
        words = shlex.split(command, comments=True)
        if words[0] == "kvtier":
            helped = [sys.executable, "-m", "kvtier.server", words[1], "--help"]
            known = subprocess.run(helped, capture_output=True, text=True, check=True).stdout
            assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == []
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets
        for path in re.findall(r"\b(?:deploy|examples|docs)/[\w./-]+", command):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("block", [block for block in _of("python") if not block.mark], ids=str)
def test_python_works(desk: Desk, block: Block) -> None:
    """As a script, beside a server."""
    with desk.server() as server:
        server.wait_ready()
        done = desk.run_python(block.text)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", [block for block in _of("python") if block.mark in NEEDS], ids=str)
def test_python_that_needs_more_can_be_read(block: Block) -> None:
    """It compiles, and what it imports of kvtier is there."""
    compile(block.text, str(block), "exec")
    for module, names in re.findall(r"^from (kvtier[\w.]*) import (.+)$", block.text, re.MULTILINE):
        source = ROOT.joinpath(*module.split(".")[1:])
        text = (source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text()
        assert [name for name in names.split(", ") if f'"{name}"' not in text] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark.startswith("from ")], ids=str)
def test_what_is_shown_of_a_file_is_in_it(block: Block) -> None:
    """Line for line, so that the tests of the file are tests of the page."""
    file = (ROOT / block.mark.removeprefix("from ")).read_text()
    for piece in block.text.split("\n...\n"):
        assert piece.strip("\n") in file


@pytest.mark.parametrize("block", _of("toml"), ids=str)
def test_settings_are_settings(tmp_path: Path, block: Block) -> None:
    """A server takes them."""
    file = tmp_path / "kvtier.toml"
    file.write_text(block.text)
    load({"data_dir": f"{tmp_path}/data"}, file=file)


@pytest.mark.parametrize("block", _of("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    """It can be read."""
    json.loads(block.text)
