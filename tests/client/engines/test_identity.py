"""Identity of a model's files: each byte counts, and an uncertain identity is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from harness.polling import wait_until

from kvtier.client import Group, GroupKind, Namespace
from kvtier.client.engines import file_digests, identity
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.identity import (
    InBackground,
    identify_adapter,
    identify_weights,
    namespace_digest,
    with_weights_version,
)

MIB = 1 << 20
COMMIT = "c" * 40


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache of remembered digests of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process begin now. By default it begins after all changes of files."""
    monkeypatch.setattr(identity, "process_started_at", lambda: float("inf"))

    def start() -> None:
        now = time.time()
        wait_until(lambda: _new_time(Path(os.environ["XDG_CACHE_HOME"])) > now)
        monkeypatch.setattr(identity, "process_started_at", lambda: now)

    return start


def _new_time(folder: Path) -> float:
    """Returns the present time of the file system, whose clock has ticks."""
    (folder / "clock").write_bytes(b"")
    return (folder / "clock").stat().st_ctime


FILES = {
    "config.json": "{}",
    "preprocessor_config.json": "{}",
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "tokenizer.model": "",
    "vocab.txt": "a",
    "merges.txt": "a b",
    "chat_template.jinja": "{{ messages }}",
    "modeling_own.py": "SCALE = 1",
    "configuration_own.py": "",
    "model.safetensors.index.json": "{}",
    "quantize_config.json": "{}",
    "adapter_config.json": "{}",
    "2_Dense/config.json": "{}",
    "model-00001-of-00002.safetensors": "first",
    "model-00002-of-00002.safetensors": "other",
    "pytorch_model.bin": "",
    "model.gguf": "",
    "no suffix": "",
}


def _model(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.usefixtures("started")
class TestLocalModels:
    @pytest.mark.parametrize("layers", [range(20, 24), range(23, 24), range(1)])
    def test_some_layers_of_a_large_file(self, tmp_path: Path, layers: range) -> None:
        """The weights of these layers are replaced in place, with the old size and time."""
        path = tmp_path / "model.safetensors"
        with path.open("wb") as file:
            file.truncate(384 * MIB)
        before, status = identify_weights(str(tmp_path), ""), path.stat()
        with path.open("r+b") as file:
            for layer in layers:
                file.seek(layer * 16 * MIB + 12345)
                file.write(b"\1")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert identify_weights(str(tmp_path), "") != before

    @pytest.mark.parametrize("name", FILES)
    def test_each_file_of_a_folder(self, tmp_path: Path, name: str) -> None:
        """One more byte, and the absence of the file, are other models."""
        model = _model(tmp_path / "m")
        found = [identify_weights(str(model), "")]
        (model / name).write_text(FILES[name] + " ")
        found.append(identify_weights(str(model), ""))
        (model / name).unlink()
        found.append(identify_weights(str(model), ""))
        assert len(set(found)) == 3

    def test_exchanged_shards(self, tmp_path: Path) -> None:
        model = _model(tmp_path / "m")
        before = identify_weights(str(model), "")
        first, second = (model / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
        first.rename(model / "x")
        second.rename(first)
        (model / "x").rename(second)
        assert identify_weights(str(model), "") != before

    def test_a_change_through_another_name_of_a_file(self, tmp_path: Path) -> None:
        """A hard link, and a symbolic link to a file elsewhere."""
        model = _model(tmp_path / "m")
        (tmp_path / "hard").hardlink_to(model / "model.gguf")
        (tmp_path / "blob").write_text("1")
        (model / "linked.bin").symlink_to(tmp_path / "blob")
        found = [identify_weights(str(model), "")]
        for name in ("hard", "blob"):
            (tmp_path / name).write_text("2")
            found.append(identify_weights(str(model), ""))
        assert len(set(found)) == 3

    def test_a_model_in_a_single_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"1")
        before = identify_weights(str(path), "")
        path.write_bytes(b"2")
        assert identify_weights(str(path), "") != before

    def test_a_copy_at_another_path_is_the_same(self, tmp_path: Path) -> None:
        assert identify_weights(str(_model(tmp_path / "a")), "") == identify_weights(str(_model(tmp_path / "b")), "")

    def test_adapters_use_the_same_identity(self, tmp_path: Path) -> None:
        found = []
        for content in ("1", "2"):
            (tmp_path / "adapter_config.json").write_text("{}")
            (tmp_path / "adapter_model.safetensors").write_text(content)
            found.append(identify_adapter(str(tmp_path)))
        assert found[0] != found[1]


class TestChangesAfterTheStart:
    """The engine may have loaded the earlier content, so the identity is unknown."""

    @pytest.mark.parametrize("change", ["content", "name", "absence", "addition", "folder", "link", "time"])
    def test_a_change_is_an_error(self, tmp_path: Path, started: Callable[[], None], change: str) -> None:
        model, other = _model(tmp_path / "m"), _model(tmp_path / "other")
        (tmp_path / "current").symlink_to(model)
        started()
        match change:
            case "content":
                (model / "2_Dense/config.json").write_text("[]")
            case "name":
                (other / "vocab.txt").rename(model / "vocab.txt")
            case "absence":
                (model / "2_Dense/config.json").unlink()
            case "addition":
                (model / "2_Dense/new.json").write_text("{}")
            case "folder":
                model.rename(tmp_path / "old")
                other.rename(model)
            case "link":
                (tmp_path / "current").unlink()
                (tmp_path / "current").symlink_to(other)
            case "time":
                (model / "vocab.txt").write_text("b")
                os.utime(model / "vocab.txt", ns=(0, 0))
        with pytest.raises(OSError, match="has changed since the process began"):
            identify_weights(str(tmp_path / "current"), "")

    def test_a_model_in_a_single_file_that_changes_is_an_error(
        self, tmp_path: Path, started: Callable[[], None]
    ) -> None:
        started()
        (tmp_path / "model.gguf").write_text("1")
        with pytest.raises(OSError, match="has changed since the process began"):
            identify_weights(str(tmp_path / "model.gguf"), "")

    def test_an_adapter_that_changes_is_an_error(self, tmp_path: Path, started: Callable[[], None]) -> None:
        started()
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_text("1")
        with pytest.raises(OSError, match="has changed since the process began"):
            identify_adapter(str(tmp_path))

    @pytest.mark.usefixtures("started")
    def test_an_adapter_without_weights_is_an_error(self, tmp_path: Path) -> None:
        """For example while its files are copied: the engine would load others than those."""
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(FileNotFoundError, match="no weights"):
            identify_adapter(str(tmp_path))
        (tmp_path / "adapter_model.bin").write_text("1")
        assert identify_adapter(str(tmp_path))

    @pytest.mark.usefixtures("started")
    @pytest.mark.parametrize("path", ["/nowhere", "no such/folder/at all", "org/name", ""])
    def test_an_adapter_that_is_nowhere_is_an_error(self, path: str) -> None:
        """A folder that does not exist, or a name on a hub that the cache lacks."""
        with pytest.raises(FileNotFoundError, match="no "):
            identify_adapter(path)

    def test_the_start_of_a_process(self, tmp_path: Path) -> None:
        """Files are older than a process that begins next, and newer than this one."""
        _model(tmp_path / "m")
        code = "import sys; from kvtier.client.engines.identity import *; print(identify_weights(sys.argv[1], ''))"
        command = [sys.executable, "-c", code, str(tmp_path / "m")]
        found = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
        with pytest.raises(OSError, match="has changed since the process began"):
            identify_weights(str(tmp_path / "m"), "")
        assert found == file_digests.fingerprint_of(tmp_path / "m")


class TestHubModels:
    @pytest.fixture
    def hub(self, tmp_path: Path) -> Path:
        """The cache of a hub with one model, as `huggingface_hub` arranges it."""
        model = tmp_path / "hub" / "models--org--name"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(COMMIT)
        (model / "blobs").mkdir()
        (model / "snapshots" / COMMIT).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (model / "blobs" / name).write_text("{}")
            (model / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{name}")
        return tmp_path / "hub"

    @pytest.mark.parametrize("revision", ["", "main", COMMIT])
    def test_the_files_in_the_cache_count(self, hub: Path, revision: str) -> None:
        """Also if one was changed in place. The engine itself fills the cache, so files are new."""
        before = identify_weights("org/name", revision, folder=str(hub))
        (hub / "models--org--name" / "blobs" / "model.safetensors").write_text("[]")
        assert identify_weights("org/name", revision, folder=str(hub)) != before

    def test_the_commit_that_the_engine_resolved_counts_before_its_branch(self, hub: Path) -> None:
        """The branch in the cache can have moved since."""
        expected = identify_weights("org/name", COMMIT, folder=str(hub))
        moved = "e" * 40
        folder = hub / "models--org--name" / "snapshots" / moved
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("{} ")
        (hub / "models--org--name" / "refs" / "main").write_text(moved)
        assert identify_weights("org/name", "main", folder=str(hub)) != expected
        assert identify_weights("org/name", "main", COMMIT, folder=str(hub)) == expected

    def test_without_files_the_commit_counts(self, hub: Path) -> None:
        other = "d" * 40
        assert identify_weights("org/other", other, folder=str(hub)) == f"commit {other}"
        assert identify_weights("org/name", other, folder=str(hub)) == f"commit {other}"
        assert identify_weights("org/other", "main", other, folder=str(hub)) == f"commit {other}"

    @pytest.mark.parametrize("model", ["org/other", "org/name:Q4_K_M", "s3://bucket/model", "no such/folder/at all"])
    def test_a_branch_is_no_identity(self, hub: Path, model: str) -> None:
        """It can name other weights tomorrow."""
        with pytest.raises(Unsupported, match="cannot identify the weights"):
            identify_weights(model, "main", folder=str(hub))


@pytest.mark.usefixtures("started")
class TestReading:
    def test_a_file_that_is_replaced_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The descriptor still has the old file, which no longer has the path."""
        path, original = tmp_path / "w.bin", file_digests._hash
        path.write_bytes(b"old")

        def replace(descriptor: int) -> str:
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").replace(path)
            return original(descriptor)

        monkeypatch.setattr(file_digests, "_hash", replace)
        with pytest.raises(OSError, match="has changed while it was read"):
            identify_weights(str(path), "")

    def test_a_folder_that_gets_files_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, original = _model(tmp_path / "m"), file_digests._hash

        def add(descriptor: int) -> str:
            (model / "late.bin").write_bytes(b"")
            return original(descriptor)

        monkeypatch.setattr(file_digests, "_hash", add)
        with pytest.raises(OSError, match="files were added"):
            identify_weights(str(model), "")

    def test_a_file_that_cannot_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> int:
            raise OSError("Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="Input/output error"):
            identify_weights(str(_model(tmp_path / "m")), "")


def test_each_field_of_a_namespace_is_in_its_digest() -> None:
    """Workers join a namespace by its digest, and a version of the weights is an attribute."""
    group = Group(64, 16, "full.0")
    plain = Namespace("m", "float16", (group, group), "layout", "scheme", "revision", 2, "tenant", {"a": "1"})
    others = [replace(plain, **{field.name: "other"}) for field in fields(plain) if field.type == "str"]
    assert len(others) == 6
    others += [replace(plain, world_size=3), replace(plain, attributes={"a": "2"}), replace(plain, attributes={})]
    others += [replace(plain, groups=(group,)), with_weights_version(plain, "7")]
    changes: list[dict[str, Any]] = [{"part_bytes": 65}, {"block_tokens": 8}, {"name": "x"}, {"kind": GroupKind.STATE}]
    others += [replace(plain, groups=(group, replace(group, **change))) for change in changes]
    assert with_weights_version(plain, "") == plain
    digests = {namespace_digest(space) for space in (plain, *others)}
    assert len(digests) == len(others) + 1


class TestInBackground:
    def test_nothing_waits_for_the_value(self) -> None:
        gate = threading.Event()
        value = InBackground(lambda: gate.wait(60) and "known", lambda _: None)
        assert value.value is None
        assert value.wait(0.0) is None
        gate.set()
        assert value.wait(60) == "known"

    def test_a_failure_is_reported_once(self) -> None:
        failures: list[Exception] = []

        def fail() -> str:
            raise OSError("why")

        value = InBackground(fail, failures.append)
        assert value.wait(60) is None
        assert list(map(str, failures)) == ["why"]
