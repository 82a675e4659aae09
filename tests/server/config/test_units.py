"""Sizes and durations in text, and the resources of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.server.config import machine
from kvtier.server.config.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_duration,
    format_size,
    human_age,
    human_size,
    parse_duration,
    parse_size,
)

TOO_LARGE = ["8388608TiB", "8388608.0TiB", "9" * 400 + ".5", "9" * 5000, 2**63, 1 << 24_000]
TOO_LONG = ["106752d", "9" * 400 + "s", 1e10, 1 << 24_000]
"""One is longer than 64 bits, others exceed a float."""


def _brief(value: object) -> str:
    return (value if isinstance(value, str) else hex(value) if isinstance(value, int) else repr(value))[:20]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * GIB),
        ("512 mib", 512 * MIB),
        ("1.5Gi", 3 * GIB // 2),
        ("1GB", 10**9),
        ("7", 7),
        ("7B", 7),
        (7, 7),
        ("8388607.5TiB", 2**63 - 2**39),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_parsed(text: object, size: int) -> None:
    """Units are binary or decimal; a plain number is in bytes."""
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "2G", "-1GiB", "1e3", "2GiB2", None, True, 1.5, [], "٣GiB", *TOO_LARGE], ids=_brief
)
def test_ambiguous_sizes_are_refused(text: object) -> None:
    """A bare G could mean either unit."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("250ms", 0.25),
        ("1d", 86400),
        ("3", 3),
        (0.5, 0.5),
        (1000001, 1000001),
        (86401.25, 86401.25),
        (0.0123456, 0.0123456),
    ],
)
def test_durations_are_parsed(text: object, seconds: float) -> None:
    """A plain number is in seconds."""
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "5 minutes", None, True, -1, float("inf"), float("nan"), *TOO_LONG], ids=_brief
)
def test_ambiguous_durations_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_sizes_are_formatted_briefly() -> None:
    assert [human_size(size) for size in (0, 1023, 1536, 2 * GIB)] == ["0 B", "1023 B", "1.5 KiB", "2.0 GiB"]


BORDERS = {
    0.4: "0 B",
    1023.4: "1023 B",
    1023.6: "1.0 KiB",
    KIB: "1.0 KiB",
    MIB - 52: "1023.9 KiB",
    MIB - 1: "1.0 MiB",
    GIB - 52 * KIB: "1023.9 MiB",
    GIB - 1: "1.0 GiB",
    TIB - 52 * MIB: "1023.9 GiB",
    TIB - 1: "1.0 TiB",
    1024 * TIB: "1024.0 TiB",
}


@pytest.mark.parametrize("size", BORDERS)
def test_a_size_just_below_a_unit_is_rounded_to_the_unit(size: float) -> None:
    """A text like 1024.0 MiB would hide that this is a gibibyte."""
    assert human_size(size) == BORDERS[size]


AGES = {
    0.0: "0.0 s",
    59.94: "59.9 s",
    59.96: "1 min 0 s",
    60.0: "1 min 0 s",
    3599.9: "59 min 59 s",
    3600.0: "1 h 0 min",
    86399.9: "23 h 59 min",
    86400.0: "1 d 0 h",
}


@pytest.mark.parametrize("seconds", AGES)
def test_a_time_just_below_a_minute_is_a_minute(seconds: float) -> None:
    """Larger units are not rounded up: an age of 59 min 59 s is not yet an hour."""
    assert human_age(seconds) == AGES[seconds]


def test_a_tiers_own_files_count_as_free_space(tmp_path: Path) -> None:
    """Otherwise a restart would shrink the default size."""
    missing = tmp_path / "a" / "b"
    assert machine.disk_bytes(missing) > 0
    assert not missing.exists()
    (tmp_path / "full").write_bytes(b"x" * MIB)
    assert machine.disk_bytes(tmp_path) >= MIB


def test_files_of_all_directories_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers of one file system share one free space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7 * MIB))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "full").write_bytes(b"x" * MIB)
    assert machine.disk_bytes(tmp_path / "one", tmp_path / "two", tmp_path / "missing") == 9 * MIB
