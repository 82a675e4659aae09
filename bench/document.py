"""`python -m bench.document`: writes the tables of docs/performance.md from bench/results; `--check` only compares.

The page says where a table goes and which rows it has, between two comments; nobody types a figure:

    <!-- rows FILE PATTERN -->    the rows of FILE whose names match
    <!-- peers FILE -->           the comparison with peers
    <!-- facts FILE -->           machine, date and commit
    <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .peers.table import cell_text

__all__ = ["main", "rendered"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "bench" / "results"
PLACE = re.compile(r"(<!-- (rows|peers|facts) (\S+) ?(.*?) ?-->\n)(.*?)(<!-- end -->)", re.DOTALL)
FACTS = ("date", "kvtier", "cpu", "memory", "huge pages", "kernel", "disk", "python", "packages", "load")


def rendered(page: str, results: Path) -> str:
    """Returns the page with every table as the files in `results` have it; what was not measured yet is said to be so."""
    return PLACE.sub(lambda place: f"{place[1]}\n{_text(results, *place.group(2, 3, 4))}\n\n{place[6]}", page)


def main() -> int:
    """Writes the page, or checks it; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.document")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where page and results differ")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = rendered(before, RESULTS)
    if options.check:
        return int(before != after)
    PAGE.write_text(after)
    return 0


def _text(results: Path, kind: str, name: str, pattern: str) -> str:
    path = results / name
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text())
    lines = {"rows": lambda: _rows(found, pattern), "peers": lambda: _peers(found), "facts": lambda: _facts(found)}
    return "\n".join(lines[kind]()) or "Not measured yet."


def _rows(found: list[dict[str, Any]], pattern: str) -> Iterator[str]:
    rows = [row for row in found if "name" in row and re.search(pattern, row["name"])]
    if rows:
        yield "| what | value | unit | of | ratio |"
        yield "|---|---:|---|---|---:|"
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        yield f"| {row['name']} | {cell_text((row['value'], None))} | {row['unit']} | {row['limit'] or ''} | {ratio} |"


def _peers(found: dict[str, Any]) -> Iterator[str]:
    yield "| what | unit | " + " | ".join(f"{one['name']} ({one['version']})" for one in found["columns"]) + " |"
    yield "|---|---|" + "---:|" * len(found["columns"])
    for row in found["rows"]:
        cells = [cell_text(cell) for cell in zip(row["values"], row["of_memcpy"], strict=True)]
        yield f"| {row['name']} | {row['unit']} | {' | '.join(cells)} |"
    for one in found["columns"]:
        if one["absent"]:
            yield f"\n{one['name']} has not all figures: {one['absent']}."


def _facts(found: Any) -> Iterator[str]:
    facts = found["facts"] if isinstance(found, dict) else found[0].get("facts", {})
    for name in FACTS:
        if name in facts:
            yield f"- {name}: {facts[name]}"


if __name__ == "__main__":
    sys.exit(main())
