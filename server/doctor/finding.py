"""Input and result of a check of `kvtier doctor`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.schema import Config

__all__ = ["Check", "CheckContext", "CheckResult", "Verdict", "fail", "ok", "warn"]


class Verdict(enum.StrEnum):
    """Severity of a finding. Only FAIL changes the exit code."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    verdict: Verdict
    seen: str
    """What the check found."""
    why: str = ""
    """Consequence; empty if the verdict is OK."""
    do: str = ""
    """Remedy; empty if the verdict is OK."""


def ok(seen: str) -> CheckResult:
    return CheckResult(Verdict.OK, seen)


def warn(seen: str, why: str, do: str) -> CheckResult:
    return CheckResult(Verdict.WARN, seen, why, do)


def fail(seen: str, why: str, do: str) -> CheckResult:
    return CheckResult(Verdict.FAIL, seen, why, do)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Input of all checks. Each check reads the facts about the machine directly."""

    config: Config | None
    """Configuration that a server started on this machine would use; None if it is invalid."""
    problems: tuple[str, ...]
    """Problems of an invalid configuration."""
    warnings: tuple[str, ...]
    """Warnings about a valid configuration."""
    endpoint: Endpoint
    status: GetStatusResponse | None
    """Status of the server at the endpoint; None if it did not answer or refused."""
    error: str
    """Error text of the status call; empty if the call succeeded."""
    reason: str
    """`reason` of the status call's `KVTierError`; empty without error or without a server."""
    protocol_versions: tuple[int, ...]
    """Protocol versions of the server; empty if it did not answer."""
    server_version: str
    environ: Mapping[str, str]
    hash_algo: str | None = None
    """Planned hash algorithm of engines; None if not given."""
    measure_disks: bool = True


Check = Callable[[CheckContext], Iterator[CheckResult]]
