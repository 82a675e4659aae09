"""Complete adapter of a toy engine: names blocks, loads known blocks and stores new blocks.

KVTIER_ENDPOINT=unix:… python examples/toy_engine/adapter.py
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from engine import TOKEN_BYTES, Kv, ToyEngine

from kvtier.client import Client, Group, KVTierError, Namespace, make_key

__all__ = ["BLOCK_TOKENS", "CachedEngine", "keys_of", "namespace_of"]

BLOCK_TOKENS = 16
WAIT_SECONDS = 0.5

_log = logging.getLogger(__name__)


def namespace_of(weights: str) -> Namespace:
    """Returns the namespace: all properties that change the meaning of a block's bytes."""
    return Namespace(
        model="toy",
        revision=weights,  # for a real model: a digest of the weights, or a fixed revision
        dtype="uint8",
        layout="token,byte",
        hash_scheme=f"blake2b:{BLOCK_TOKENS}",
        groups=(Group(part_bytes=BLOCK_TOKENS * TOKEN_BYTES, block_tokens=BLOCK_TOKENS),),
    )


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Returns the keys of the full blocks. A hash covers all tokens up to the end of its block."""
    keys, digest = [], b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block = np.asarray(tokens[end - BLOCK_TOKENS : end], "<u8").tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        keys.append(make_key(digest))
    return keys


class CachedEngine:
    """Toy engine with kvtier as its cache. If the cache fails, the engine computes all tokens."""

    def __init__(self, engine: ToyEngine, client: Client) -> None:
        self._engine = engine
        self._client = client
        self._complained = False

    def generate(self, tokens: Sequence[int], request_id: str = "") -> int:
        """Returns the next token."""
        known = self._load(tokens, request_id)
        kv = self._engine.prefill(tokens, known)
        self._store(tokens, kv, request_id)
        return self._engine.decode(kv)

    def _load(self, tokens: Sequence[int], request_id: str) -> Kv:
        # A real engine must compute at least the last token, because it needs the logits.
        keys = keys_of(tokens[:-1])
        buffers = np.empty((len(keys), BLOCK_TOKENS * TOKEN_BYTES), np.uint8)
        hits = 0
        if keys:
            try:
                hits = self._client.load(keys, list(buffers), request_id=request_id, wait=WAIT_SECONDS)
            except KVTierError as error:  # the buffers are undefined now and are not used
                self._complain("not loaded, computing instead", error)
        return buffers[:hits].reshape(-1, TOKEN_BYTES)

    def _store(self, tokens: Sequence[int], kv: Kv, request_id: str) -> None:
        keys = keys_of(tokens)
        if not keys:
            return
        blocks = kv[: len(keys) * BLOCK_TOKENS].reshape(len(keys), -1)
        try:
            self._client.store(keys, list(blocks), request_id=request_id)
        except KVTierError as error:  # a failed store is only a later miss
            self._complain("not stored", error)

    def _complain(self, what: str, error: KVTierError) -> None:
        _log.log(logging.DEBUG if self._complained else logging.WARNING, "kvtier: %s: %s", what, error)
        self._complained = True

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> int:
    """Answers one prompt, and prints how much of it was computed."""
    prompt = list(range(200))
    engine = ToyEngine()
    client = Client(namespace=namespace_of("toy"), name="toy")
    client.wait_until_connected(5.0)
    with CachedEngine(engine, client) as cached:
        answer = cached.generate(prompt, request_id="toy-1")
    print(f"answer {answer}: {engine.computed} of {len(prompt)} tokens computed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
