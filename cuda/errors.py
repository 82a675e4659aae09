"""What can go wrong with shared memory."""

from __future__ import annotations

__all__ = ["RegionError"]


class RegionError(Exception):
    """A host region cannot be created, mapped or backed; the message is for people."""
