"""`python tools/write_docs.py`: writes the parts of the documentation that are made from the code; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.server.config import render

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- reference -->\n", "<!-- end -->\n"


def configuration(page: str) -> str:
    """Returns the page with the tables of all settings in their place."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{CONFIGURATION} has no place for the settings, between {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}\n{render.reference()}\n{END}{tail}"


def main() -> int:
    """Returns 1 where a page differs and `--check` was asked for."""
    old = CONFIGURATION.read_text()
    new = configuration(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print(f"{CONFIGURATION.name} is not what the code says: make docs-reference", file=sys.stderr)
        return int(new != old)
    CONFIGURATION.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
