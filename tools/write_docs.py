"""Writes the parts of the documentation that are generated from the code.

python tools/write_docs.py          # write
python tools/write_docs.py --check  # compare; exit with 1 if a page differs
"""

from __future__ import annotations

import sys
from pathlib import Path

import document_api
import document_commands
import metrics_page

from kvtier.server.config import render

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIGURATION = DOCS / "configuration.md"
BEGIN, END = "<!-- reference -->\n", "<!-- end -->\n"


def configuration(page: str) -> str:
    """Returns the page with the tables of all settings."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{CONFIGURATION} has no place for the settings: {BEGIN.strip()} … {END.strip()}")
    return f"{head}{BEGIN}\n{render.reference()}\n{END}{tail}"


def pages() -> dict[Path, str]:
    """Returns every generated page with its text."""
    return {
        CONFIGURATION: configuration(CONFIGURATION.read_text()),
        document_commands.PAGE: document_commands.page(),
        metrics_page.PAGE: metrics_page.page(),
        DOCS / "api.md": document_api.page(),
    }


def main() -> int:
    """Writes the pages, or compares them; returns the exit code."""
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} differs from the code: make generate", file=sys.stderr)
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
