"""docs/claims.md: each command exists and can run, and each piece of evidence exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, date, datetime

import pytest
from harness.pages import ROOT

PAGE = (ROOT / "docs" / "claims.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for section in re.findall(r"^## .+?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if "| refuted by |" in section
    for line in section.splitlines()
    if line.startswith("| ") and not line.startswith(("| claim |", "|---"))
]
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`([^`]+)`", row[3])})
SEPARATE = ("tests/engines/", "tests/sglang_engine/", "tests/web/")
"""Folders of tests that only run in other environments, and that pytest does not collect here."""


def _words(program: str) -> list[list[str]]:
    return [words for words in map(shlex.split, COMMANDS) if words[0] == program]


def _tests() -> set[str]:
    """Every test, file and folder of tests that the page names."""
    named = {test for row in ROWS for test in re.findall(r"`(tests/[^`]+)`", row[1])}
    return named | {word for words in _words("pytest") for word in words[1:]}


def test_each_claim_has_evidence_a_date_and_a_command() -> None:
    assert len(ROWS) > 50
    for claim, evidence, day, refuted in ROWS:
        assert claim.endswith(".")
        assert re.search(r"\[[^\]]+\]\([^)]+\)", claim), f"no page: {claim}"
        assert re.search(r"`(tests|bench)/[^`]+`", evidence), claim
        assert date.fromisoformat(day.removeprefix("changed ")) <= datetime.now(UTC).date(), claim
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", refuted), claim
    assert {shlex.split(command)[0] for command in COMMANDS} == {"make", "pytest", "python"}


def test_figures_have_the_date_of_their_file() -> None:
    """A file without a date, that of the steps, is exempt."""
    for _, evidence, day, _ in ROWS:
        for file in re.findall(r"`(bench/results/[\w.-]+)`", evidence):
            found = json.loads((ROOT / file).read_text())
            facts = (found[0] if isinstance(found, list) else found).get("facts")
            assert facts is None or facts["date"][:10] == day, file


def test_make_targets_exist() -> None:
    """With their variables, of which the Makefile uses each."""
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for _, *words in _words("make"):
        assert {word for word in words if "=" not in word} <= targets
        for word in words:
            name, is_variable, value = word.partition("=")
            assert not is_variable or re.search(rf"\b{name}\b", MAKEFILE), word
            assert not value.startswith("tests/") or (ROOT / value).exists(), word


def test_tests_can_be_collected() -> None:
    """By their ids. Of tests in other environments, file and name exist."""
    tests = _tests()
    for test in tests:
        path, _, name = test.partition("::")
        if path.startswith(SEPARATE):
            assert re.search(rf"^def {name}\b", (ROOT / path).read_text(), re.MULTILINE), test
    ids = sorted(test for test in tests if not test.startswith(SEPARATE))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *ids]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("words", _words("python"), ids=" ".join)
def test_programs_accept_their_options(words: list[str]) -> None:
    """`--help` after the options: argparse checks the values before it, and prints all options."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words[1:], "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word.startswith("--") and word not in done.stdout] == []


@pytest.mark.parametrize("options", [["--kills", "30", "--seed", "1"], ["--seconds", "6"]], ids=" ".join)
def test_the_stress_program_accepts_what_make_passes(options: list[str]) -> None:
    """`make torture` and `make stress` run the same program."""
    test_programs_accept_their_options(["python", "-m", "stress", *options])
