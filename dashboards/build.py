"""Writes Grafana's JSON from the definitions (`make generate`); `--check` compares instead."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from . import definitions
from .hosts import HOSTS
from .panels import build
from .proxy import PROXY

__all__ = ["FOLDER", "rendered"]

FOLDER = Path(__file__).resolve().parent / "grafana"


def rendered() -> dict[str, str]:
    """Returns the content of each JSON file by file name."""
    return {
        f"{spec.uid.removeprefix('kvtier-')}.json": json.dumps(build(spec), cls=JSONEncoder, indent=2) + "\n"
        for spec in (*definitions.DASHBOARDS, HOSTS, PROXY)
    }


def main() -> int:
    """Writes or checks the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    if parser.parse_args().check:
        stale = [name for name, text in rendered().items() if (FOLDER / name).read_text(encoding="utf-8") != text]
        print("\n".join(f"grafana/{name} is out of date: run make generate" for name in stale), file=sys.stderr)
        return 1 if stale else 0
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
