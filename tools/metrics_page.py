"""Generates docs/metrics.md from the table of all metrics. `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtier.server.telemetry.definitions import SECTIONS, MetricDefinition

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = """\
# Metrics

Reference of the metrics that `kvtier serve --metrics HOST:PORT` exports at `/metrics`, in Prometheus' text format or as
OpenMetrics. This page is generated from the code by `make generate`.

- Every looked-up key counts once, as a hit of one tier or as a miss:
  `sum(kvtier_tier_hits_total) + sum(kvtier_lookup_misses_total) == sum(kvtier_lookup_keys_total)`.
  `kvtier_namespace_hits_total` and `kvtier_namespace_misses_total` count the same keys per namespace.
- Labels have few values. The labels `tier` and `tenant` have only values from the configuration. All tenants without a
  quota or limit count as tenant `""`. The first 64 namespaces of a tenant have a label value each, or fewer if
  others have most of the 128 in all; all further namespaces count as `other`.
- Counters begin at 0 when the server starts. If the labels of a series are known at the start, the server exports the
  series from the start on.
- `process_*` are the standard metrics of a process (memory, CPU, descriptors, start time), for the server's main process.
  The resident memory includes all pages of `lmdb` tiers that the server has read. These pages are page cache
  ([Memory](tuning.md#memory)).
- vLLM exports the [metrics of the connector](engines.md#metrics-of-the-connector).

[`dashboards/`](../dashboards) contains dashboards and alerts.
"""


def page() -> str:
    parts = [_HEAD]
    for title, rows in SECTIONS.items():
        table = "\n".join(map(_line, rows))
        parts.append(f"## {title}\n\n| metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n{table}\n")
    return "\n".join(parts)


def _line(row: MetricDefinition) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    return f"| `{row.exposed}` | {row.kind} | {labels} | {row.unit} | {row.text} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.name} differs from the code: make generate", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
