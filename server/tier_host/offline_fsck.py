"""`kvtier fsck`: checks what the tiers keep while no server runs; and what is said of any check."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...tiers.base import SecondaryTier, TierDamagedError, TierError, TierInUseError
from ...tiers.storage.fsck import Checkable, Finding, check
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
    "holds_others",
    "lines",
    "summary_lines",
    "to_json",
]

EXIT_CLEAN = 0
EXIT_DAMAGED = 1
"""There is damage, and it is still there."""
EXIT_REPAIRED = 3
"""There was damage; all of it was put out of the way."""
EXIT_UNCHECKED = 4
"""A tier could not be checked: a server has it, say, or its directory is somewhere else."""

_OF_THE_DISK = frozenset({"lost+found"})
_MOST_NAMED = 3

Progress = Callable[[int, int], None]
"""Is told how many blocks have been checked, and of how many."""


@dataclass(slots=True)
class TierReport:
    """What was found in one tier."""

    name: str
    type: str
    path: Path | None = None
    """Its directory; None for a tier of a running server."""
    blocks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    damage: str | None = None
    """What is wrong with the store as a whole; its blocks are lost then."""
    damage_repaired: bool = False
    note: str | None = None
    """Why there was nothing to check."""
    error: str | None = None
    """Why it could not be checked."""

    @property
    def damaged(self) -> bool:
        """Whether there is damage that was not repaired."""
        whole = self.damage is not None and not self.damage_repaired
        return whole or not all(finding.repaired for finding in self.findings)


def check_offline(config: TierConfig, *, repair: bool, progress: Progress | None = None) -> TierReport:
    """Checks the tier of a server that does not run. Without `repair` no block changes, and no damage is moved."""
    report = TierReport(config.name, config.type, config.path)
    try:
        if not config.path.is_dir() or not any(config.path.iterdir()):
            _see_the_place(config)
            report.note = "no files"
            return report
        with _opened(config, report, repair=repair) as tier:
            if tier is None:
                return report
            if not isinstance(tier, Checkable):
                report.note = f"{config.type} has no check of its own"
                return report
            total = tier.blocks_to_check()
            for step in check(tier, repair=repair):
                report.blocks += step.blocks
                report.nbytes += step.nbytes
                report.findings += step.findings
                if progress:
                    progress(report.blocks, max(total, report.blocks))
    except TierInUseError as error:
        report.error = f"{error}; stop it, or let it check itself: kvtier fsck --online"
    except TierError as error:
        report.error = f"{error}"
    except Exception as error:  # noqa: BLE001 - a tier's own; the other tiers are checked all the same
        report.error = f"tier {config.name}: {type(error).__name__}: {error}"
    return report


def holds_others(data_dir: Path, tiers: Sequence[TierConfig]) -> str | None:
    """Returns why a data directory cannot be that of these tiers: it has none of theirs, and something else."""
    homes = [tier.path for tier in tiers if tier.path.parent == data_dir]
    try:
        if not data_dir.is_dir() or any(os.path.lexists(home) for home in homes):
            return None
        others = sorted(entry.name for entry in data_dir.iterdir() if entry.name not in _OF_THE_DISK)
    except OSError:
        return None  # each tier says so itself
    if not others:
        return None
    named = ", ".join(others[:_MOST_NAMED]) + (", …" if len(others) > _MOST_NAMED else "")
    return f"nothing in {data_dir} is of these tiers; there is {named}"


def _see_the_place(config: TierConfig) -> None:
    """Sees whether a tier without files has a place for them at least. Raises TierError.

    Who has nothing to check where nothing can be has been told a wrong name, or has a disk that is not mounted.
    """
    if config.is_custom:
        return  # it may have files elsewhere, or none
    if os.path.lexists(config.path):
        if not config.path.is_dir():
            raise TierError(f"{config.path} is not a directory")
    elif not config.path.parent.is_dir():
        raise TierError(f"there is no directory {config.path.parent}: no server has run with it, or it is another one")


@contextlib.contextmanager
def _opened(config: TierConfig, report: TierReport, *, repair: bool) -> Iterator[SecondaryTier | None]:
    """Opens a tier; None if it is damaged as a whole and was left so."""
    tier = None
    try:
        tier = open_tier(config, mend=False)
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
    """Returns what `kvtier fsck` ends with."""
    if any(report.damaged for report in reports):
        return EXIT_DAMAGED
    if any(report.error for report in reports):
        return EXIT_UNCHECKED
    return EXIT_REPAIRED if any(report.findings or report.damage for report in reports) else EXIT_CLEAN


def lines(report: TierReport) -> Iterator[str]:
    """Yields the report for people: each damaged block, then the counts."""
    yield from finding_lines(report.name, report.findings)
    yield from summary_lines(report)


def finding_lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
    """Yields a line for each damaged block of a tier."""
    for finding in findings:
        yield f"{name}: {finding}{', quarantined' if finding.repaired else ''}"


def summary_lines(report: TierReport) -> Iterator[str]:
    """Yields what there is to say of the tier as a whole."""
    name, where = report.name, f" ({report.path})" if report.path else ""
    if report.damage:
        yield f"{name}: {report.damage}{', moved aside' if report.damage_repaired else ''}"
    if report.error:
        yield f"{name}: not checked{' to its end' if report.blocks else ''}: {report.error}"
    elif report.note:
        yield f"{name}: nothing to check: {report.note}{where}"
    elif not report.damage or report.damage_repaired:
        found = f"{len(report.findings)} damaged" if report.findings else "all sound"
        yield f"{name}: {report.blocks} blocks, {human_size(report.nbytes)}, {found}{where}"


def to_json(reports: Sequence[TierReport]) -> str:
    """Returns the reports as JSON."""
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
                    "namespace": finding.name[:16].hex(),
                    "key": finding.name[16:].hex(),
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
