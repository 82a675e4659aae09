"""Random ids of leases, stores and registered memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

__all__ = ["random_ids"]

_IDS = struct.Struct("<512Q")


def random_ids() -> Iterator[int]:
    """Yields random ids of 63 bits, not 0. Consecutive ids would show how many ids others get."""
    while True:
        yield from filter(None, (number >> 1 for number in _IDS.unpack(os.urandom(_IDS.size))))
