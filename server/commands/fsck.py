"""`kvtier fsck`: checks the tiers' blocks, offline or through a running server."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator

from ...client.errors import KVTierError, NotConnected
from ...protos.endpoint import EndpointError, client_endpoint
from ...protos.v1 import admin_pb2
from ...tiers.storage.fsck import Finding
from ..config.loader import Loaded
from ..config.schema import Config, ConfigError
from ..config.units import KIB, human_size, parse_size
from ..printable import printable
from ..tier_host import offline_fsck
from ..tier_host.offline_fsck import TierReport
from .admin_client import ask_status, follow
from .config import load
from .console import EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_USAGE, complain, print_line, refuse
from .progress import progress_bar

__all__ = ["run"]

_ONLY_OFFLINE = ("config", "data_dir")
_ONLY_ONLINE = ("endpoint", "rate")
_NO_TIER = "nothing to check: there is no tier below the CPU tier"
_MIN_RATE = 64 * KIB
"""Minimum of --rate in bytes per second. A lower value probably lacks its unit."""


def run(options: argparse.Namespace) -> int:
    for name in _ONLY_OFFLINE if options.online else _ONLY_ONLINE:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            return refuse([f"{flag} cannot be used with{'' if options.online else 'out'} --online"], EXIT_USAGE)
    if options.online:
        return _online(options)
    try:
        loaded = load(options)
    except ConfigError as error:
        return refuse(error.problems, EXIT_CONFIG)
    complain(f"warning: {warning}" for warning in (*loaded.warnings, *_other_server(loaded, options.timeout)))
    return _offline(loaded.config, options)


def _other_server(loaded: Loaded, timeout: float) -> Iterator[str]:
    """Yields a warning if only defaults say which files to check, and a server runs here."""
    if {loaded.origins["data_dir"], loaded.origins["tiers"]} != {"default"}:
        return
    endpoint = client_endpoint(None)
    try:
        tiers = ", ".join(tier.name for tier in ask_status(endpoint, timeout).tiers[1:]) or "none"
    except NotConnected:
        return
    except KVTierError as error:
        tiers = f"unknown ({error})"
    yield (
        f"a server runs at {endpoint} (tiers: {tiers}); without --config or --data-dir this command checks the default "
        f"tiers in {loaded.config.data_dir}, which may not be those of the server: give its --config, or use --online"
    )


def _offline(config: Config, options: argparse.Namespace) -> int:
    tiers = config.tiers
    names = [tier.name for tier in tiers]
    unknown = [name for name in options.tier if name not in names]
    if unknown:
        return refuse([f"there is no tier {name!r}; the tiers are {', '.join(names)}" for name in unknown], EXIT_USAGE)
    others = offline_fsck.foreign_contents(config.data_dir, tiers)
    reports = []
    for tier in tiers:
        if options.tier and tier.name not in options.tier:
            continue
        if others and tier.path.parent == config.data_dir and not (tier.is_custom or tier.is_remote):
            reports.append(TierReport(tier.name, tier.type, tier.path, error=others))
        else:
            with progress_bar(tier.name) as progress:
                reports.append(offline_fsck.check_offline(tier, repair=options.repair, progress=progress))
        if not options.json:
            _print_all(offline_fsck.finding_lines(tier.name, reports[-1].findings))
            _print_all(offline_fsck.summary_lines(reports[-1]))
    if options.json:
        print_line(offline_fsck.to_json(reports))
    elif not tiers:
        print_line(_NO_TIER)
    return offline_fsck.exit_code(reports)


def _online(options: argparse.Namespace) -> int:
    reports: dict[str, TierReport] = {}
    try:
        _follow(options, reports)
    except (EndpointError, ValueError) as error:
        return refuse([f"{error}"], EXIT_USAGE)
    except NotConnected as error:
        return refuse([f"{error}"], EXIT_UNREACHABLE)
    except KVTierError as error:
        return refuse([f"{error}"], offline_fsck.EXIT_UNCHECKED)
    if options.json:
        print_line(offline_fsck.to_json(list(reports.values())))
    elif not reports:
        print_line(_NO_TIER)
    else:
        for report in reports.values():
            _print_all(offline_fsck.summary_lines(report))
    return offline_fsck.exit_code(list(reports.values()))


def _follow(options: argparse.Namespace, reports: dict[str, TierReport]) -> None:
    """Adds the reports of a running check to `reports`, and prints each finding as it arrives.

    If the check ends early, the last report has an error. Raises `KVTierError` if the server
    refuses the check or does not answer.
    """
    endpoint = client_endpoint(options.endpoint)
    rate = _read_rate(options.rate)
    request = admin_pb2.FsckRequest(repair=options.repair, tiers=options.tier, max_rate_bytes=rate)
    report = None
    with progress_bar("fsck") as progress:
        try:
            for step in follow(endpoint, "Fsck", request, options.timeout):
                if report is None or report.name != step.tier:
                    report = reports[step.tier] = TierReport(step.tier, step.tier_type)
                found = _update(report, step)
                if progress:
                    progress(report.blocks, step.total_blocks)
                if not options.json:
                    _print_all(offline_fsck.finding_lines(report.name, found))
        except KVTierError as error:
            if report is None:
                raise
            report.error = f"{error}"


def _read_rate(text: str | None) -> int:
    """Returns bytes per second; 0 means no limit. Raises `ValueError`."""
    if text is None:
        return 0
    try:
        rate = parse_size(text)
    except ValueError as error:
        raise ValueError(f"--rate {text}: {error}") from None
    number = re.sub(r"[^\d.]", "", text)
    if rate < _MIN_RATE and float(number):
        bounds = f"at least {human_size(_MIN_RATE)}/s, or 0 for no limit"
        raise ValueError(f"--rate {text}: {human_size(rate)}/s; did you mean {number}MiB? It must be {bounds}")
    return rate


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(printable(line))


def _update(report: TierReport, step: admin_pb2.FsckResponse) -> list[Finding]:
    found = [
        Finding(finding.namespace_id + finding.key, finding.size_bytes, finding.problem, finding.repaired)
        for finding in step.findings
    ]
    report.blocks, report.nbytes = step.blocks, step.checked_bytes
    report.findings += found
    report.note, report.error = step.note or None, step.error or None
    return found
