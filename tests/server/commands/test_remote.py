"""`kvtier remote gc`, with a bucket that is a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from contracts.tier import DONE, SPACE, content, empty, full, key
from harness.command_line import json_output, kvtier

from kvtier.tiers.remote.network_tier import RemoteLimits

pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")

from kvtier.tiers.remote.s3 import S3Tier

DAY_SECONDS = 86400


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def config(tmp_path: Path, bucket: Path) -> str:
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'data_dir = "{tmp_path}"\n[[tiers]]\ntype = "s3"\nttl = "3d"\noptions = {{ url = "file://{bucket}" }}\n'
    )
    return str(file)


def store(bucket: Path, *numbers: int) -> None:
    """Stores each block in an object of its own."""
    tier = S3Tier("far", 1 << 30, url=f"file://{bucket}", limits=RemoteLimits())
    for number in numbers:
        assert tier.store([full(key(number), content(number, (1000,)))]) == [DONE]
    tier.close()


def files(bucket: Path) -> list[Path]:
    return sorted(path for path in bucket.rglob("*") if path.is_file())


def age(path: Path, days: float) -> None:
    moment = time.time() - days * DAY_SECONDS
    os.utime(path, (moment, moment))


def test_old_objects_are_deleted(config: str, bucket: Path) -> None:
    """Objects older than the tier's ttl, and nothing outside of the tier's folder."""
    store(bucket, 1, 2, 3)
    (bucket / "other").write_text("x")
    (bucket / "kvtier/pack9/00").mkdir(parents=True)
    (bucket / "kvtier/pack9/00/later").write_text("x")
    for path in files(bucket):
        age(path, 2.9)
    old = next(path for path in files(bucket) if "pack3" in str(path))
    age(old, 3.1)
    before = files(bucket)
    name = str(old.relative_to(bucket))
    assert f"would delete {name} (1" in kvtier("remote", "gc", "--config", config, "--dry-run").stdout
    assert files(bucket) == before
    lines = kvtier("remote", "gc", "--config", config).stdout.splitlines()
    assert lines[0].startswith(f"deleted {name} (1")
    assert lines[1].startswith("deleted 1 objects, 1")
    assert files(bucket) == [path for path in before if path != old]
    report = json_output("remote", "gc", "--config", config, "--older-than", "1d")
    assert len(report["objects"]) == 2
    assert report["bytes"] > 2000
    assert report["dry_run"] is False
    assert [path.name for path in files(bucket)] == ["later", "other"]
    assert kvtier("remote", "gc", "--config", config, "--older-than", "1d").stdout == "deleted 0 objects, 0 B\n"


def test_encrypted_objects_are_deleted_too(config: str, bucket: Path) -> None:
    store(bucket, 1)
    encrypted = bucket / "kvtier/pack4/00/object"
    encrypted.parent.mkdir(parents=True)
    encrypted.write_text("x")
    age(encrypted, 4)
    report = json_output("remote", "gc", "--config", config)
    assert [each["path"] for each in report["objects"]] == ["kvtier/pack4/00/object"]


def test_a_server_forgets_deleted_objects(config: str, bucket: Path) -> None:
    store(bucket, 1)
    tier = S3Tier("far", 1 << 30, url=f"file://{bucket}", limits=RemoteLimits())
    assert tier.lookup([(SPACE, key(1))]) == [True]
    for path in files(bucket):
        age(path, 10)
    kvtier("remote", "gc", "--config", config)
    assert tier.load([empty(key(1), (1000,))]) != [DONE]
    assert tier.lookup([(SPACE, key(1))]) == [False]
    assert tier.last_error is None
    tier.close()


def test_objects_of_old_formats_are_deleted_at_once(config: str, bucket: Path) -> None:
    """Those of current formats and of later ones stay."""
    store(bucket, 1)
    for folder in ("pack2", "pack4", "pack5", "packx"):
        (bucket / "kvtier" / folder / "00").mkdir(parents=True)
        (bucket / "kvtier" / folder / "00/object").write_text("x")
    report = json_output("remote", "gc", "--config", config, "--old-formats")
    assert [each["path"] for each in report["objects"]] == ["kvtier/pack2/00/object"]
    assert len(files(bucket)) == 4


@pytest.mark.parametrize(
    ("config_text", "flags", "message"),
    [
        ('[[tiers]]\ntype = "lmdb"', [], "no tier of type s3"),
        (
            '[[tiers]]\ntype = "s3"\noptions = {url = "file:///x"}',
            ["--tier", "far"],
            "no tier of type s3 with the name 'far'",
        ),
        ('[[tiers]]\ntype = "s3"\noptions = {url = "file:///x"}', ["--older-than", "0"], "must be more than 0"),
        ('[[tiers]]\ntype = "s3"\noptions = {url = "file:///x"}', ["--older-than", "old"], "--older-than old"),
        (
            (
                '[[tiers]]\ntype = "s3"\nname = "a"\noptions = {url = "file:///x"}\n'
                '[[tiers]]\ntype = "s3"\nname = "b"\noptions = {url = "file:///y"}'
            ),
            [],
            "give --tier: the tiers of type s3 are a, b",
        ),
    ],
)
def test_wrong_usage(tmp_path: Path, config_text: str, flags: list[str], message: str) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(f'data_dir = "{tmp_path}"\n{config_text}\n')
    assert message in kvtier("remote", "gc", "--config", str(file), *flags, code=2).stderr


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """The exit code is 1, and the error has the tier's name."""
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'data_dir = "{tmp_path}"\n[[tiers]]\ntype = "s3"\n[tiers.options]\nurl = "s3://bucket"\n'
        'endpoint = "http://127.0.0.1:1"\n'
    )
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    done = kvtier("remote", "gc", "--config", str(file), code=1, environment=keys)
    assert "tier s3: Generic S3 error" in done.stderr
