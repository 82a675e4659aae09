"""KV events about blocks of the server, for other programs such as a cache-aware router."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from .....protos.wire.block_contents import unpack_tokens
from .... import Client, is_hold_key
from ....events import BlockContent, EventStream, HeldChange
from ....offload import CacheGroup, EndedSave
from ..compat import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, maybe_convert_block_hash

__all__ = ["KVEvents", "OpenStream"]

OpenStream: TypeAlias = Callable[[Client, Callable[[Sequence[HeldChange]], object]], EventStream]

_GROUP_BYTES = 4  # at the end of a key, see make_key
_HASH_BYTES = 32  # of vLLM's block hashes, which are made by SHA-256
_MAX_QUEUED = 1 << 14
"""Limit of queued events. vLLM takes none while it has no requests. Beyond the limit, the stream
waits. If the server then drops events, it repeats what it holds."""


class KVEvents:
    """Queue of vLLM's KV events.

    Needs vLLM's `--kv-events-config '{"enable_kv_cache_events": true, …}'`. An event names a block
    by the hash of vLLM's own event, which has the medium "GPU", the tokens and the parent. With the
    setting `publish_token_ids`, these events have tokens and parent, too.

    With `open_stream`, the events follow the server: `BlockStored` and `BlockRemoved` for each
    medium, for blocks of all engines in the namespace. This engine's own stores come back from the
    server, so they are not published a second time.

    Without `open_stream`, `BlockStored` with medium "CPU" is published when every worker has
    reported a block as stored or present. There is then no `BlockRemoved`, so a reader must treat a
    stored block as likely, not certain.

    A reset publishes `AllBlocksCleared`. This event covers all media, because vLLM clears its own
    cache in the same call. When the reset has ended, blocks that disks have kept are published
    again.
    """

    def __init__(self, groups: Iterable[CacheGroup], open_stream: OpenStream | None, *, enabled: bool) -> None:
        self._groups: Mapping[int, CacheGroup] = {group.index: group for group in groups}
        self._enabled = enabled
        self._open_stream = open_stream if enabled else None
        self._stream: EventStream | None = None
        self._generation = 0
        """Number of the stream. Changes of earlier streams are dropped."""
        self._changed = threading.Condition()
        self._events: list[KVCacheEvent] = []

    def stored(self, save: EndedSave) -> None:
        """Queues events for the blocks of `save` that all workers have stored."""
        if not self._enabled or self._open_stream is not None:
            return
        for position, key in enumerate(save.job.keys):
            # A block with a hold key has no content hash that an event could name.
            if position not in save.not_stored and not is_hold_key(key):
                content = save.job.contents[position] if save.job.contents else None
                self._events.append(self._stored(key, MEDIUM_CPU, content))

    def follow(self, client: Client) -> None:
        """Begins to follow the server in the namespace of a client."""
        if self._open_stream is not None:
            self._end_stream()
            generation = self._generation
            self._stream = self._open_stream(client, lambda changes: self._take(generation, changes))

    def cleared(self) -> None:
        """Replaces all queued events with one `AllBlocksCleared`; stops to follow the server."""
        if self._enabled:
            self._end_stream()
            with self._changed:
                self._events = [AllBlocksCleared()]

    def take(self) -> Iterable[KVCacheEvent]:
        if not self._events:
            return ()
        with self._changed:
            events, self._events = self._events, []
            self._changed.notify_all()
        return events

    def close(self) -> None:
        self._end_stream()

    def _end_stream(self) -> None:
        with self._changed:
            self._generation += 1
            self._changed.notify_all()
        if self._stream is not None:
            self._stream.close(0)
            self._stream = None

    def _take(self, generation: int, changes: Sequence[HeldChange]) -> None:
        """Queues events for changes at the server. Runs on the stream's thread."""
        for change in changes:
            events = [*(self._events_of(change))]
            with self._changed:
                self._changed.wait_for(lambda: generation != self._generation or len(self._events) < _MAX_QUEUED)
                if generation != self._generation:
                    return
                self._events += events

    def _events_of(self, change: HeldChange) -> Iterable[KVCacheEvent]:
        keys = [key for key in change.keys if _group_of(key) in self._groups]
        if change.stored:
            return (self._stored(key, change.medium, change.contents.get(key)) for key in keys)
        by_group: dict[int, list[bytes]] = {}
        for key in keys:
            by_group.setdefault(_group_of(key), []).append(key)
        return (
            BlockRemoved(block_hashes=[_hash_of(key) for key in gone], medium=change.medium, group_idx=group)
            for group, gone in by_group.items()
        )

    def _stored(self, key: bytes, medium: str, content: BlockContent | None) -> KVCacheEvent:
        group = _group_of(key)
        parent_key, token_ids, lora_name = content or (None, b"", "")
        # One event per block: readers take a block of an event as the parent of the next block.
        return BlockStored(
            block_hashes=[_hash_of(key)],
            parent_block_hash=None if parent_key is None else _hash_of(parent_key),
            token_ids=unpack_tokens(token_ids),
            block_size=self._groups[group].block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=lora_name or None,
            group_idx=group,
        )


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def _hash_of(key: bytes) -> bytes | int:
    """Returns the hash of vLLM's own events. A key of a LoRA request also has a tag."""
    converted: bytes | int = maybe_convert_block_hash(key[:-_GROUP_BYTES][:_HASH_BYTES])
    return converted
