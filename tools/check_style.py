"""Style check of the prose: plain terms, no outside references, at most 100 columns.

    python tools/check_style.py [PATH...]

Prints `file:line: finding` and exits with 1 if there is any. The rules are in CONTRIBUTING.md.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROSE_COLUMNS = 100

# Some lines of generated pages are wider. The check and its test name the phrases that they forbid.
_WIDE_PAGES = re.compile(r"docs/(api|commands|configuration|metrics|performance|performance-tables)\.md")
_SKIPPED = re.compile(r"protos/(v1/|baseline\.binpb)|bench/results/.*\.json|(tools/check|tests/test)_style\.py")

# Blanks, or a line break and the beginning of the next line of a comment or string.
_GAP = r"(?:[ \t]+|[ \t\"']*\n[ \t]*(?:#|//|\*|>|[frb]*[\"'])?[ \t]*)"

# Forbidden phrases, as regular expressions. A blank matches any gap between two words.
PHRASES = {
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
    "part with": r"(?i:(?:to|must|can|cannot|not|and|it|they|tier|that|server|session) parts? with|part(?:ing|ed) with)",
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
    # References to things that are not in the repository.
    "outside document": r"DESIGN § ?\d+|BEHAVIOUR B\d+|PEERS's|(?:DESIGN|BEHAVIOUR|PEERS|FLEET|STYLE|REDESIGN)\.md",
    "outside path": r"\.\./shared|/work/\w+|/tmp/rf\b",
    "issue number": r"(?i:issues? #?\d+)|(?i:in #\d+)",
}
_EXACT = {name: rf"(?<![\w-])(?:{phrase.replace(' ', _GAP)})(?!\w)" for name, phrase in PHRASES.items()}
# Most files have no phrase. One search for all takes a seventh of the time of one search for each.
_ANY = re.compile(rf"(?<![\w-])(?=[\w./])(?:{'|'.join(_EXACT.values())})")
_CITATION = re.compile(r"\bB\d+\.\d+\b")
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?![a-z]+:|#)([^)\s#]+)[^)\s]*\)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_PRAGMA = re.compile(r"#\s*(?:noqa|type:|pyright:|pragma:|fmt:|ruff:).*")


def _prose(suffix: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields lines of comments, docstrings and paragraphs. A code span or link counts as one word."""
    lines = text.splitlines()
    if suffix == ".py":
        starts = (previous := tokenize.NEWLINE), tokenize.INDENT, tokenize.DEDENT
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            docstring = token.type == tokenize.STRING and previous in starts
            if docstring or (token.type == tokenize.COMMENT and _PRAGMA.sub("", token.string)):
                for number in range(token.start[0], token.end[0] + 1):
                    yield number, _PRAGMA.sub("", lines[number - 1]).rstrip()
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                previous = token.type
    for number, line in enumerate(lines, 1):
        if suffix == ".proto" and "//" in line:
            yield number, line
        if suffix == ".md" and not re.match(r"\s*([|#<]|\[[^\]]+\]:)", line):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: match[0].replace(" ", "_"), line)


def findings(path: str, root: Path = ROOT) -> Iterator[tuple[int, str, str]]:
    """Yields line, name and text of each finding in a file of UTF-8. `path` is relative to `root`."""
    text = (root / path).read_text()
    for name, phrase in _EXACT.items() if _ANY.search(text) else ():
        for match in re.finditer(phrase, text):
            yield text.count("\n", 0, match.start()) + 1, name, " ".join(match[0].split())
    behaviour = root / "docs/behaviour.md"
    cited = list(_CITATION.finditer(text))
    known = _CITATION.findall(behaviour.read_text() if cited and behaviour.exists() else text)
    for match in cited:
        if match[0] not in known:
            yield text.count("\n", 0, match.start()) + 1, "unknown behaviour", match[0]
    suffix = Path(path).suffix
    shown = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text) if suffix == ".md" else text
    for match in _LINK.finditer(shown) if suffix == ".md" else ():
        target = (root / path).parent.joinpath(match[1]).resolve()
        if not target.is_relative_to(root) or not target.exists():
            yield shown.count("\n", 0, match.start()) + 1, "broken link", match[1]
    for number, line in {} if _WIDE_PAGES.fullmatch(path) else dict(_prose(suffix, shown)).items():
        if len(line) > PROSE_COLUMNS and max(map(len, line.split())) <= PROSE_COLUMNS // 2:
            yield number, "wide prose", f"{len(line)} columns"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Returns the exit code."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *arguments]
    found = 0
    output = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for path in sorted(set(output.splitlines())):
        if not _SKIPPED.match(path) and (root / path).is_file() and b"\0" not in (root / path).read_bytes():
            for line, name, text in sorted(findings(path, root)):
                print(f"{path}:{line}: {name}: {text}")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
