"""State machine that turns the responses of `WatchEvents` into changes per medium. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...protos.v1 import events_pb2
from ...protos.wire.block_contents import BlockContent, unpack_contents
from ...protos.wire.packed_keys import unpack_key_list
from .known_blocks import KnownBlocks

__all__ = ["BlockFollower", "HeldChange"]


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
    """The blocks that each tier holds. Every block of a medium is stored once and removed once."""

    def __init__(self) -> None:
        self.cursor: events_pb2.EventCursor | None = None
        """Position to resume from; None if the next stream must begin with a replay."""
        self._known = KnownBlocks[str]()
        """A group is a medium; a tier is its name and the id of the namespace."""

    def apply(self, response: events_pb2.WatchEventsResponse) -> list[HeldChange]:
        changes: list[HeldChange] = []
        if response.phase == events_pb2.REPLAY_PHASE_BEGIN:
            for _ in self._known.begin_replay():
                pass
        for event in response.events:
            medium, tier = event.medium, (event.tier, event.namespace_id)
            if event.kind == events_pb2.BLOCK_EVENT_KIND_STORED:
                keys = _keys_of(event)
                if new := self._known.store(medium, tier, keys):
                    changes.append(HeldChange(True, medium, new, _contents_of(event, keys)))
            elif event.kind == events_pb2.BLOCK_EVENT_KIND_REMOVED:
                changes += _removed([(medium, self._known.remove(medium, tier, _keys_of(event)))])
            elif event.kind == events_pb2.BLOCK_EVENT_KIND_CLEARED:
                changes += _removed((medium, keys) for keys in self._known.clear(medium, tier))
        if response.phase == events_pb2.REPLAY_PHASE_END:
            changes += _removed(self._known.end_replay())
        self.cursor = response.cursor if response.HasField("cursor") else None
        return changes

    def lost(self) -> list[HeldChange]:
        """Drops all blocks, because the server cannot be reached. Returns the changes."""
        self.cursor = None
        return list(_removed(self._known.lose()))


def _removed(found: Iterable[tuple[str, list[bytes]]]) -> Iterator[HeldChange]:
    return (HeldChange(False, medium, keys) for medium, keys in found if keys)


def _keys_of(event: events_pb2.BlockEvent) -> list[bytes]:
    return unpack_key_list(event.keys)


def _contents_of(event: events_pb2.BlockEvent, keys: Sequence[bytes]) -> dict[bytes, BlockContent]:
    if not event.HasField("contents"):
        return {}
    return dict(zip(keys, unpack_contents(event.contents, len(keys), event.keys.key_bytes), strict=True))
