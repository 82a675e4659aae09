"""The example of an external tier passes the contract that every tier passes."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest
from contracts.secondary_tier import SecondaryTierContract
from contracts.tier import DONE, MIB, MISSING, SPACE, empty, full
from harness.launch import launch
from harness.traffic import PART, assert_stored, store

from kvtier.server.cli import main
from kvtier.tiers.secondary_tier import NamespaceId, SecondaryTier, TierDamagedError, TierInUseError
from kvtier.tiers.storage.fsck import check

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "third_party_tier"

pytestmark = pytest.mark.usefixtures("no_leaks")


def sqlite_tier() -> Any:
    """Returns the example's class, imported as by a server that has the example on its path."""
    spec = importlib.util.spec_from_file_location("sqlite_tier", EXAMPLE / "sqlite_tier.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SQLiteTier


class TestSQLiteTier(SecondaryTierContract):
    child_source = f"""
        sys.path.insert(0, {str(EXAMPLE)!r})
        from sqlite_tier import SQLiteTier

        def make(directory, size_bytes):
            return SQLiteTier("child", directory, size_bytes)
    """

    def make_tier(self, directory: Path, size_bytes: int) -> SecondaryTier:
        tier: SecondaryTier = sqlite_tier()("sqlite", directory, size_bytes)
        return tier

    def corrupt(self, tier: SecondaryTier, namespace: NamespaceId, key: bytes) -> None:
        connection = sqlite3.connect(tier._path)  # type: ignore[attr-defined]
        with connection:
            [(number, content)] = connection.execute(
                "SELECT id, content FROM blocks WHERE name = ?", (namespace + key,)
            ).fetchall()
            damaged = bytearray(content)
            damaged[len(damaged) // 2] ^= 1
            connection.execute("UPDATE blocks SET content = ? WHERE id = ?", (bytes(damaged), number))
        connection.close()


def test_a_server_keeps_blocks_in_the_example_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the example's configuration, blocks survive a kill of the server."""
    path = os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    endpoint = f"unix:{tmp_path}/s"
    with launch(tmp_path, "--config", f"{EXAMPLE}/kvtier.toml") as server:
        assert server.wait_ready()["tiers"] == ["cpu", "sqlite"]
        keys = store(endpoint)
        server.process.kill()
        server.process.wait()
    with launch(tmp_path, "--config", f"{EXAMPLE}/kvtier.toml") as server:
        server.wait_ready()
        assert_stored(endpoint, keys)
        assert main(["fsck", "--online", "--endpoint", endpoint]) == 0
        assert server.end() == 0
    assert (tmp_path / "data" / "sqlite" / "blocks.sqlite").stat().st_size >= len(keys) * PART


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    tier = sqlite_tier()("a", tmp_path, 64 * MIB)
    with pytest.raises(TierInUseError, match="in use"):
        sqlite_tier()("b", tmp_path, 64 * MIB)
    tier.close()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """SQLite cannot read the file; it stays unchanged."""
    (tmp_path / "blocks.sqlite").write_bytes(b"no store " * 1000)
    with pytest.raises(TierDamagedError, match="not a database"):
        sqlite_tier()("a", tmp_path, 64 * MIB)
    assert (tmp_path / "blocks.sqlite").read_bytes() == b"no store " * 1000


@pytest.mark.parametrize("sizes", [b"", b"\0\x11", struct.pack("<3Q", 1, 1, 2), struct.pack("<2Q", 1, 1), b"\xff" * 24])
def test_fsck_reports_a_row_with_damaged_sizes(tmp_path: Path, sizes: bytes) -> None:
    """The block counts as damaged, and the check continues."""
    tier = TestSQLiteTier().make_tier(tmp_path, 64 * MIB)
    tier.store([full(b"%d" % number, [b"a", b"b", b"c"]) for number in range(3)])
    connection = sqlite3.connect(tmp_path / "blocks.sqlite")
    with connection:
        connection.execute("UPDATE blocks SET sizes = ? WHERE name = ?", (sizes, SPACE + b"1"))
    connection.close()
    found = [finding.name for step in check(tier, repair=True) for finding in step.findings]
    assert found == [SPACE + b"1"]
    assert tier.load([empty(b"%d" % number, (1, 1, 1)) for number in range(3)]) == [DONE, MISSING, DONE]
    tier.close()


def test_fsck_finds_and_removes_a_damaged_block(tmp_path: Path) -> None:
    contract = TestSQLiteTier()
    tier = contract.make_tier(tmp_path, 64 * MIB)
    tier.store([full(b"%03d" % number, [bytes([number])] * 3) for number in range(200)])
    contract.corrupt(tier, SPACE, b"007")
    for repair in (False, True):
        found = [finding for step in check(tier, repair=repair) for finding in step.findings]
        assert [(finding.name, finding.nbytes, finding.repaired) for finding in found] == [(SPACE + b"007", 3, repair)]
    assert [finding for step in check(tier, repair=False) for finding in step.findings] == []
    assert tier.load([empty(b"007", (1, 1, 1)), empty(b"008", (1, 1, 1))]) == [MISSING, DONE]
    tier.close()
