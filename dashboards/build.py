"""Writes Grafana's JSON from the screens; with `--check` says whether it is as it would be. Run by `make dashboards`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from .kit import build
from .screens import SCREENS

__all__ = ["FOLDER", "rendered"]

FOLDER = Path(__file__).resolve().parent / "grafana"


def rendered() -> dict[str, str]:
    """Returns the text of each file by its name."""
    return {
        f"{screen.uid.removeprefix('kvtier-')}.json": json.dumps(build(screen), cls=JSONEncoder, indent=2) + "\n"
        for screen in SCREENS
    }


def main() -> int:
    """Writes the files, or checks them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is another")
    if parser.parse_args().check:
        stale = [name for name, text in rendered().items() if (FOLDER / name).read_text(encoding="utf-8") != text]
        print(
            "\n".join(f"grafana/{name} is not what the code says: make dashboards" for name in stale), file=sys.stderr
        )
        return 1 if stale else 0
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
