"""What is wrong with a tier, by the kind of work that it is wrong with."""

from __future__ import annotations

import logging
import threading

from .base import SecondaryTier

__all__ = ["Troubles"]

_log = logging.getLogger(__name__)


class Troubles:
    """Keeps the `trouble` of a tier. May be used on any thread."""

    def __init__(self, tier: SecondaryTier) -> None:
        self._tier = tier
        self._by_work: dict[str, str] = {}
        self._noting = threading.Lock()

    def note(self, work: str, trouble: str | None) -> None:
        """Takes down what is wrong with one kind of work, or that it went well. Logs what is new."""
        with self._noting:
            if trouble == self._by_work.get(work):
                return
            if trouble is None:
                del self._by_work[work]
            else:
                self._by_work[work] = trouble
                _log.error("tier %s: %s", self._tier.name, trouble)
            self._tier.trouble = "; ".join(self._by_work.values()) or None
