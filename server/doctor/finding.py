"""What a check says, and what it is given to look at."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusResponse
from ..config.schema import Config

__all__ = ["Check", "CheckContext", "CheckResult", "Verdict", "fail", "ok", "warn"]


class Verdict(enum.StrEnum):
    """How bad it is. Only a failure changes the exit code."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check has found."""

    verdict: Verdict
    seen: str
    """What is so."""
    why: str = ""
    """Why that matters; empty where all is well."""
    do: str = ""
    """What to do about it; likewise."""


def ok(seen: str) -> CheckResult:
    """Returns that all is well."""
    return CheckResult(Verdict.OK, seen)


def warn(seen: str, why: str, do: str) -> CheckResult:
    """Returns that something will not be as good as it could be."""
    return CheckResult(Verdict.WARN, seen, why, do)


def fail(seen: str, why: str, do: str) -> CheckResult:
    """Returns that something does not work."""
    return CheckResult(Verdict.FAIL, seen, why, do)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What checks look at beside the machine."""

    config: Config | None
    """What a server would run with here; None where that cannot be used."""
    problems: tuple[str, ...]
    """Why it cannot be used."""
    warnings: tuple[str, ...]
    """What is allowed in it, and yet worth a word."""
    endpoint: Endpoint
    timeout: float
    status: GetStatusResponse | None
    """What the server there says; None where none answers."""
    silence: str
    """Why none does, or why it does not say how it is."""
    reason: str
    """The reason with which it refuses, "TLS", "TIMEOUT", or nothing where nobody is there."""
    protocol_versions: tuple[int, ...]
    """Those that it speaks; none where it did not say."""
    server_version: str
    environ: Mapping[str, str]
    hash_algo: str | None = None
    """What engines are to hash by, where that was said."""
    measure_disks: bool = True


Check = Callable[[CheckContext], Iterator[CheckResult]]
