"""Style check of the prose: plain terms, no outside references, at most 100 columns.

    python tools/check_style.py [--summary] [--hints] [PATH...]

Prints `file:line: finding` and exits with 1 if there is any. The rules are in CONTRIBUTING.md.
`--hints` also prints doubtful phrases. These do not change the exit code.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCOPE = (
    *("server", "client", "tiers", "cuda", "protos", "tests", "bench", "tools", "examples", "dashboards", "deploy"),
    *("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "mkdocs.yml", ".ci", ".github", "SECURITY.md"),
)
"""Folders and files that are checked if no path is given."""

GENERATED_PAGES = {
    f"docs/{name}.md" for name in ("api", "commands", "configuration", "metrics", "performance", "performance-tables")
}
"""Generated pages. Their lines may be longer than 100 columns."""
GENERATED = re.compile(r"^(protos/v1/.*|bench/results/.*\.json|protos/baseline\.binpb)$")
"""Folders and files that are generated or downloaded."""

EXCUSED_FILES = {
    "tools/check_style.py": "names the markers",
    "tests/test_style.py": "plants them",
}
"""Files that are not checked, each with the reason."""

EXCUSED: dict[tuple[str, str], str] = {}
"""(file, finding) -> reason. An entry that matches no finding is itself a finding."""

PROSE_COLUMNS = 100

_GAP = r"(?:[ \t]+|[ \t\"']*\n[ \t]*(?:#|//|\*|>|[frb]*[\"'])?[ \t]*)"
"""Gap between two words of a phrase: blanks, or a line break and the beginning of the next line of a
comment or string."""

_SUBJECT = r"(?:it|that|they|the|a|an|this|these|what|one|each|no)"

MARKERS = {
    "whoever": r"(?i:who(?:so)?ever|whomever)",
    "whatever": r"(?i:whatever|whatsoever)",
    "somebody": r"(?i:somebody|anybody|nobody|everybody|someone|anyone)",
    "he": r"(?i:he|him|his|himself)",
    "Who": r"Who (?:(?!\?)[^.\n]){3,}(?=[.\n])",
    "take note": r"(?i:(?:take|takes|took|taking|taken) note)",
    "let go": r"(?i:(?:let|lets|letting)(?: (?:it|them|that|these|those|him|all|one))? go)(?! on)",
    "to be had": r"(?i:(?:is|are|was|were|be|been) had)",
    "come about": r"(?i:(?:come|comes|came|coming) about)",
    "of late": r"(?i:of late)",
    "so many": r"(?i:so many)(?! [^.;]{0,60}\bthat\b)",
    "part with": r"(?i:(?:to|may|must|can|cannot|not|will|would|and|it|they|tier|what|who|that|which|server|session)"
    r" parts? with|parting with|parted with)",
    "stand still": r"(?i:(?:stand|stands|stood|standing) still)",
    "by heart": r"(?i:by heart)",
    "in order that": r"(?i:in order that)",
    "as good as": r"(?i:as good as)",
    "for whom": r"(?i:for whom|who goes)",
    "has come to": r"(?i:(?:has|have|had) come to)",
    "what becomes of": r"(?i:what (?:becomes|became|has become|is to become) of)",
    "is none": r"is none",
    "own words": r"(?i:(?:its|their) own words)",
    "where = if": r"(?i:where (?:there|none|nothing|nobody) (?:is|are|was|were|has|have|can|may))",
}
"""Forbidden phrases, as regular expressions between word boundaries. A blank matches any gap between
words."""

REFERENCES = {
    "outside document": r"DESIGN(?: § ?\d+|\.md)|BEHAVIOUR(?: B\d+|\.md)|PEERS(?:\.md|'s)"
    r"|(?:FLEET|STYLE|ROADMAP|REDESIGN|BRIEF)\.md",
    "outside path": r"\.\./shared|/work/\w+|/tmp/rf\b",
    "issue number": r"(?i:issues? #?\d+)|(?i:in #\d+)",
}
"""References to things that are not in the repository."""

HINTS = {
    "where = if?": rf"(?i:where {_SUBJECT}) ",
    "for = because?": rf", for {_SUBJECT} ",
    "falls?": r"(?i:(?:session|stream|connection|server|client|process)s? (?:that )?falls?\b)",
    "who?": r"(?i:who) ",
    "room = folder?": r"rooms? (?:may|of|that)",
    "has it done?": r"Has (?:a|an|the|it|what|them|each|all) ",
    "is to be?": r"(?i:(?:is|are) to (?:be|come))",
}
"""Doubtful phrases; many of them are good English."""

_CITATION = re.compile(r"\bB\d+\.\d+\b")
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_PRAGMA = re.compile(r"#\s*(?:noqa|type:|pyright:|pragma:|fmt:|ruff:)")


def _compile(patterns: dict[str, str]) -> dict[str, re.Pattern[str]]:
    return {
        name: re.compile(rf"(?<![\w-])(?:{text.replace(' ', _GAP)})(?!\w)", re.MULTILINE)
        for name, text in patterns.items()
    }


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. `name` is the phrase or the rule, `text` the matching text."""

    path: str
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.text}"


def phrases(path: str, text: str, patterns: dict[str, re.Pattern[str]]) -> Iterator[Finding]:
    """Yields each match of `patterns`, also a match that spans a line break."""
    for name, pattern in patterns.items():
        for match in pattern.finditer(text):
            yield Finding(path, text.count("\n", 0, match.start()) + 1, name, " ".join(match[0].split())[:60])


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line in a comment or docstring, except pragmas."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                yield number, _PRAGMA.split(lines[number - 1])[0].rstrip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment = _PRAGMA.split(token.string)[0].rstrip()
            if comment:
                yield token.start[0], token.line[: token.start[1]].split("\n")[-1] + comment


def prose_of_proto(source: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line with a comment."""
    for number, line in enumerate(source.splitlines(), 1):
        if "//" in line:
            yield number, line.rstrip()


def prose_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line outside of code blocks, tables, headings and HTML.

    A code span or link target counts as one word, because it should not be wrapped.
    """
    blank = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), source)
    for number, line in enumerate(blank.splitlines(), 1):
        if not re.match(r"\s*([|#<]|\[[^\]]+\]:)", line):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: match[0].replace(" ", "_"), line.rstrip())


_PROSE = {".py": prose_of_python, ".proto": prose_of_proto, ".md": prose_of_markdown}


def wide_prose(path: str, text: str) -> Iterator[Finding]:
    """Yields lines longer than `PROSE_COLUMNS`, unless they contain an unbreakable long word (link)."""
    prose = _PROSE.get(Path(path).suffix)
    if prose is None or path in GENERATED_PAGES:
        return
    for number, line in sorted(set(prose(text))):
        if len(line) > PROSE_COLUMNS and max(map(len, line.split())) <= PROSE_COLUMNS // 2:
            yield Finding(path, number, "wide prose", f"{len(line)} columns")


def broken_links(path: str, text: str, root: Path) -> Iterator[Finding]:
    """Yields relative links of a Markdown page whose target is not a file of the repository."""
    if not path.endswith(".md"):
        return
    blank = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _LINK.finditer(blank):
        target = match[1].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            continue
        resolved = (root / path).parent.joinpath(target).resolve()
        if not resolved.is_relative_to(root) or not resolved.exists():
            yield Finding(path, blank.count("\n", 0, match.start()) + 1, "broken link", match[1])


def unknown_citations(path: str, text: str, root: Path) -> Iterator[Finding]:
    """Yields citations such as `B3.8` that `docs/behaviour.md` does not define."""
    page = root / "docs" / "behaviour.md"
    if not page.exists():
        return
    known = set(_CITATION.findall(page.read_text()))
    for match in _CITATION.finditer(text):
        if match[0] not in known:
            yield Finding(path, text.count("\n", 0, match.start()) + 1, "unknown behaviour", match[0])


def files(root: Path, paths: Iterable[str]) -> list[str]:
    """Returns the files under `paths` that git does not ignore, relative to `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return sorted({path for path in listed if not GENERATED.match(path) and (root / path).is_file()})


def check_file(path: str, root: Path, *, hints: bool = False) -> list[Finding]:
    """Returns the findings of one file; binary files have none."""
    try:
        text = (root / path).read_text()
    except UnicodeDecodeError:
        return []
    found = [
        *phrases(path, text, _compile({**MARKERS, **REFERENCES, **(HINTS if hints else {})})),
        *wide_prose(path, text),
        *broken_links(path, text, root),
        *unknown_citations(path, text, root),
    ]
    return sorted(found)


def check(root: Path, paths: Iterable[str], *, hints: bool = False) -> list[Finding]:
    """Returns the findings without an excuse, and a finding for each unused excuse."""
    chosen = [path for path in files(root, paths) if path not in EXCUSED_FILES]
    found = [finding for path in chosen for finding in check_file(path, root, hints=hints)]
    used = {(finding.path, finding.name) for finding in found}
    idle = [
        Finding(path, 1, "idle excuse", f"{name} ({reason})")
        for (path, name), reason in EXCUSED.items()
        if path in chosen and (path, name) not in used
    ]
    return sorted(idle + [finding for finding in found if (finding.path, finding.name) not in EXCUSED])


def summary(found: Iterable[Finding]) -> Iterator[str]:
    """Yields the number of findings per folder, and per name."""
    found = list(found)
    folders = Counter("/".join(finding.path.split("/")[:2][: finding.path.count("/") or 1]) for finding in found)
    for title, counts in (("folder", folders), ("finding", Counter(finding.name for finding in found))):
        yield f"-- by {title}"
        yield from (f"{count:6}  {name}" for name, count in counts.most_common())
    yield f"{len(found):6}  in all"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Checks the prose of the repository.")
    parser.add_argument("paths", nargs="*", help="files and folders (default: the whole repository)")
    parser.add_argument("--summary", action="store_true", help="print the number of findings instead of the findings")
    parser.add_argument("--hints", action="store_true", help="also print doubtful phrases")
    options = parser.parse_args(arguments)
    scope = [str(Path(path).resolve().relative_to(ROOT)) for path in options.paths] or [
        path for path in SCOPE if (ROOT / path).exists()
    ]
    found = check(ROOT, scope, hints=options.hints)
    print("\n".join(summary(found) if options.summary else map(str, found)))
    return int(any(finding.name not in HINTS for finding in found))


if __name__ == "__main__":
    sys.exit(main())
