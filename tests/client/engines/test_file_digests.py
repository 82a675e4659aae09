from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.client.engines import file_digests
from kvtier.client.engines.file_digests import content_files, digest_of_file, fingerprint_of

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of remembered digests of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier" / "file-digests.json"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Gets an element for each file that is read."""
    read: list[int] = []
    original = file_digests._hash

    def hash_file(descriptor: int) -> str:
        read.append(descriptor)
        return original(descriptor)

    monkeypatch.setattr(file_digests, "_hash", hash_file)
    return read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the time at which a digest may be remembered come at once."""
    monkeypatch.setattr(file_digests, "_SETTLED_SECONDS", 0.0)


def _model(folder: Path) -> Path:
    """A folder like a model's, with a weight file of several pieces."""
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "modeling_own.py").write_text("SCALE = 1")
    (folder / "sub" / "preprocessor_config.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("main")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(130 * MIB)
    return folder


@pytest.mark.parametrize("offset", [0, 4096, 64 * MIB - 1, 64 * MIB, 97 * MIB + 12345, 130 * MIB - 1])
def test_each_byte_of_a_weight_file_counts(tmp_path: Path, offset: int) -> None:
    model = _model(tmp_path / "m")
    before = fingerprint_of(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(b"\1")
    assert fingerprint_of(model) != before


@pytest.mark.parametrize("name", ["config.json", "modeling_own.py", "sub/preprocessor_config.json"])
def test_files_that_change_the_computation_count(tmp_path: Path, name: str) -> None:
    model = _model(tmp_path / "m")
    before = fingerprint_of(model)
    (model / name).write_text((model / name).read_text().replace("1", "2").replace("{", "{ ").replace("6", "7"))
    assert fingerprint_of(model) != before


def test_a_renamed_or_additional_file_counts(tmp_path: Path) -> None:
    model = _model(tmp_path / "m")
    prints = [fingerprint_of(model)]
    (model / "modeling_own.py").rename(model / "modeling_other.py")
    prints.append(fingerprint_of(model))
    (model / "model-2.safetensors").write_bytes(b"")
    prints.append(fingerprint_of(model))
    assert len(set(prints)) == 3


def test_texts_for_people_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    model = _model(tmp_path / "m")
    before = fingerprint_of(model)
    (model / "README.md").write_text("another text")
    (model / ".git" / "HEAD").write_text("branch")
    assert fingerprint_of(model) == before


def test_copies_and_links_have_the_same_fingerprint(tmp_path: Path) -> None:
    """As a snapshot in the cache of a model hub, whose files are links."""
    model, links = _model(tmp_path / "m"), tmp_path / "links"
    links.mkdir()
    for path in model.iterdir():
        (links / path.name).symlink_to(path)
    assert fingerprint_of(links) == fingerprint_of(model)


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    model = _model(tmp_path / "m")
    (model / "loop").symlink_to(model)
    assert [path.name for path in content_files(model)].count("config.json") == 1


@pytest.mark.usefixtures("settled")
def test_remembered_files_are_not_read(tmp_path: Path, hashed: list[int]) -> None:
    model = _model(tmp_path / "m")
    first = fingerprint_of(model)
    read = len(hashed)
    assert fingerprint_of(model) == first
    assert len(hashed) == read == len(content_files(model))


@pytest.mark.usefixtures("settled")
def test_a_change_with_the_old_size_and_time_is_read(tmp_path: Path, hashed: list[int]) -> None:
    """Only the time of change shows it, which a program cannot set."""
    path = tmp_path / "w.bin"
    path.write_bytes(b"old" * 1000)
    before, status = digest_of_file(path), path.stat()
    while True:  # until the file system's clock has moved on
        path.write_bytes(b"new" * 1000)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if path.stat().st_ctime_ns != status.st_ctime_ns:
            break
        time.sleep(0.001)
    assert digest_of_file(path) != before
    assert len(hashed) == 2


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, hashed: list[int]) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    assert digest_of_file(path) == digest_of_file(path)
    assert len(hashed) == 2


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")

    def hash_file(_: int) -> str:
        path.write_bytes(b"other weights")
        return "digest"

    monkeypatch.setattr(file_digests, "_hash", hash_file)
    with pytest.raises(OSError, match="has changed"):
        digest_of_file(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff"])
@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_is_replaced(tmp_path: Path, cache: Path, content: bytes, hashed: list[int]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    assert digest_of_file(path) == digest_of_file(path)
    assert len(hashed) == 1


@pytest.mark.usefixtures("settled")
def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, cache: Path, hashed: list[int]) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    digest_of_file(path)
    cache.chmod(0o666)
    digest_of_file(path)
    assert len(hashed) == 2


@pytest.mark.usefixtures("settled")
def test_without_a_cache_directory_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    assert digest_of_file(path) == digest_of_file(path)
    assert len(hashed) == 2


@pytest.mark.usefixtures("settled")
def test_engines_do_not_wait_for_another_model(tmp_path: Path) -> None:
    """While one digest is computed, others can be."""
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(path.name.encode())
    descriptor = os.open(paths[0], os.O_RDONLY)
    try:
        with file_digests._cache_of(file_digests._version(descriptor)):
            assert digest_of_file(paths[1]).startswith("1:")
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("settled")
def test_a_file_system_whose_time_of_change_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[int]
) -> None:
    """As FAT, and file systems in user space: digests are not remembered."""
    monkeypatch.setattr(file_digests, "_WITH_TIME_OF_CHANGE", frozenset())
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    assert digest_of_file(path) == digest_of_file(path)
    assert len(hashed) == 2


@pytest.mark.usefixtures("settled")
def test_a_file_system_that_is_mounted_instead_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[int]
) -> None:
    """Files of two file systems can have equal device, inode, size and times."""
    path, real = tmp_path / "w.bin", os.fstatvfs
    path.write_bytes(b"weights")
    for number in (1, 2):
        monkeypatch.setattr(os, "fstatvfs", lambda fd, number=number: SimpleNamespace(f_fsid=real(fd).f_fsid + number))
        digest_of_file(path)
        digest_of_file(path)
    assert len(hashed) == 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["owner", "link", "torn"])
def test_a_cache_that_cannot_be_trusted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, hashed: list[int]
) -> None:
    """A file of another user, a link to a file elsewhere, or one whose writer was killed."""
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    digest_of_file(path)
    match kind:
        case "owner":
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        case "link":
            cache.rename(tmp_path / "elsewhere")
            cache.symlink_to(tmp_path / "elsewhere")
        case "torn":
            content = cache.read_bytes()
            assert content.endswith(b"}")
            cache.write_bytes(content[:-1])
    assert digest_of_file(path).startswith("7:")
    assert len(hashed) == 2


@pytest.mark.usefixtures("settled")
def test_a_stopped_process_does_not_keep_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[int]
) -> None:
    """A process that was stopped keeps the lock of a file. Others hash the file after a while."""
    monkeypatch.setattr(file_digests, "_LOCK_WITHIN_SECONDS", 0.0)
    path = tmp_path / "w.bin"
    path.write_bytes(b"weights")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with file_digests._cache_of(file_digests._version(descriptor)):
            assert digest_of_file(path).startswith("7:")
    finally:
        os.close(descriptor)
    assert len(hashed) == 1


@pytest.mark.usefixtures("settled")
def test_engines_that_start_together_read_a_file_once(tmp_path: Path, hashed: list[int]) -> None:
    path = tmp_path / "w.bin"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    with ThreadPoolExecutor(8) as engines:
        digests = list(engines.map(digest_of_file, [path] * 8))
    assert len(set(digests)) == len(hashed) == 1
