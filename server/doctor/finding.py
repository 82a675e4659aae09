"""Input and result of a check."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.schema import Config

__all__ = ["Check", "CheckContext", "CheckResult", "Verdict", "fail", "ok", "warn"]


class Verdict(enum.StrEnum):
    """Severity. Only a failure changes the exit code."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    verdict: Verdict
    seen: str
    """What was found."""
    why: str = ""
    """Why it matters; empty if the verdict is OK."""
    do: str = ""
    """What to do about it; empty if the verdict is OK."""


def ok(seen: str) -> CheckResult:
    return CheckResult(Verdict.OK, seen)


def warn(seen: str, why: str, do: str) -> CheckResult:
    return CheckResult(Verdict.WARN, seen, why, do)


def fail(seen: str, why: str, do: str) -> CheckResult:
    return CheckResult(Verdict.FAIL, seen, why, do)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Input of the checks, besides the machine."""

    config: Config | None
    """Effective configuration of a server here; None if it is invalid."""
    problems: tuple[str, ...]
    """Problems of an invalid configuration."""
    warnings: tuple[str, ...]
    """Warnings about a valid configuration."""
    endpoint: Endpoint
    timeout: float
    status: GetStatusResponse | None
    """Status of the server at the endpoint; None without an answer."""
    error: str
    """Error of the call, if there is no status."""
    reason: str
    """Reason of the refusal, "TLS", "TIMEOUT", or empty if no server is there."""
    protocol_versions: tuple[int, ...]
    """Protocol versions of the server; empty without an answer."""
    server_version: str
    environ: Mapping[str, str]
    hash_algo: str | None = None
    """Hash algorithm planned for engines, if given."""
    measure_disks: bool = True


Check = Callable[[CheckContext], Iterator[CheckResult]]
