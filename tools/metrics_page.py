"""Writes docs/metrics.md from the table of all metrics; with `--check` it says whether the page is as it would be."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtier.server.telemetry.definitions import ROOMS, Row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = """\
# Metrics

What `kvtier serve --metrics HOST:PORT` exposes at `/metrics`, in Prometheus' text format or as OpenMetrics. This page is
written from the code (`tools/metrics_page.py`), and a test holds it against a server.

- `sum(kvtier_tier_hits_total) + sum(kvtier_lookup_misses_total) == sum(kvtier_lookup_keys_total)`: every looked-up key counts
  once. `kvtier_namespace_hits_total` and `kvtier_namespace_misses_total` say the same per namespace.
- The values of each label are few. Tiers and tenants are those of the configuration; whoever has no table of his own counts under
  the tenant `""`. The first 64 namespaces are told apart, those that come later count as `other`, per tenant.
- Counters begin at 0 with the server. Where all values of the labels are known at the start, they are there from the start.
- `process_*` are the standard metrics of a process (memory, CPU, descriptors, start), of the server's main process. Its
  resident memory includes what was read of `lmdb` tiers, which is page cache: see [Memory](tuning.md#memory).
- Engines have metrics of their own: see [Engines](engines.md#metrics-of-the-connector).

Dashboards and alerts made of these: [dashboards/](../dashboards).
"""


def page() -> str:
    """Returns the text of the page."""
    parts = [_HEAD]
    for room, rows in ROOMS.items():
        table = "\n".join(map(_line, rows))
        parts.append(f"## {room}\n\n| metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n{table}\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    return f"| `{row.exposed}` | {row.kind} | {labels} | {row.unit} | {row.text} |"


def main() -> int:
    """Writes the page, or checks it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is another")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.name} is not what the code says: run tools/metrics_page.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
