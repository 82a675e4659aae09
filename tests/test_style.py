"""The language check of `tools/check_style.py`: each rule is shown to fail on a planted example."""

from __future__ import annotations

import subprocess
from pathlib import Path

import check_style
import pytest

PLANTED = {
    "whoever": "Returns a session that whoever calls may use.",
    "whatever": "Whatever breaks, the engine sees a miss.",
    "somebody": "Ends what somebody else's class made.",
    "he": "Asks the client who he is.",
    "Who": "Who goes first by least recent use.",
    "take note": "Takes note that a child has ended.",
    "let go": "The session lets go of the region.",
    "to be had": "None if no room is to be had.",
    "come about": "Waits for what is to come about.",
    "of late": "Keys that were asked for of late.",
    "so many": "Ends within so many seconds.",
    "part with": "The order in which a tier parts with blocks.",
    "stand still": "The loop stands still.",
    "by heart": "Tiers that do not know by heart what they hold.",
    "in order that": "In order that no reader waits.",
    "as good as": "Its id is as good as a password.",
    "for whom": "For whom a slot is reserved.",
    "has come to": "Says what has come to pass.",
    "what becomes of": "Says what becomes of a load.",
    "is none": "Waits if there is none.",
    "own words": "In the kernel's words, not its own words.",
    "where = if": "Returns None where there is no GPU.",
    "outside document": "As DESIGN §9 says.",
    "outside path": "Reads ../shared/data/trace.jsonl.",
    "issue number": "Found in issue 7.",
}
"""One sentence of the old language for each marker."""

PLAIN = """
The server evicts blocks of the tenant that is furthest above its quota. Callers who hold a token
may read, and the caller decides where the region lies. There are so many keys that a list does not
fit. Each part with a checksum is verified. `None` if the session has ended: `return x is None`.
See docs/behaviour.md and issues/12345 of vLLM.
"""


def _names(path: str, text: str, tmp_path: Path) -> set[str]:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return {name for _, name, _ in check_style.findings(path, tmp_path)}


def test_every_marker_has_a_planted_example() -> None:
    """A marker without an example here might match nothing."""
    assert PLANTED.keys() == check_style.PHRASES.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_marker_is_found(name: str, tmp_path: Path) -> None:
    """In Markdown, and in a docstring of Python."""
    assert name in _names("page.md", f"A page.\n\n{PLANTED[name]}\n", tmp_path)
    assert name in _names("module.py", f'"""{PLANTED[name]}"""\n', tmp_path)


@pytest.mark.parametrize("text", ["# It takes\n    # note of a key.\n", 'X = ("it takes "\n     "note of a key")\n'])
def test_a_phrase_over_a_line_break_is_found(text: str, tmp_path: Path) -> None:
    """In a comment and in a text of two pieces."""
    assert _names("module.py", text, tmp_path) == {"take note"}


def test_plain_english_has_no_findings(tmp_path: Path) -> None:
    """Words that resemble a marker pass."""
    assert _names("page.md", PLAIN, tmp_path) == set()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", f'"""{"long prose " * 10}"""\n'),
        ("a.py", f"def f():\n    # {'long prose ' * 10}\n    return 1\n"),
        ("a.py", f"X = 1  # {'long prose ' * 10}\n"),
        ("a.py", f'X = 1\n"""{"long prose " * 10}"""\n'),
        ("a.proto", f"  // {'long prose ' * 10}\n"),
        ("a.md", f"- {'long prose ' * 10}\n"),
    ],
)
def test_wide_prose_is_found(path: str, text: str, tmp_path: Path) -> None:
    """Docstrings, comments and comments of protos have 100 columns at most."""
    assert _names(path, text, tmp_path) == {"wide prose"}


def test_tables_code_and_links_of_pages_may_be_wider(tmp_path: Path) -> None:
    """A Markdown line has no break in them."""
    wide = "long prose " * 10
    page = f"| {wide} |\n\n```\n{wide}\n```\n\n`{wide}`\n"
    assert _names("a.md", page, tmp_path) == set()


@pytest.mark.parametrize(
    "text",
    [
        f'X = "{"long text " * 11}"\n',
        f"# https://example.org/{'a' * 100}\n",
        f"X = [{', '.join(['10'] * 22)}]  # noqa: E501, RUF100, and more\n",
        f'"""{"x" * 90}"""\n',
    ],
)
def test_code_links_and_pragmas_may_be_wider(text: str, tmp_path: Path) -> None:
    """The limit is for prose."""
    assert _names("a.py", text, tmp_path) == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A relative link leads to a file inside the repository; code blocks are not looked at."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").touch()
    good = "[a](there.md) [b](there.md#part) [c](https://example.org/x) [d](#part)\n```\n[e](gone.md)\n```\n"
    assert _names("docs/page.md", good, tmp_path) == set()
    assert _names("docs/page.md", "[a](gone.md)", tmp_path) == {"broken link"}
    assert _names("docs/page.md", "[a](../../etc)", tmp_path) == {"broken link"}


def test_a_citation_must_be_defined(tmp_path: Path) -> None:
    """`docs/behaviour.md` defines the numbered behaviours."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "behaviour.md").write_text("- B3.8 A lookup is a lease.\n")
    assert _names("a.py", "# A lease (B3.8).\n", tmp_path) == set()
    assert _names("a.py", "# A lease (B3.9).\n", tmp_path) == {"unknown behaviour"}


def test_the_command_fails_on_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints file and line of each finding in the files that git does not ignore."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored.md\n")
    (tmp_path / "ignored.md").write_text(PLANTED["whatever"])
    page = tmp_path / "page.md"
    page.write_text("The server.\nWhatever breaks.\n")
    assert check_style.main([], tmp_path) == 1
    assert capsys.readouterr().out == "page.md:2: whatever: Whatever\n"
    page.write_text("If a call fails.\n")
    assert check_style.main([], tmp_path) == 0
