"""The benchmark runs, and its rows are what a machine can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_rows_of_one_part(tmp_path: Path) -> None:
    """A part of the benchmark against a real server: every ratio is of a limit that was measured in the same run."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench", "--only", "lookups", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    values = {row["name"]: row["value"] for row in rows}
    assert all(set(row) == {"name", "value", "unit", "ratio", "limit"} for row in rows)
    assert all(value > 0 for value in values.values())
    compared = [row for row in rows if row["limit"] is not None]
    assert compared
    for row in compared:
        assert row["ratio"] == values[row["limit"]] / row["value"], row
    assert all(name in done.stdout for name in values)
