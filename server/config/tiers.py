"""Reader of the tier tables of the configuration, and the default tiers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...protos.spelling import did_you_mean
from .fields import TIER_SETTINGS, TableError, read_table
from .machine import disk_bytes, existing_directory
from .remote import read_remote_options
from .schema import TierConfig
from .units import GIB, MIB, human_size

__all__ = ["DEFAULT_TABLES", "read_tiers", "size_notes"]

DEFAULT_TABLES = ({"type": "lmdb"},)
"""Tier tables of a server without a configuration."""

_REMOTE_TYPES = ("valkey", "s3", "mooncake")
_BUILT_IN_TYPES = ("lmdb", "disk", *_REMOTE_TYPES)
"""Tier types that are part of kvtier. The CPU tier always exists and has no table."""

_DEFAULT_SIZE = 16 * GIB
_NO_SIZE = 0
"""Size of a tier whose table has no size, until all tables are read."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def read_tiers(tables: object, data_dir: Path) -> tuple[tuple[TierConfig, ...], list[str]]:
    """Returns the tiers of these tables, and the problems found, one line each."""
    if not isinstance(tables, Sequence) or not all(isinstance(table, Mapping) for table in tables):
        return (), ["tiers: must be a list of tables, [[tiers]]; [] means only the CPU tier"]
    tiers: list[TierConfig] = []
    problems: list[str] = []
    for number, table in enumerate(tables, start=1):
        try:
            tiers.append(_read_tier(table, data_dir))
        except TableError as error:
            problems.append(f"tiers, number {number}: {error}")
    return tuple(_with_default_sizes(tiers)), problems + list(_collisions(tiers))


def _read_tier(table: Mapping[str, Any], data_dir: Path) -> TierConfig:
    given = read_table(table, TIER_SETTINGS)
    if "type" not in given:
        raise TableError(f"type: must be given: {', '.join(_BUILT_IN_TYPES)} or module:Class")
    tier_type: str = given["type"]
    _check_type(tier_type, given)
    name: str = given.setdefault("name", tier_type.rpartition(":")[2].lower())
    if not _NAME.fullmatch(name) or name == "cpu":
        raise TableError(f'name = "{name}": must be 1 to 32 characters of a-z, 0-9, _ and -, and must not be "cpu"')
    if tier_type in _REMOTE_TYPES:
        read_remote_options(tier_type, given)
    given.setdefault("path", data_dir / name)
    given.setdefault("size", _NO_SIZE)
    return TierConfig(**given)


def _with_default_sizes(tiers: Sequence[TierConfig]) -> Iterator[TierConfig]:
    """Yields the tiers with sizes: at most 16 GiB, in whole MiB and at least 1 MiB.

    Tiers without a size on one file system share half of its free space in equal parts.
    """
    sharing = _sharing(tier.path for tier in tiers if tier.size == _NO_SIZE and not tier.is_remote)
    for tier in tiers:
        if tier.size != _NO_SIZE:
            yield tier
            continue
        if tier.is_remote:
            yield msgspec.structs.replace(tier, size=_DEFAULT_SIZE)
            continue
        paths = sharing[tier.path]
        size = disk_bytes(*paths) // (2 * len(paths)) // MIB * MIB
        yield msgspec.structs.replace(tier, size=max(MIB, min(_DEFAULT_SIZE, size)))


def _sharing(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Returns for each path all paths on its file system."""
    by_device: defaultdict[int, list[Path]] = defaultdict(list)
    devices = {path: existing_directory(path).stat().st_dev for path in paths}
    for path, device in devices.items():
        by_device[device].append(path)
    return {path: by_device[device] for path, device in devices.items()}


def size_notes(tiers: Sequence[TierConfig], tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each tier whose default size is less than usual for lack of disk space."""
    by_default = [tier for tier, table in zip(tiers, tables, strict=True) if "size" not in table and not tier.is_remote]
    sharing = _sharing(tier.path for tier in by_default)
    for tier in by_default:
        if tier.size < _DEFAULT_SIZE:
            others = [str(path) for path in sharing[tier.path] if path != tier.path]
            why = f"half of the free space at {tier.path}" + (f", shared with {', '.join(others)}" if others else "")
            yield f"tier {tier.name}: size is {human_size(tier.size)} by default, not {human_size(_DEFAULT_SIZE)}: {why}"


def _check_type(tier_type: str, given: Mapping[str, Any]) -> None:
    if tier_type in _BUILT_IN_TYPES:
        if given.get("options") and tier_type not in _REMOTE_TYPES:
            raise TableError(
                f"options: a tier of type {tier_type} has none; only valkey, s3, mooncake and module:Class tiers have options"
            )
    elif not _CLASS.fullmatch(tier_type):
        hint = did_you_mean(tier_type, _BUILT_IN_TYPES)
        raise TableError(f'type = "{tier_type}": must be {", ".join(_BUILT_IN_TYPES)} or module:Class{hint}')


def _collisions(tiers: Sequence[TierConfig]) -> Iterator[str]:
    for key in ("name", "path"):
        seen: set[object] = set()
        for tier in tiers:
            if key == "path" and tier.is_remote:
                continue
            value = getattr(tier, key)
            if value in seen:
                yield f"tiers: two tiers have {key} = {value}"
            seen.add(value)
