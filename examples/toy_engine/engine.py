"""Toy engine without a neural network. Its KV cache behaves like that of a real engine.

The KV of a token depends on all tokens before it, and the output depends on all KV. One wrong byte
of KV changes the output, so tests detect it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TOKEN_BYTES", "Kv", "ToyEngine"]

TOKEN_BYTES = 64

Kv = npt.NDArray[np.uint8]
"""KV of consecutive tokens: [tokens, TOKEN_BYTES]."""


class ToyEngine:
    """Computes KV token by token, and outputs a token that depends on all KV."""

    def __init__(self, weights: str = "toy") -> None:
        self._weights = weights
        self.computed = 0
        """Number of tokens whose KV was computed so far. A cache reduces this number."""

    def prefill(self, tokens: Sequence[int], known: Kv) -> Kv:
        """Returns the KV of all tokens; the first `len(known)` are not computed again."""
        kv = np.zeros((len(tokens), TOKEN_BYTES), np.uint8)
        kv[: len(known)] = known
        for position in range(len(known), len(tokens)):
            before = kv[position - 1].tobytes() if position else self._weights.encode()
            kv[position] = np.frombuffer(
                hashlib.blake2b(before + tokens[position].to_bytes(8, "little")).digest(), np.uint8
            )
            self.computed += 1
        return kv

    def decode(self, kv: Kv) -> int:
        """Returns the next token."""
        return int.from_bytes(hashlib.blake2b(kv.tobytes(), digest_size=4).digest(), "little")
