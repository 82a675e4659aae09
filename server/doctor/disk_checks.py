"""Checks of the tiers' disks: permissions, free space, file system and speed."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..config.machine import disk_bytes, existing_directory
from ..config.schema import Config
from ..config.units import MIB, human_size
from . import machine
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["disks", "network_disks"]

_NETWORK = {
    *("9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs"),
    *("lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"),
}
_MIN_ROOM_BYTES = 64 * MIB
_CHUNK = 4 * MIB
_MAX_BYTES = 64 * MIB
_MAX_SECONDS = 1.0
_SYNCS = 8
_SLOW_BYTES_PER_S = 100e6
_SLOW_SYNC_SECONDS = 0.02


def disks(context: CheckContext) -> Iterator[CheckResult]:
    if context.config is None:
        return
    tiers = [tier for tier in context.config.tiers if not tier.is_remote]
    if not tiers:
        yield ok("no tiers on disk")
    measured: set[int] = set()
    for tier in tiers:
        directory = existing_directory(tier.path)
        what = f"tier {tier.name} ({tier.path})"
        if not os.access(directory, os.W_OK | os.X_OK):
            yield fail(
                f"{what}: user {os.getuid()} cannot write to {directory}",
                "the server does not start",
                f"chown {os.getuid()} {directory}, or set data_dir to a directory of the server's user",
            )
            continue
        yield from _file_system(what, directory)
        yield from _room(what, tier.path, tier.size)
        device = directory.stat().st_dev
        if context.measure_disks and device not in measured:
            measured.add(device)
            yield _speed(what, directory)


def network_disks(config: Config) -> Iterator[str]:
    """Yields a warning for each tier whose files are on a network file system."""
    for tier in config.tiers:
        kind = "" if tier.is_remote else machine.file_system(existing_directory(tier.path).resolve())
        if kind in _NETWORK:
            yield f"tier {tier.name} ({tier.path}) is on {kind}, a network file system: its blocks can be lost or damaged"


def _file_system(what: str, directory: Path) -> Iterator[CheckResult]:
    kind = machine.file_system(directory.resolve())
    if kind in _NETWORK:
        yield fail(
            f"{what} is on {kind}, a network file system",
            "LMDB needs memory maps and locks, which fail on network file systems: blocks get lost or damaged",
            "set data_dir to a disk of this host",
        )
    elif kind in ("tmpfs", "ramfs"):
        yield warn(
            f"{what} is on {kind}",
            "the tier's files use memory, and its blocks do not survive a restart of the host",
            "set data_dir to a disk, or use a larger CPU tier and --cpu-only",
        )
    elif kind == "overlay":
        yield warn(
            f"{what} is on the container's writable layer (overlay)",
            "the tier's files are lost when the container is recreated",
            "mount a volume at this path",
        )
    else:
        yield ok(f"{what} is on {kind}")


def _room(what: str, path: Path, size: int) -> Iterator[CheckResult]:
    room = disk_bytes(path)
    seen = f"{what}: the disk has room for {human_size(room)}, the tier's size is {human_size(size)}"
    if room < min(size, _MIN_ROOM_BYTES):
        yield fail(
            seen, "the disk is full: almost nothing can be stored", "free disk space, or set data_dir to another disk"
        )
    elif room < size:
        yield warn(
            seen, "when the disk is full, new blocks stay only in memory", "free disk space, or set a lower size"
        )
    else:
        yield ok(seen)


def _speed(what: str, directory: Path) -> CheckResult:
    """Measures the disk with an unnamed file, which the kernel removes when this process ends."""
    try:
        with tempfile.TemporaryFile(buffering=0, dir=directory, prefix="kvtier-doctor-") as file:
            rate, latency = _write(file.fileno()), _sync(file.fileno())
    except OSError as error:
        return fail(
            f"{what}: a file of {human_size(_CHUNK)} cannot be written: {error.strerror}",
            "the tier cannot store blocks",
            "free disk space; check quotas, ulimit -f and the kernel's log",
        )
    seen = f"{what}: writes {human_size(rate)}/s with fdatasync, and syncs 4 KiB in {latency * 1e3:.2f} ms"
    if rate < _SLOW_BYTES_PER_S or latency > _SLOW_SYNC_SECONDS:
        return warn(
            seen,
            "engines store faster than this disk: many blocks do not reach the tier (kvtier_tier_dropped_total)",
            "use a local NVMe disk; measure again while nothing else uses the disk",
        )
    return ok(seen)


def _write(descriptor: int) -> float:
    """Returns the write rate in bytes per second."""
    with mmap.mmap(-1, _CHUNK) as chunk:
        chunk.write(os.urandom(1 << 16) * (_CHUNK >> 16))
        began, written = time.perf_counter(), 0
        while written < _MAX_BYTES and time.perf_counter() - began < _MAX_SECONDS:
            with memoryview(chunk) as view:
                written += os.write(descriptor, view)
            os.fdatasync(descriptor)
        return written / (time.perf_counter() - began)


def _sync(descriptor: int) -> float:
    """Returns the median duration of a small durable write, in seconds."""
    times = []
    for number in range(_SYNCS):
        began = time.perf_counter()
        os.pwrite(descriptor, b"\0" * 4096, number << 12)
        os.fdatasync(descriptor)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
