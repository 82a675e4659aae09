"""KV events: tell other programs, such as a cache-aware router, which blocks kvtier has stored.

Needs vLLM's `--kv-events-config '{"enable_kv_cache_events": true, …}'`. A `BlockStored` with medium
"CPU" follows when every worker has reported the block as stored or present. It has the block's hash
and group; tokens and parent were in the event for the GPU, which has the same hash.

The engine does not learn what the server evicts or loses in a restart. There is no `BlockRemoved`,
so a reader must treat such blocks as likely, not certain. A reset is `AllBlocksCleared`, which has
no medium, but vLLM clears its own cache in the same call. Blocks that lower tiers keep over a reset
are not announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .... import is_hold_key
from ....offload import CacheGroup, EndedSave
from ..compat import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent, maybe_convert_block_hash

__all__ = ["KVEvents"]

_GROUP_BYTES = 4  # at the end of a key, see make_key


class KVEvents:
    """Queue of events for vLLM. Only used on the scheduler's thread."""

    def __init__(self, groups: Iterable[CacheGroup], *, enabled: bool) -> None:
        self._groups: Mapping[int, CacheGroup] = {group.index: group for group in groups}
        self._enabled = enabled
        self._events: list[KVCacheEvent] = []

    def stored(self, save: EndedSave) -> None:
        """Queues events for the blocks of `save` that all workers have stored."""
        if not self._enabled:
            return
        for position, (key, group_index) in enumerate(zip(save.job.keys, save.job.groups, strict=True)):
            # A block that only a hold names cannot be found by its content.
            if position not in save.not_stored and not is_hold_key(key):
                self._events.append(self._stored(key, group_index))

    def cleared(self) -> None:
        """Replaces all queued events with one `AllBlocksCleared`."""
        if self._enabled:
            self._events = [AllBlocksCleared()]

    def take(self) -> Iterable[KVCacheEvent]:
        """Returns the events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def _stored(self, key: bytes, group_index: int) -> KVCacheEvent:
        # One event per block, because a list would make each block the next one's parent.
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
