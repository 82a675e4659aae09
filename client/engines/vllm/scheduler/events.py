"""KV events: what other programs, like a router that knows the caches, are told of what kvtier stores for this engine.

With vLLM's ``--kv-events-config '{"enable_kv_cache_events": true, …}'``. A ``BlockStored`` with medium "CPU" follows when every
worker has reported a block as stored, or as there already. It names the block by its hash and its group; the tokens and the parent
were in the event for the GPU, which had the same hash.

What the server evicts, or loses in a restart, nobody tells the engine: there is no ``BlockRemoved``, and a reader must take a
block of this medium for likely, not for certain. A reset is ``AllBlocksCleared``: that has no medium, but vLLM clears its own cache
in the same call. What the tiers below the CPU tier keep over a reset is not announced.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .... import is_hold_key
from ....offload import CacheGroup, EndedSave
from ..compat import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent, maybe_convert_block_hash

__all__ = ["KVEvents"]

_GROUP_BYTES = 4  # at the end of a key, see make_key


class KVEvents:
    """Events that vLLM has not taken yet. Only on the scheduler's thread."""

    def __init__(self, groups: Iterable[CacheGroup], *, enabled: bool) -> None:
        self._groups: Mapping[int, CacheGroup] = {group.index: group for group in groups}
        self._enabled = enabled
        self._events: list[KVCacheEvent] = []

    def stored(self, save: EndedSave) -> None:
        """A save has ended: all workers have stored its blocks, but for some."""
        if not self._enabled:
            return
        for position, (key, group_index) in enumerate(zip(save.job.keys, save.job.groups, strict=True)):
            # What only a hold names is found by nobody who asks for content.
            if position not in save.not_stored and not is_hold_key(key):
                self._events.append(self._stored(key, group_index))

    def cleared(self) -> None:
        """The store is emptied, and until that is done all is a miss."""
        if self._enabled:
            self._events = [AllBlocksCleared()]

    def take(self) -> Iterable[KVCacheEvent]:
        """Returns the events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def _stored(self, key: bytes, group_index: int) -> KVCacheEvent:
        # One event per block: a list would say that each is the next one's parent.
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(key[:-_GROUP_BYTES])],
            parent_block_hash=None,
            token_ids=[],
            block_size=self._groups[group_index].block_tokens,
            lora_id=None,
            medium=MEDIUM_CPU,
            lora_name=None,
            group_idx=group_index,
        )
