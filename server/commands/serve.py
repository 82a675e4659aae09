"""`kvtier serve`: runs the server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial

from ..auth.credential_files import FileError
from ..auth.file_checks import file_warnings, untrusted_files, untrusted_stores
from ..config.loader import Loaded
from ..config.remote import key_files_of
from ..config.schema import ConfigError, TierConfig
from ..config.units import human_size
from ..doctor.disk_checks import network_disks
from ..process.crash_reporter import start_crash_reporter
from ..process.limits import limit_findings, needs_of, raise_soft_limits, room
from ..telemetry import logs
from ..telemetry.downgrades import Downgrades
from ..tier_host.key_file import read_key_file
from .config import load
from .console import EXIT_CONFIG, EXIT_FAILURE, refuse

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    try:
        loaded = load(options)
    except ConfigError as error:
        return refuse(error.problems, EXIT_CONFIG)
    config = loaded.config
    if problems := [*_key_file_problems(config.tiers), *untrusted_files(config).values()]:
        return refuse(problems, EXIT_CONFIG)
    raise_soft_limits()
    needs = needs_of(config)
    problems, limit_warnings = limit_findings(needs, room(needs.all_threads, fork=True))
    if problems:
        return refuse(problems, EXIT_FAILURE)
    if problems := untrusted_stores(config, create=True):
        return refuse(problems, EXIT_CONFIG)
    configure_logs = partial(logs.configure, loaded.config.log)
    no_reporter = ""
    try:
        start_crash_reporter(configure_logs, [tier.path for tier in loaded.config.tiers if not tier.is_remote])
    except OSError as error:
        no_reporter = f"the cause of a crash would not be logged, because no process can be started: {error}"
    configure_logs()
    downgrades = Downgrades()
    for warning in (*loaded.warnings, *file_warnings(config), *network_disks(config)):
        downgrades.report("configuration", warning, "kvtier config shows the origin of each value", subject=warning)
    for warning in limit_warnings:
        downgrades.report("limits", warning, "kvtier doctor --only limits", subject=warning)
    if no_reporter:
        downgrades.report("crash_report", no_reporter, "raise the limits of processes: kvtier doctor --only limits")
    _log_storage(logs.get_logger(__name__), loaded)
    from ..app import EXIT_LEFT_BEHIND, serve

    try:
        code = serve(loaded.config, downgrades)
    finally:
        logs.flush()
    if code == EXIT_LEFT_BEHIND:
        os._exit(code)  # a normal exit would unmap memory that a thread may be writing to
    return code


def _key_file_problems(tiers: Sequence[TierConfig]) -> Iterator[str]:
    for name, path in key_files_of(tiers):
        try:
            read_key_file(path)
        except FileError as error:
            yield f"tier {name}: encryption_keys: {error}"


def _log_storage(log: logs.Logger, loaded: Loaded) -> None:
    """Logs where the server keeps blocks, and how much memory and disk it may use."""
    config = loaded.config
    log.info(
        "storage",
        memory=human_size(config.region_size),
        data_dir=str(config.data_dir),
        tiers=[
            f"{tier.name}: {tier.options.get('url') or tier.options['master']}"
            if tier.is_remote
            else f"{tier.name}: at most {human_size(tier.size)} in {tier.path}"
            for tier in config.tiers
        ],
    )
    for note in loaded.notes:
        log.info(note)
