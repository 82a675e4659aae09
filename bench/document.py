"""Generator of the figures and plots in docs/performance*.md (`python -m bench.document`).

It reads bench/results. With `--check` it writes nothing and fails if a page differs. Two comments
in a page enclose generated text:

    <!-- rows FILE PATTERN -->    table of the rows of FILE whose names match PATTERN
    <!-- peers FILE -->           comparison with peers
    <!-- facts FILE -->           machine, date and commit
    <!-- summary FILE -->         main figures in one paragraph
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
from .plots import bar_chart

__all__ = ["PAGES", "RESULTS", "documents", "main", "rendered"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = (DOCS / "performance.md", DOCS / "performance-tables.md")
PLOTS = DOCS / "plots"
RESULTS = ROOT / "bench" / "results"
PLACE = re.compile(r"(<!-- (rows|peers|facts|summary) (\S+) ?(.*?) ?-->\n)(.*?)(<!-- end -->)", re.DOTALL)
FACTS = (
    "date",
    "kvtier",
    "cpu",
    "memory",
    "huge pages",
    "kernel",
    "disk",
    "python",
    "packages",
    "store",
    "peer",
    "load",
)
SIZES = ("64 KiB", "256 KiB", "2 MiB")
SUMMARY = """\
On a machine with {cpu}, an engine stores blocks of 2 MiB through shared memory at {shm store, 64 x 2 MiB} GB/s and loads
them at {shm load, 64 x 2 MiB} GB/s. For comparison, memcpy with one thread copies {memcpy, 64 x 2 MiB} GB/s; kvtier uses
two threads. Over loopback, TCP stores at {tcp store, 64 x 2 MiB} GB/s and loads at {tcp load, 64 x 2 MiB} GB/s. gRPC
stores at {grpc store, 64 x 2 MiB} GB/s and loads at {grpc load, 64 x 2 MiB} GB/s. A lookup of 64 keys takes
{lookup of hits, 64 keys, p50} ms (median); a bare gRPC call with as many keys takes {bare unary call, 64 keys, p50} ms.
The server answers its first call {server: start to first answer} s after its start. The figures were measured on {date}.
Another machine has other figures, so compare ratios.
"""


def documents(results: Path) -> dict[Path, str]:
    """Returns all generated files with their texts."""
    texts = {page: rendered(page.read_text(encoding="utf-8"), results) for page in PAGES}
    bench, peers = (json.loads((results / name).read_text()) for name in ("bench.json", "peers.json"))
    return texts | {PLOTS / "transports.svg": _transports(bench), PLOTS / "peers.svg": _peer_bars(peers)}


def rendered(page: str, results: Path) -> str:
    """Returns the page with the figures of `results`; "Not measured yet." if a file is missing."""
    return PLACE.sub(lambda place: f"{place[1]}\n{_text(results, *place.group(2, 3, 4))}\n\n{place[6]}", page)


def main() -> int:
    """Writes the files, or compares them; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.document")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if pages and results differ")
    options = parser.parse_args()
    texts = documents(RESULTS)
    if options.check:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    PLOTS.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


def _text(results: Path, kind: str, name: str, pattern: str) -> str:
    path = results / name
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text())
    lines = {
        "rows": lambda: _rows(found, pattern),
        "peers": lambda: _peers(found),
        "facts": lambda: _facts(found),
        "summary": lambda: _summary(found),
    }
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
            yield f"\n{one['name']}: figures are missing: {one['absent']}."


def _facts(found: Any) -> Iterator[str]:
    facts = found["facts"] if isinstance(found, dict) else found[0].get("facts", {})
    for name in FACTS:
        if name in facts:
            yield f"- {name}: {facts[name]}"


def _summary(found: list[dict[str, Any]]) -> Iterator[str]:
    values = {row["name"]: cell_text((row["value"], None)) for row in found if "name" in row}
    values |= {name: text for name, text in found[0].get("facts", {}).items() if name in ("cpu", "date")}
    words = re.sub(r"\{(.*?)\}", lambda name: values[name[1]], SUMMARY).split()
    line = ""
    for word in words:
        if len(line) + len(word) >= 100:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _transports(found: list[dict[str, Any]]) -> str:
    values = {row["name"]: row["value"] for row in found if "name" in row}
    actions = [(action, size) for action in ("store", "load") for size in SIZES]
    series = {
        "memcpy, one thread": [values.get(f"memcpy, 64 x {size}") for _, size in actions],
        "shared memory": [values.get(f"shm {action}, 64 x {size}") for action, size in actions],
        "TCP": [values.get(f"tcp {action}, 64 x {size}") for action, size in actions],
        "gRPC": [values.get(f"grpc {action}, 64 x {size}") for action, size in actions],
    }
    groups = [f"{action} {size}" for action, size in actions]
    return bar_chart("Stores and loads of 64 blocks in one call", "GB/s", groups, series)


def _peer_bars(found: dict[str, Any]) -> str:
    rows = {row["name"]: row["of_memcpy"] for row in found["rows"]}
    series = {action: rows[f"{action}, 64 x 2 MiB"] for action in ("store", "load")}
    groups = [one["name"] for one in found["columns"]]
    return bar_chart("64 blocks of 2 MiB, beside peers", "1 = memcpy by one thread", groups, series)


if __name__ == "__main__":
    sys.exit(main())
