"""Names of blocks: chained content hashes.

A block's hash covers its tokens, everything before them, and what else changes their meaning (`extra`), so that equal hashes
mean equal KV. Separate processes agree: nothing of Python's own hash is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["HASH_SCHEME", "block_hashes"]

HASH_SCHEME = "kvtier.transformers.sha256.1"
"""Part of the namespace; changes when the hashes do."""


def block_hashes(tokens: Sequence[int], block_tokens: int, *, extra: bytes = b"") -> list[bytes]:
    """Returns the hash (32 bytes) of each full block of `tokens`; a rest that does not fill a block has none."""
    data = np.asarray(tokens, dtype="<i8").tobytes()
    parent = hashlib.sha256(HASH_SCHEME.encode() + b"\0" + extra).digest()
    step = 8 * block_tokens
    hashes = []
    for end in range(step, len(data) + 1, step):
        parent = hashlib.sha256(parent + data[end - step : end]).digest()
        hashes.append(parent)
    return hashes
