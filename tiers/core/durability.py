"""Durability: whether blocks survive a restart, and sending on their way those that would not."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import NamespaceId
from ..types import DurableStatus
from .cpu_tier import PrimaryTier
from .transfers import TierFlow

__all__ = ["Durability"]


class Durability:
    """Knows what is in the durable tiers, or on its way there."""

    def __init__(self, primary: PrimaryTier, flow: TierFlow) -> None:
        self._primary = primary
        self._flow = flow
        self._below = flow.whereabouts

    def flush(self, namespace: NamespaceId, keys: Sequence[bytes]) -> bytes:
        """Returns a `DurableStatus` per key, and sends on their way ready blocks that no durable tier has."""
        blocks = self._primary.blocks_of(namespace)
        waiting = [
            block
            for key in keys
            if (block := blocks.get(key)) and block.ready and not self._below.is_becoming_durable(namespace, key)
        ]
        self._flow.cascade(list(dict.fromkeys(waiting)), None, even_if_busy=True)
        return bytes(self.of(namespace, key) for key in keys)

    def send_left_out(self) -> None:
        """Sends on their way, last used first, the blocks that backpressure had left out.

        Those only: what a tier has had and evicted since must not drive out what it has now.
        """
        self._flow.cascade(self._primary.left_out_blocks(), None, even_if_busy=True)

    def of(self, namespace: NamespaceId, key: bytes) -> DurableStatus:
        """Returns whether a block survives a restart."""
        if self._below.is_durable(namespace, key):
            return DurableStatus.DURABLE
        block = self._primary.blocks_of(namespace).get(key)
        being_written = block is not None and block.pending
        on_its_way = being_written or self._below.is_becoming_durable(namespace, key)
        return DurableStatus.PENDING if on_its_way else DurableStatus.VOLATILE
