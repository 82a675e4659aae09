"""Offline check of the tiers (`kvtier fsck`), and the report of online and offline checks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...tiers.secondary_tier import SecondaryTier, TierDamagedError, TierError, TierInUseError
from ...tiers.storage.fsck import Checkable, Finding, check
from ...tiers.types import NAMESPACE_BYTES
from ..config.schema import TierConfig
from ..config.units import human_size
from .factory import open_tier

__all__ = [
    "EXIT_CLEAN",
    "EXIT_DAMAGED",
    "EXIT_REPAIRED",
    "EXIT_UNCHECKED",
    "TierReport",
    "check_offline",
    "exit_code",
    "finding_lines",
    "foreign_contents",
    "summary_lines",
    "to_json",
]

EXIT_CLEAN = 0
EXIT_DAMAGED = 1
"""Some damage was not repaired."""
EXIT_REPAIRED = 3
"""There was damage; all of it was repaired."""
EXIT_UNCHECKED = 4
"""A tier could not be checked, for example because a server uses it."""

_IGNORED = frozenset({"lost+found"})
_MAX_NAMED = 3

Progress = Callable[[int, int], None]
"""Called with the number of checked blocks and the total."""


@dataclass(slots=True)
class TierReport:
    name: str
    type: str
    path: Path | None = None
    """Directory; None for a tier of a running server."""
    blocks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    damage: str | None = None
    """Damage of the whole store. A repair loses all blocks of the tier."""
    damage_repaired: bool = False
    note: str | None = None
    """Why there is nothing to check."""
    error: str | None = None
    """Why the tier could not be checked completely."""

    @property
    def damaged(self) -> bool:
        whole = self.damage is not None and not self.damage_repaired
        return whole or not all(finding.repaired for finding in self.findings)


def check_offline(config: TierConfig, *, repair: bool, progress: Progress | None = None) -> TierReport:
    """Checks a tier that no server uses. Without `repair`, no file changes."""
    if config.is_remote:
        return TierReport(config.name, config.type, note="the blocks are in a store on another host")
    report = TierReport(config.name, config.type, config.path)
    try:
        if not config.path.is_dir() or not any(config.path.iterdir()):
            _check_directory(config)
            report.note = "no files"
            return report
        with _open_or_repair(config, report, repair=repair) as tier:
            if tier is None:
                return report
            if not isinstance(tier, Checkable):
                report.note = f"tiers of type {config.type} cannot be checked"
                return report
            total = tier.blocks_to_check()
            for step in check(tier, repair=repair):
                report.blocks += step.blocks
                report.nbytes += step.nbytes
                report.findings += step.findings
                if progress:
                    progress(report.blocks, max(total, report.blocks))
    except TierInUseError as error:
        report.error = f"{error}; stop the server, or check with the running server: kvtier fsck --online"
    except TierError as error:
        report.error = f"{error}"
    except Exception as error:  # noqa: BLE001 - from the tier's code; the other tiers are still checked
        report.error = f"tier {config.name}: {type(error).__name__}: {error}"
    return report


def foreign_contents(data_dir: Path, tiers: Sequence[TierConfig]) -> str | None:
    """Returns an error text if `data_dir` contains only files that belong to none of the tiers."""
    homes = [tier.path for tier in tiers if tier.path.parent == data_dir and not tier.is_remote]
    try:
        if not data_dir.is_dir() or any(os.path.lexists(home) for home in homes):
            return None
        others = sorted(entry.name for entry in data_dir.iterdir() if entry.name not in _IGNORED)
    except OSError:
        return None  # each tier reports the error itself
    if not others:
        return None
    named = ", ".join(others[:_MAX_NAMED]) + (", …" if len(others) > _MAX_NAMED else "")
    return f"nothing in {data_dir} belongs to these tiers; the directory contains {named}"


def _check_directory(config: TierConfig) -> None:
    """Raises TierError if the path of a tier without files is wrong or its disk is not mounted."""
    if config.is_custom:
        return  # a custom tier may keep its files at another path
    if os.path.lexists(config.path):
        if not config.path.is_dir():
            raise TierError(f"{config.path} is not a directory")
    elif not config.path.parent.is_dir():
        raise TierError(f"there is no directory {config.path.parent}; check the path of the server's data directory")


@contextlib.contextmanager
def _open_or_repair(config: TierConfig, report: TierReport, *, repair: bool) -> Iterator[SecondaryTier | None]:
    """Opens a tier; closes it after the `with` block. Yields None if damage is not repaired."""
    tier = None
    try:
        tier = open_tier(config, repair=False)
    except TierDamagedError as error:
        report.damage = f"{error}"
        if repair:
            tier = open_tier(config)
            report.damage_repaired = True
    try:
        yield tier
    finally:
        if tier is not None:
            tier.close()


def exit_code(reports: Sequence[TierReport]) -> int:
    if any(report.damaged for report in reports):
        return EXIT_DAMAGED
    if any(report.error for report in reports):
        return EXIT_UNCHECKED
    return EXIT_REPAIRED if any(report.findings or report.damage for report in reports) else EXIT_CLEAN


def finding_lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{name}: {finding}{', quarantined' if finding.repaired and finding.name else ''}"


def summary_lines(report: TierReport) -> Iterator[str]:
    name, where = report.name, f" ({report.path})" if report.path else ""
    if report.damage:
        yield f"{name}: {report.damage}{', moved aside' if report.damage_repaired else ''}"
    if report.error:
        yield f"{name}: not checked{' completely' if report.blocks else ''}: {report.error}"
    elif report.note:
        yield f"{name}: nothing to check: {report.note}{where}"
    elif not report.damage or report.damage_repaired:
        named = sum(bool(finding.name) for finding in report.findings)
        found = f"{named or 'none'} damaged{', blocks are lost' if named < len(report.findings) else ''}"
        yield f"{name}: {report.blocks} blocks, {human_size(report.nbytes)}, {found}{where}"


def to_json(reports: Sequence[TierReport]) -> str:
    tiers = [
        {
            "name": report.name,
            "type": report.type,
            "path": str(report.path) if report.path else None,
            "blocks": report.blocks,
            "bytes": report.nbytes,
            "damage": report.damage,
            "damage_repaired": report.damage_repaired,
            "note": report.note,
            "error": report.error,
            "findings": [
                {
                    "namespace": finding.name[:NAMESPACE_BYTES].hex(),
                    "key": finding.name[NAMESPACE_BYTES:].hex(),
                    "bytes": finding.nbytes,
                    "problem": finding.problem,
                    "repaired": finding.repaired,
                }
                for finding in report.findings
            ],
        }
        for report in reports
    ]
    return json.dumps({"exit_code": exit_code(reports), "tiers": tiers}, indent=2)
