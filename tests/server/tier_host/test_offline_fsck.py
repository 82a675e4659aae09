from __future__ import annotations

import json
import shutil
from pathlib import Path

import lmdb
import pytest
from contracts.secondary_tier import DONE, MIB, SPACE, content, full
from harness.launch import launch

from kvtier.server.cli import main
from kvtier.server.tier_host import offline_fsck
from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.disk.format import PAGE_BYTES, SlabRecord
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.tier import LMDBTier

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 32 * MIB


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Gives the settings of a server with a tier of either type, both of which hold ten blocks."""
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
    """Runs `kvtier fsck`."""
    return main(["fsck", "--config", str(config), *arguments])


def test_sound(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound tiers are counted and end in 0."""
    assert run(config) == offline_fsck.EXIT_CLEAN == 0
    lmdb, disk = capsys.readouterr().out.splitlines()
    assert lmdb.startswith("lmdb: 10 blocks, ")
    assert disk.startswith("disk: 10 blocks, ")
    assert "all sound" in lmdb
    assert "all sound" in disk


def test_damage_and_repair(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage ends in 1 as often as it is looked at, in 3 when it is repaired, and in 0 afterwards."""
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


def test_one_tier(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --tier only that one is looked at; one that there is not is wrong usage."""
    damage_a_block(config)
    assert run(config, "--tier", "lmdb") == 0
    assert "disk" not in capsys.readouterr().out.replace(str(config.parent), "")
    assert run(config, "--tier", "disk") == 1
    assert run(config, "--tier", "nvme") == 2
    assert "there is no tier 'nvme'; there are lmdb, disk" in capsys.readouterr().err


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For machines everything is in one document."""
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
def test_a_damaged_index(config: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """An index that is damaged as a whole is left where it is, and moved aside with --repair."""
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
def test_no_files(tmp_path: Path, there: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing was ever stored there is nothing to check, and nothing is made."""
    data = tmp_path / "data"
    for name in ("", *there):
        (data / name).mkdir()
    assert main(["fsck", "--data-dir", str(data)]) == 0
    assert "nothing to check: no files" in capsys.readouterr().out
    assert sorted(entry.name for entry in data.rglob("*")) == there


@pytest.mark.parametrize("given", ["flag", "file", "environment", "path"])
def test_no_directory(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data directory that is not there was not checked, whoever has named it: a typo, or a disk that is not mounted."""
    data, file = tmp_path / "data", tmp_path / "kvtier.toml"
    arguments = ["fsck", "--data-dir", str(data)] if given == "flag" else ["fsck"]
    if given == "environment":
        monkeypatch.setenv("KVTIER_DATA_DIR", str(data))
    elif given != "flag":
        tier = f'tiers = [{{type = "disk", path = "{data}/nvme", size = "1GiB"}}]'
        file.write_text(f'data_dir = "{data}"' if given == "file" else f'data_dir = "{tmp_path}"\n{tier}')
        arguments += ["--config", str(file)]
    assert main(arguments) == offline_fsck.EXIT_UNCHECKED
    assert f"not checked: there is no directory {data}: no server has run with it" in capsys.readouterr().out
    assert not data.exists()


def test_a_directory_of_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither was one that has other things and none of the tiers; a tier that is new beside another has nothing to check."""
    for wrong in (config.parent, config.parent / "data" / "disk"):
        assert run(config, "--data-dir", str(wrong)) == 4
        said = capsys.readouterr().out.splitlines()
        assert [line.partition(" not checked: ")[0] for line in said] == ["lmdb:", "disk:"]
        assert all(f"nothing in {wrong} is of these tiers; there is data" in line for line in said)
    shutil.rmtree(config.parent / "data" / "lmdb")
    assert run(config) == 0
    assert "lmdb: nothing to check: no files" in capsys.readouterr().out
    (config.parent / "data" / "lmdb").symlink_to(config.parent / "unmounted")
    assert run(config) == 4
    assert f"lmdb: not checked: {config.parent}/data/lmdb is not a directory" in capsys.readouterr().out


def test_the_cpu_tier_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server without tiers below it has nothing to check, whatever there is on disk."""
    file = tmp_path / "kvtier.toml"
    file.write_text(f'tiers = []\ndata_dir = "{tmp_path}/data"')
    assert main(["fsck", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "nothing to check: there is no tier below the CPU tier\n"


def test_a_directory_that_is_no_store(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tier that cannot be opened is not checked; the others are."""
    directory = config.parent / "data" / "lmdb"
    shutil.rmtree(directory)
    with lmdb.open(str(directory)) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")
    assert run(config) == offline_fsck.EXIT_UNCHECKED == 4
    out = capsys.readouterr().out
    assert "lmdb: not checked: " in out
    assert "disk: 10 blocks" in out


def test_wrong_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Settings that cannot be used end in 78."""
    assert main(["fsck", "--config", str(tmp_path / "none.toml")]) == 78
    assert "cannot be read" in capsys.readouterr().err


def test_beside_a_server(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a server has the tiers they are left alone, with a word on what to do; it starts on them before and after."""
    with launch(tmp_path, "--config", str(config)) as server:
        ready = server.wait_ready()
        assert ready["tiers"] == ["cpu", "lmdb", "disk"]
        assert run(config, "--repair") == 4
        out = capsys.readouterr().out
        for name in ("lmdb", "disk"):
            assert f"{tmp_path}/data/{name} is in use by process {server.pid}; stop it, or let it check itself" in out
        assert server.end() == 0
    assert run(config) == 0
