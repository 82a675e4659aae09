"""Registry of downgrades: paths that are slower, and features that are absent, with the cause.

A downgrade is logged as a warning when it begins or when its cause changes, not once per call. The
status, `kvtier doctor` and the metric `kvtier_downgrades` show it until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from .logs import get_logger

__all__ = ["FEATURES", "Downgrade", "Downgrades", "Feature", "Report"]

_log = get_logger(__name__)

Feature = Literal[
    "configuration",
    "crash_report",
    "credentials",
    "devices",
    "events",
    "grpc",
    "limits",
    "peers",
    "region",
    "service_manager",
    "shared_memory",
    "streams",
    "tiers",
    "tracing",
    "warm_restart",
]
"""What is affected. `configuration`: what a setting permits or turns off."""

Report = Callable[[str], object]
"""Reports the cause of one downgrade, whose code logs it; an empty cause ends the downgrade."""

FEATURES: Final[tuple[str, ...]] = get_args(Feature)
_MAX_CAUSE_CHARACTERS = 500
"""A cause can contain the text of another server's error."""


@dataclass(frozen=True, slots=True)
class Downgrade:
    """Attributes: `cause` is one line; `remedy` tells the operator what to do."""

    feature: Feature
    cause: str
    remedy: str


class Downgrades:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Feature, str], Downgrade] = {}

    def report(self, feature: Feature, cause: str, remedy: str, *, subject: str = "", is_logged: bool = True) -> None:
        """Records a downgrade, and replaces that of the same feature and subject.

        Without `cause` it ends that downgrade.
        `subject` names one of several affected objects, such as another server. Without `is_logged`
        the caller has logged the cause.
        """
        if not cause:
            self.end(feature, subject)
            return
        cause = cause[:_MAX_CAUSE_CHARACTERS]
        found = Downgrade(feature, cause, remedy)
        with self._lock:
            before, self._known[feature, subject] = self._known.get((feature, subject)), found
        if is_logged and (before is None or before.cause != cause):
            _log.warning(cause, feature=feature, remedy=remedy)

    def end(self, feature: Feature, subject: str = "") -> None:
        """Removes a downgrade, if there is one."""
        with self._lock:
            self._known.pop((feature, subject), None)

    def reporter(self, feature: Feature, remedy: str, *, subject: str) -> Report:
        """Returns the function by which code that does not know this registry reports."""
        return lambda cause: self.report(feature, cause, remedy, subject=subject, is_logged=False)

    def all(self) -> list[Downgrade]:
        """Returns the current downgrades in the order of their beginning."""
        with self._lock:
            return list(self._known.values())
