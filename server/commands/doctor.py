"""`kvtier doctor`: runs checks, and prints each finding with its consequence and a remedy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

from rich.console import Console
from rich.text import Text

from ...client.errors import KVTierError
from ...protos.endpoint import ENDPOINT_VARIABLE, Endpoint, EndpointError, client_endpoint
from ...protos.v1.session_pb2 import CapabilitiesRequest
from ..config.schema import Config, ConfigError
from ..doctor import disk_checks, engine_checks, memory_checks, process_checks, server_checks, trust_checks
from ..doctor.finding import Check, CheckContext, CheckResult, Verdict, fail
from .admin_client import ask, ask_status, plain_console
from .config import load
from .console import EXIT_FAILURE, EXIT_USAGE, print_line, refuse

__all__ = ["CHECKS", "run"]

CHECKS: dict[str, Check] = {
    "configuration": server_checks.configuration,
    "socket": server_checks.socket_file,
    "server": server_checks.server,
    "versions": server_checks.versions,
    "ports": server_checks.ports,
    "trust": trust_checks.trust,
    "shared_memory": memory_checks.shared_memory,
    "huge_pages": memory_checks.huge_pages,
    "memlock": memory_checks.memlock,
    "container": memory_checks.container,
    "limits": process_checks.limits,
    "tiers": server_checks.tiers,
    "disks": disk_checks.disks,
    "clock": process_checks.clock,
    "hashes": engine_checks.hashes,
    "cuda_ipc": engine_checks.cuda_ipc,
}
"""All checks by name, as used in `--only` and in the JSON output."""

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def run(options: argparse.Namespace) -> int:
    unknown = [name for name in options.only if name not in CHECKS]
    if unknown:
        return refuse([f"--only {unknown[0]}: no such check; the checks are {', '.join(CHECKS)}"], EXIT_USAGE)
    try:
        context = _make_context(options)
    except EndpointError as error:
        return refuse([f"{error}"], EXIT_USAGE)
    console, results, failed = plain_console(), [], False
    for name, check in CHECKS.items():
        if options.only and name not in options.only:
            continue
        for finding in _findings(check, context):
            failed = failed or finding.verdict is Verdict.FAIL
            results.append({"check": name, **dataclasses.asdict(finding)})
            if not options.json:
                _show(console, name, finding)
    if options.json:
        print_line(json.dumps({"ok": not failed, "findings": results}, indent=2))
    return EXIT_FAILURE if failed else 0


def _findings(check: Check, context: CheckContext) -> list[CheckResult]:
    try:
        return list(check(context))
    except Exception as error:  # noqa: BLE001 - an error in one check must not hide the results of the others
        return [
            fail(
                f"the check itself failed: {type(error).__name__}: {error}",
                "the result of this check is missing",
                "report this as a bug of kvtier",
            )
        ]


def _make_context(options: argparse.Namespace) -> CheckContext:
    """Loads the configuration and asks the server. Raises `EndpointError`."""
    config, problems, warnings = None, list[str](), list[str]()
    try:
        loaded = load(options)
        config, warnings = loaded.config, list(loaded.warnings)
    except ConfigError as error:
        problems = list(error.problems)
    endpoint = _endpoint(options, config)
    status, failure, reason, capabilities = None, "", "", None
    try:
        capabilities = ask(endpoint, "Capabilities", CapabilitiesRequest(), options.timeout, "SessionService")
        status = ask_status(endpoint, options.timeout)
    except KVTierError as error:
        failure, reason = f"{error}", error.reason
    return CheckContext(
        config=config,
        problems=tuple(problems),
        warnings=tuple(warnings),
        endpoint=endpoint,
        status=status,
        error=failure,
        reason=reason,
        protocol_versions=tuple(capabilities.protocol_versions) if capabilities else (),
        server_version=capabilities.server_version if capabilities else "",
        environ=os.environ,
        hash_algo=options.hash_algo,
        measure_disks=not options.no_disk_test,
    )


def _endpoint(options: argparse.Namespace, config: Config | None) -> Endpoint:
    """Returns the endpoint from flags, environment or configuration. Raises `EndpointError`."""
    if config is None or options.endpoint or os.environ.get(ENDPOINT_VARIABLE):
        return client_endpoint(options.endpoint)
    return next((endpoint for endpoint in config.endpoints if endpoint.is_unix), config.endpoints[0])


def _show(console: Console, name: str, finding: CheckResult) -> None:
    verdict = Text(f"{finding.verdict.value:<4}", style=_STYLES[finding.verdict])
    console.print(verdict, f"{name}: {finding.seen}", soft_wrap=True)
    if finding.why:
        console.print(f"     why: {finding.why}", soft_wrap=True)
        console.print(f"     do:  {finding.do}", soft_wrap=True)
