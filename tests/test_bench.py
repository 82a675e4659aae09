"""The benchmark runs and writes rows as JSON."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tiers.eviction import DEFAULT_POLICY, POLICIES

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_rows_of_one_part(tmp_path: Path) -> None:
    """One part against a real server: each ratio refers to a limit of the same run."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench", "--only", "lookups", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
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


@pytest.mark.slow
def test_the_proxy_is_measured_beside_its_engine(tmp_path: Path) -> None:
    """With stand-in engines. Each kind of answer has a rate, and a ratio to the direct calls."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.proxy", "--requests", "64", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())[1:]}
    for kind in ("whole answers", "streams"):
        direct, proxied = rows[f"stand-in engine, {kind}"], rows[f"through the proxy, {kind}"]
        assert proxied["ratio"] == proxied["value"] / direct["value"] > 0


def test_policies_on_a_trace(tmp_path: Path) -> None:
    """A row per policy and capacity. Unlimited space hits all known blocks; the optimum is best."""
    rng = random.Random(1)
    trace = [[(chain, place) for place in range(rng.randint(1, 8))] for chain in rng.choices(range(12), k=200)]
    ids = {block: number for number, block in enumerate(sorted({block for blocks in trace for block in blocks}))}
    source, path = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    source.write_text("".join(json.dumps({"hash_ids": [ids[block] for block in blocks]}) + "\n" for blocks in trace))
    command = [sys.executable, "-m", "bench.policies", "--trace", str(source), "--json", str(path)]
    command += ["--capacities", "20", "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(set(row) == {"trace", "policy", "capacity", "hit_ratio", "default"} for row in rows)
    assert {row["policy"] for row in rows if row["default"]} == {DEFAULT_POLICY}
    ratios = {(row["policy"], row["capacity"]): row["hit_ratio"] for row in rows}
    assert ratios.keys() == {(policy, capacity) for policy in (*POLICIES, "optimum") for capacity in (20, 1000)}
    everything = 1 - len(ids) / sum(map(len, trace))
    assert all(ratios[policy, 1000] == pytest.approx(everything) for policy in (*POLICIES, "optimum"))
    assert all(0 < ratios[policy, 20] <= ratios["optimum", 20] < everything for policy in POLICIES)
