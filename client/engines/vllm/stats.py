"""What the connector counts for vLLM's log and metrics."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from .compat import KVConnectorStats

__all__ = ["SaveStats"]

_NOT_STORED = "not_stored_blocks"


class SaveStats(KVConnectorStats):
    """Blocks that were offered and not stored: no room, or no server (B3.5). vLLM logs the sum of each interval."""

    data: dict[str, int]

    @classmethod
    def of(cls, not_stored: int) -> SaveStats:
        """Returns the stats of one step."""
        return cls({_NOT_STORED: not_stored})

    def reset(self) -> None:
        """Starts from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> SaveStats:
        """Adds another step's."""
        return self.of(self._count + int(other.data.get(_NOT_STORED, 0)))

    def reduce(self) -> dict[str, int | float]:
        """Returns what is to be logged."""
        return {_NOT_STORED: self._count}

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self._count

    @property
    def _count(self) -> int:
        return int(self.data.get(_NOT_STORED, 0))
