"""Digests of the files of models and LoRA adapters, over every byte of them.

A digest covers a whole file, because a sample misses weights that change between the samples: a
merged LoRA adapter can leave all samples of a file equal. A digest is remembered in a small file in
the user's cache directory, so that a later start of an engine reads no weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

__all__ = ["content_files", "digest_of_file", "fingerprint_of", "process_started_at"]

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
_CLOCK_TICKS_SECONDS = 0.1
_STARTTIME = 19
"""Number of the start time among the fields after the name in /proc/PID/stat, see proc(5)."""
_WITH_TIME_OF_CHANGE = frozenset(
    # ext, xfs, btrfs, tmpfs, overlay, zfs, f2fs, bcachefs; numbers of statfs(2)
    (0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E)
)
"""File systems on which no program can set the time of change. On FAT, and on many file systems
over a network or in user space, it is the time of modification or a time of another clock."""
_MAX_REMEMBERED = 4096
_LOCK_WITHIN_SECONDS = 300.0
_LOCK_POLL_SECONDS = 0.05
_TABLE_PLACE = 1 << 62
"""Place of the lock of the table, behind the places of the files' versions."""
_LOCK = struct.Struct("hhqqi4x")
"""struct flock: type, whence, start, length, pid"""


def content_files(directory: Path) -> list[Path]:
    """Returns all files of a model's folder that can change its KV, in order. Raises OSError.

    These are all files, also those of sub-folders, without hidden ones, texts for people, and
    pictures. Configuration, code and tokenizer count, as they change how weights are used.
    """
    return sorted(path for folder, names in _folders(directory) for name in names if (path := folder / name).is_file())


def fingerprint_of(directory: Path, *, unchanged_since: float = math.inf) -> str:
    """Returns a hash of the names and bytes of a folder's `content_files`. Raises OSError.

    Copies of one folder have the same hash. If a file changes while it is read, or the folder has
    changed after `unchanged_since`, this is an OSError.
    """
    digest = hashlib.sha256(b"kvtier folder 2")
    for folder, _ in _folders(directory):
        _check_age(folder, unchanged_since)
    files = content_files(directory)
    for path in files:
        name = path.relative_to(directory).as_posix().encode(errors="surrogateescape")
        content = digest_of_file(path, unchanged_since=unchanged_since)
        digest.update(len(name).to_bytes(4, "little") + name + content.encode())
    if content_files(directory) != files:
        raise OSError(f"files were added to {directory}, or removed, while it was read")
    return digest.hexdigest()


def digest_of_file(path: Path, *, unchanged_since: float = math.inf) -> str:
    """Returns the size and an xxh3-128 hash of all bytes of a file, as text. Raises OSError.

    Reads nothing if the digest is remembered for the file's device, inode, size, and times of
    modification and change. Reads instead of mapping, because a file that another process truncates
    would end the engine by SIGBUS. Processes that need the same digests wait for each other.
    `unchanged_since`: as in `fingerprint_of`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        version = _version(descriptor)
        with _cache_of(version) as cache:
            digest = _read(cache).get(version)
            if digest is None:
                digest = _hash(descriptor)
                if _version(descriptor) == version and _may_remember(descriptor):
                    _remember(cache, version, digest)
        if _version(descriptor) != version or not os.path.samestat(path.stat(), os.fstat(descriptor)):
            raise OSError(f"{path} has changed while it was read")
        _check_age(path, unchanged_since)
        return digest
    finally:
        os.close(descriptor)


def process_started_at() -> float:
    """Returns the time at which this process began, to compare with times of files.

    The result is up to 0.1 s too late, because the clocks of processes and files have ticks. No
    engine loads weights that early.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age + _CLOCK_TICKS_SECONDS


def _check_age(path: Path, unchanged_since: float) -> None:
    """Raises OSError if a file, or a link to it, has changed after this time."""
    for status in (path.lstat(), path.stat()):
        if max(status.st_ctime, status.st_mtime) > unchanged_since:
            raise OSError(
                f"{path} has changed since the process began, so the loaded content is unknown; restart the engine"
            )


def _folders(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yields a folder and its sub-folders, with the names in each that can count."""
    entered: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(directory, onerror=_raise, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:  # a symbolic link to a folder above
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not _is_neutral(name))
        yield Path(folder), [name for name in names if not _is_neutral(name)]


def _is_neutral(name: str) -> bool:
    return name.startswith(".") or name in _NEUTRAL_NAMES or Path(name).suffix.lower() in _NEUTRAL_SUFFIXES


def _raise(error: OSError) -> None:
    raise error


def _version(descriptor: int) -> str:
    """Names the content of a file. The id of the file system changes if another one is mounted."""
    status, system = os.fstat(descriptor), os.fstatvfs(descriptor).f_fsid
    return f"{system}:{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _may_remember(descriptor: int) -> bool:
    """Whether a change of the file will give it another time of change."""
    kind = (ctypes.c_long * 32)()
    if ctypes.CDLL(None).fstatfs(descriptor, kind) or kind[0] not in _WITH_TIME_OF_CHANGE:
        return False
    return time.time() - os.fstat(descriptor).st_ctime >= _SETTLED_SECONDS


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
        _lock(cache, xxhash.xxh3_64_intdigest(version.encode()) >> 2)
        yield cache
    finally:
        os.close(cache)  # which unlocks


def _lock(cache: int, place: int) -> bool:
    """Waits for a lock. Gives up if a process keeps it, for example because it was stopped."""
    until = time.monotonic() + _LOCK_WITHIN_SECONDS
    while True:
        try:
            fcntl.fcntl(cache, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # the file system has no locks
            return False
        else:
            return True


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
    if cache is None or not _lock(cache, _TABLE_PLACE):
        return
    newest = list({**_read(cache), version: digest}.items())[-_MAX_REMEMBERED:]
    with contextlib.suppress(OSError):  # for example a full disk
        os.ftruncate(cache, 0)
        os.pwrite(cache, json.dumps(dict(newest)).encode(), 0)
