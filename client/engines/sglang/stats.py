"""Statistics for SGLang's metrics: pages and bandwidth of each load and store."""

from __future__ import annotations

import threading

from .compat import StorageMetrics

__all__ = ["TransferStats"]


class TransferStats:
    """Transfers since the last `take`. Thread-safe.

    SGLang exports them as histograms: `sglang:prefetch_pgs`, `sglang:backup_pgs` (pages), and
    `sglang:prefetch_bandwidth`, `sglang:backup_bandwidth` (GB/s).
    """

    def __init__(self, *, enabled: bool) -> None:
        """If SGLang takes no statistics, set `enabled` to false, so that none are collected."""
        self._enabled = enabled
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add("prefetch", pages, nbytes, seconds)

    def stored(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add("backup", pages, nbytes, seconds)

    def take(self) -> StorageMetrics | None:
        """Returns None if SGLang takes no statistics."""
        if not self._enabled:
            return None
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _add(self, kind: str, pages: int, nbytes: int, seconds: float) -> None:
        if self._enabled and pages:
            with self._lock:
                getattr(self._metrics, f"{kind}_pgs").append(pages)
                getattr(self._metrics, f"{kind}_bandwidth").append(nbytes / 1e9 / max(seconds, 1e-9))
