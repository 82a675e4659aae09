"""Digests of the files of models and LoRA adapters, over every byte of them.

A digest covers a whole file, because a sample misses weights that change between the samples: a
merged LoRA adapter can leave all samples of a file equal. A digest is remembered in a small file in
the user's cache directory, so that a later start of an engine reads no weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

__all__ = ["content_files", "digest_of_file", "fingerprint_of"]

_NEUTRAL_SUFFIXES = frozenset({".gif", ".jpeg", ".jpg", ".lock", ".md", ".pdf", ".png", ".pyc", ".svg"})
_NEUTRAL_NAMES = frozenset({"LICENSE", "LICENSE.txt", "NOTICE", "NOTICE.txt", "USE_POLICY", "__pycache__"})

_PIECE_BYTES = 64 << 20
"""Bytes that one thread hashes. The size is part of the digest of a larger file."""
_READ_BYTES = 1 << 20
"""Bytes that a thread reads at a time, so that the processor's cache has them when it hashes."""
_MAX_THREADS = 8
_SETTLED_SECONDS = 60.0
"""Age of a change at which a digest is remembered. A file system's clock has ticks of up to two
seconds, and a process can write to a mapped page for 35 seconds without a new time of the file."""
_MAX_REMEMBERED = 4096
_LOCK = struct.Struct("hhqqi4x")
"""struct flock: type, whence, start, length, pid"""


def content_files(directory: Path) -> list[Path]:
    """Returns all files of a model's folder that can change its KV, in order. Raises OSError.

    These are all files, also those of sub-folders, without hidden ones, texts for people, and
    pictures. Configuration, code and tokenizer count, as they change how weights are used.
    """
    found: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(directory, onerror=_raise, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:  # a symbolic link to a folder above
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not _is_neutral(name))
        found += (Path(folder, name) for name in names if not _is_neutral(name))
    return sorted(path for path in found if path.is_file())


def fingerprint_of(directory: Path) -> str:
    """Returns a hash of the names and bytes of a folder's `content_files`. Raises OSError.

    Copies of one folder have the same hash. A file that changes while it is read is an OSError.
    """
    digest = hashlib.sha256(b"kvtier folder 2")
    for path in content_files(directory):
        name, content = path.relative_to(directory).as_posix().encode(errors="surrogateescape"), digest_of_file(path)
        digest.update(len(name).to_bytes(4, "little") + name + content.encode())
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Returns the size and an xxh3-128 hash of all bytes of a file, as text. Raises OSError.

    Reads nothing if the digest is remembered for the file's device, inode, size, and times of
    modification and change. Reads instead of mapping, because a file that another process truncates
    would end the engine by SIGBUS. Processes that need the same digests wait for each other.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        version = _version(descriptor)
        with _cache_of(version) as cache:
            if (known := _read(cache).get(version)) is not None:
                return known
            digest = _hash(descriptor)
            if _version(descriptor) != version:
                raise OSError(f"{path} has changed while it was read")
            if time.time() - os.fstat(descriptor).st_ctime >= _SETTLED_SECONDS:
                _remember(cache, version, digest)
            return digest
    finally:
        os.close(descriptor)


def _is_neutral(name: str) -> bool:
    return name.startswith(".") or name in _NEUTRAL_NAMES or Path(name).suffix.lower() in _NEUTRAL_SUFFIXES


def _raise(error: OSError) -> None:
    raise error


def _version(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _hash(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    starts = range(0, size, _PIECE_BYTES)
    whole = xxhash.xxh3_128()
    with ThreadPoolExecutor(max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(starts)))) as threads:
        for piece in threads.map(lambda start: _hash_piece(descriptor, start, min(_PIECE_BYTES, size - start)), starts):
            whole.update(piece)
    return f"{size}:{whole.hexdigest()}"


def _hash_piece(descriptor: int, start: int, nbytes: int) -> bytes:
    digest, buffer, done = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES)), 0
    while done < nbytes:
        count = os.preadv(descriptor, [buffer[: min(_READ_BYTES, nbytes - done)]], start + done)
        if not count:
            raise OSError("a file has become shorter while it was read")
        digest.update(buffer[:count])
        done += count
    return digest.digest()


@contextlib.contextmanager
def _cache_of(version: str) -> Iterator[int | None]:
    """Opens the file of remembered digests, and excludes other processes from this version.

    Yields None, if there is no cache directory that only this user can write.
    """
    try:
        cache = _open_cache()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        yield None
        return
    try:
        # A lock of one byte for each version, so that engines do not wait for other models.
        place = xxhash.xxh3_64_intdigest(version.encode()) >> 2
        fcntl.fcntl(cache, fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
        yield cache
    finally:
        os.close(cache)  # which unlocks


def _open_cache() -> int:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = os.open(folder / "file-digests.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(cache)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(cache)
        raise PermissionError("another user can write to the remembered digests")
    return cache


def _read(cache: int | None) -> dict[str, str]:
    """Returns the remembered digests. A file that is damaged or half written has none."""
    try:
        found = json.loads(os.pread(cache, os.fstat(cache).st_size, 0) or b"{}") if cache is not None else {}
    except (OSError, ValueError):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _remember(cache: int | None, version: str, digest: str) -> None:
    if cache is None:
        return
    fcntl.flock(cache, fcntl.LOCK_EX)
    newest = list({**_read(cache), version: digest}.items())[-_MAX_REMEMBERED:]
    with contextlib.suppress(OSError):  # for example a full disk
        os.ftruncate(cache, 0)
        os.pwrite(cache, json.dumps(dict(newest)).encode(), 0)
