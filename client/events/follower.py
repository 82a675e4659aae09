"""State machine that turns the responses of `WatchEvents` into changes per medium. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...protos.v1 import common_pb2, events_pb2
from ...protos.wire.block_contents import BlockContent, unpack_contents
from ...protos.wire.packed_keys import unpack_keys

__all__ = ["BlockFollower", "HeldChange"]

_Place = tuple[str, str, bytes]
"""Medium, name of the tier, id of the namespace."""


@dataclass(frozen=True, slots=True)
class HeldChange:
    """Blocks that a medium has got, or that no tier of the medium has any more.

    Attributes:
        stored: True if the medium has got the blocks.
        medium: "CPU" or "STORAGE".
        keys: keys of the blocks.
        contents: tokens of stored blocks, by key, if the server knows them and was asked for them.
    """

    stored: bool
    medium: str
    keys: list[bytes]
    contents: Mapping[bytes, BlockContent] = field(default_factory=dict)


class BlockFollower:
    """The blocks that each tier holds. Every block of a medium is stored once and removed once.

    During a replay, blocks from before the replay stay known, so that only differences are changes.
    """

    def __init__(self) -> None:
        self.cursor: events_pb2.EventCursor | None = None
        """Position to resume from; None if the next stream must begin with a replay."""
        self._held: dict[_Place, set[bytes]] = defaultdict(set)
        self._unconfirmed: dict[_Place, set[bytes]] = defaultdict(set)
        """Blocks from before a replay that the replay has not confirmed yet."""

    def apply(self, response: events_pb2.WatchEventsResponse) -> list[HeldChange]:
        changes: list[HeldChange] = []
        if response.phase == events_pb2.REPLAY_PHASE_BEGIN:
            for place, keys in self._held.items():
                self._unconfirmed[place] |= keys
            self._held.clear()
        for event in response.events:
            place = (event.medium, event.tier, event.namespace_id)
            if event.kind == events_pb2.BLOCK_EVENT_KIND_STORED:
                self._store(place, event, changes)
            elif event.kind == events_pb2.BLOCK_EVENT_KIND_REMOVED:
                self._remove(self._held, place, _keys_of(event), changes)
            elif event.kind == events_pb2.BLOCK_EVENT_KIND_CLEARED:
                self._remove(self._held, place, list(self._held[place]), changes)
        if response.phase == events_pb2.REPLAY_PHASE_END:
            for place, left in list(self._unconfirmed.items()):
                self._remove(self._unconfirmed, place, list(left), changes)
            self._unconfirmed.clear()
        self.cursor = response.cursor if response.HasField("cursor") else None
        return changes

    def lost(self) -> list[HeldChange]:
        """Drops all blocks, because the server cannot be reached. Returns the changes."""
        changes: list[HeldChange] = []
        for blocks in (self._held, self._unconfirmed):
            for place, keys in list(blocks.items()):
                self._remove(blocks, place, list(keys), changes)
        self._held.clear()
        self._unconfirmed.clear()
        self.cursor = None
        return changes

    def _store(self, place: _Place, event: events_pb2.BlockEvent, changes: list[HeldChange]) -> None:
        keys = _keys_of(event)
        held, unconfirmed = self._held[place], self._unconfirmed.get(place)
        new = []
        for key in keys:
            if not self._has(place[0], key):
                new.append(key)
            held.add(key)
            if unconfirmed:
                unconfirmed.discard(key)
        if new:
            changes.append(HeldChange(True, place[0], new, _contents_of(event, keys)))

    def _remove(
        self, blocks: dict[_Place, set[bytes]], place: _Place, keys: Iterable[bytes], changes: list[HeldChange]
    ) -> None:
        there, gone = blocks[place], []
        for key in keys:
            if key in there:
                there.remove(key)
                if not self._has(place[0], key):
                    gone.append(key)
        if gone:
            changes.append(HeldChange(False, place[0], gone))

    def _has(self, medium: str, key: bytes) -> bool:
        """Returns whether any tier of a medium has a block. There are only a few places."""
        return any(
            place[0] == medium and key in keys
            for blocks in (self._held, self._unconfirmed)
            for place, keys in blocks.items()
        )


def _keys_of(event: events_pb2.BlockEvent) -> list[bytes]:
    packed: common_pb2.PackedKeys = event.keys
    return unpack_keys(packed.keys, packed.key_bytes) if packed.keys else []


def _contents_of(event: events_pb2.BlockEvent, keys: Sequence[bytes]) -> dict[bytes, BlockContent]:
    if not event.HasField("contents"):
        return {}
    return dict(zip(keys, unpack_contents(event.contents, len(keys), event.keys.key_bytes), strict=True))
