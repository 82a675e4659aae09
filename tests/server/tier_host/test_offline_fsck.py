from __future__ import annotations

import json
import shutil
from pathlib import Path

import lmdb
import pytest
from contracts.tier import DONE, MIB, SPACE, content, full
from harness.launch import launch

from kvtier.server.cli import main
from kvtier.server.tier_host import offline_fsck
from kvtier.tiers.disk.format import DISK_STORE, PAGE_BYTES, SlabRecord
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.environment import LMDB_STORE
from kvtier.tiers.lmdb.identity import MARKER_FILE
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import SecondaryTier

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 32 * MIB


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Writes the configuration of an LMDB and a disk tier, both with ten blocks."""
    data = tmp_path / "data"
    tiers: list[SecondaryTier] = [
        LMDBTier("lmdb", data / "lmdb", SIZE, "process"),
        DiskTier("disk", data / "disk", SIZE, "process"),
    ]
    for tier in tiers:
        assert tier.store([full(b"%d" % n, content(n, (70_000,))) for n in range(10)]) == [DONE] * 10
        tier.close()
    path = tmp_path / "kvtier.toml"
    path.write_text(
        f'data_dir = "{data}"\nlisten = ["unix:{tmp_path}/s"]\nregion_size = "32MiB"\n[log]\nformat = "json"\n'
        + "".join(f'[[tiers]]\ntype = "{kind}"\nsize = {SIZE}\n' for kind in ("lmdb", "disk"))
    )
    return path


def damage_a_block(config: Path) -> None:
    """Changes stored bytes of block 3 of the disk tier."""
    directory = config.parent / "data" / "disk"
    tier = DiskTier("disk", directory, SIZE, "process")
    (packed,) = tier._store.index.get([SPACE + b"3"])
    assert packed
    at = SlabRecord.unpack(SPACE + b"3", packed).runs[0].start * PAGE_BYTES
    tier.close()
    with (directory / "slab-00000").open("r+b") as file:
        file.seek(at)
        file.write(b"\0\xff\0")


def run(config: Path, *arguments: str) -> int:
    return main(["fsck", "--config", str(config), *arguments])


def test_sound_tiers_exit_with_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the number of their blocks."""
    assert run(config) == offline_fsck.EXIT_CLEAN == 0
    lmdb, disk = capsys.readouterr().out.splitlines()
    assert lmdb.startswith("lmdb: 10 blocks, ")
    assert disk.startswith("disk: 10 blocks, ")
    assert "none damaged" in lmdb
    assert "none damaged" in disk


def test_a_store_of_an_earlier_format_is_not_checked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server empties it; the check, with or without repair, leaves it as it is."""
    for kind, layout in (("lmdb", LMDB_STORE), ("disk", DISK_STORE)):
        directory = config.parent / "data" / kind
        with lmdb.open(str(directory), max_dbs=3, map_size=SIZE) as env:
            meta = env.open_db(b"meta")
            with env.begin(write=True) as txn:
                txn.put(layout.format_key, (layout.format_version - 1).to_bytes(4, "little"), db=meta)
        (directory / MARKER_FILE).unlink()
    for flags in ((), ("--repair",)):
        assert run(config, *flags) == offline_fsck.EXIT_UNCHECKED
        assert capsys.readouterr().out.count("finds none of its blocks") == 2


def test_damage_and_repair(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage exits with 1 until it is repaired, with 3 at the repair, and with 0 afterwards."""
    damage_a_block(config)
    for _ in range(2):
        assert run(config) == offline_fsck.EXIT_DAMAGED == 1
        out = capsys.readouterr().out
        assert f"disk: {SPACE.hex()} {b'3'.hex()}: its bytes are not those that were stored\n" in out
        assert "disk: 10 blocks" in out
        assert "1 damaged" in out
    assert run(config, "--repair") == offline_fsck.EXIT_REPAIRED == 3
    assert "quarantined" in capsys.readouterr().out
    assert run(config) == 0
    assert "disk: 9 blocks" in capsys.readouterr().out


def test_one_tier_can_be_selected(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name with --tier is wrong usage."""
    damage_a_block(config)
    assert run(config, "--tier", "lmdb") == 0
    assert "disk" not in capsys.readouterr().out.replace(str(config.parent), "")
    assert run(config, "--tier", "disk") == 1
    assert run(config, "--tier", "nvme") == 2
    assert "there is no tier 'nvme'; the tiers are lmdb, disk" in capsys.readouterr().err


def test_json_is_one_document(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_a_block(config)
    assert run(config, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 1
    lmdb, disk = answer["tiers"]
    assert (lmdb["blocks"], lmdb["findings"]) == (10, [])
    assert disk["findings"] == [
        {
            "namespace": SPACE.hex(),
            "key": b"3".hex(),
            "bytes": 70_000,
            "problem": "its bytes are not those that were stored",
            "repaired": False,
        }
    ]


@pytest.mark.parametrize("name", ["lmdb", "disk"])
def test_a_damaged_index_is_moved_aside_with_repair(
    config: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Without --repair it stays."""
    directory = config.parent / "data" / name
    with (directory / "data.mdb").open("r+b") as file:
        file.write(b"\xff" * 8192)
    assert run(config) == 1
    assert "is damaged" in capsys.readouterr().out
    assert not (directory / "damaged-1").exists()
    assert run(config, "--repair") == 3
    assert "moved aside" in capsys.readouterr().out
    assert (directory / "damaged-1").exists()
    assert run(config) == 0


@pytest.mark.parametrize("there", [[], ["lost+found"], ["lmdb"]], ids=str)
def test_without_files_there_is_nothing_to_check(
    tmp_path: Path, there: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No file is made."""
    data = tmp_path / "data"
    for name in ("", *there):
        (data / name).mkdir()
    assert main(["fsck", "--data-dir", str(data)]) == 0
    assert "nothing to check: no files" in capsys.readouterr().out
    assert sorted(entry.name for entry in data.rglob("*")) == there


@pytest.mark.parametrize("given", ["flag", "file", "environment", "path"])
def test_a_missing_data_directory_is_not_checked(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name may be a typo, or its disk is not mounted."""
    data, file = tmp_path / "data", tmp_path / "kvtier.toml"
    arguments = ["fsck", "--data-dir", str(data)] if given == "flag" else ["fsck"]
    if given == "environment":
        monkeypatch.setenv("KVTIER_DATA_DIR", str(data))
    elif given != "flag":
        tier = f'tiers = [{{type = "disk", path = "{data}/nvme", size = "1GiB"}}]'
        file.write_text(f'data_dir = "{data}"' if given == "file" else f'data_dir = "{tmp_path}"\n{tier}')
        arguments += ["--config", str(file)]
    assert main(arguments) == offline_fsck.EXIT_UNCHECKED
    assert (
        f"not checked: there is no directory {data}; check the path of the server's data directory"
        in capsys.readouterr().out
    )
    assert not data.exists()


def test_a_directory_with_foreign_files_is_not_checked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new tier beside existing ones has nothing to check."""
    for wrong in (config.parent, config.parent / "data" / "disk"):
        assert run(config, "--data-dir", str(wrong)) == 4
        said = capsys.readouterr().out.splitlines()
        assert [line.partition(" not checked: ")[0] for line in said] == ["lmdb:", "disk:"]
        assert all(f"nothing in {wrong} belongs to these tiers; the directory contains data" in line for line in said)
    shutil.rmtree(config.parent / "data" / "lmdb")
    assert run(config) == 0
    assert "lmdb: nothing to check: no files" in capsys.readouterr().out
    (config.parent / "data" / "lmdb").symlink_to(config.parent / "unmounted")
    assert run(config) == 4
    assert f"lmdb: not checked: {config.parent}/data/lmdb is not a directory" in capsys.readouterr().out


def test_the_cpu_tier_has_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files on disk do not matter."""
    file = tmp_path / "kvtier.toml"
    file.write_text(f'tiers = []\ndata_dir = "{tmp_path}/data"')
    assert main(["fsck", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "nothing to check: there is no tier below the CPU tier\n"


def test_an_unusable_directory_is_not_checked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other tiers are checked."""
    directory = config.parent / "data" / "lmdb"
    shutil.rmtree(directory)
    with lmdb.open(str(directory)) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")
    assert run(config) == offline_fsck.EXIT_UNCHECKED == 4
    out = capsys.readouterr().out
    assert "lmdb: not checked: " in out
    assert "disk: 10 blocks" in out


def test_an_invalid_configuration_exits_with_78(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["fsck", "--config", str(tmp_path / "none.toml")]) == 78
    assert "cannot be read" in capsys.readouterr().err


def test_tiers_of_a_running_server_are_not_checked(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output suggests a remedy; the server can start before and after a check."""
    with launch(tmp_path, "--config", str(config)) as server:
        ready = server.wait_ready()
        assert ready["tiers"] == ["cpu", "lmdb", "disk"]
        assert run(config, "--repair") == 4
        out = capsys.readouterr().out
        for name in ("lmdb", "disk"):
            assert f"{tmp_path}/data/{name} is in use by process {server.pid}; stop the server, or check with" in out
        assert server.end() == 0
    assert run(config) == 0
