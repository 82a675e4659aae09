"""Blocks that the tiers hold, as the events of the core's log tell; changes of each medium.

A block of a medium is stored when the first tier of the medium has it, and removed when no tier of
the medium has it any more. During a replay, blocks from before the replay stay known, so that only
differences are changes. Work of any size is done in slices, with pauses for the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice

from ...tiers.base import NamespaceId
from ...tiers.core.event_log import EventKind
from .messages import PublishedEvent
from .watch import WatchPhase, WatchStep

__all__ = ["TierBlocks", "pause"]

_SLICE_KEYS = 1024
"""Keys per slice: less than 1 ms. Sometimes a dict grows meanwhile: 20 ms at a million keys."""
_PAUSE_SECONDS = 0.001
"""Pause after each slice, so that publishing takes at most half of the event loop's time."""

_Place = tuple[NamespaceId, int]
"""Namespace and tier."""
_Blocks = dict[bytes, bool]
"""Keys in the order in which they were stored. The values are true."""


async def pause() -> None:
    await asyncio.sleep(_PAUSE_SECONDS)


class TierBlocks:
    """Memory: 60 bytes per block and tier beside those of the tiers; twice that during a replay."""

    def __init__(self, media: Sequence[str]) -> None:
        """`media`: medium of each tier."""
        self._media = media
        self._held: dict[_Place, _Blocks] = defaultdict(dict)
        self._unconfirmed: dict[_Place, _Blocks] = {}
        """Blocks from before a replay that the replay has not confirmed yet."""

    async def apply(self, step: WatchStep) -> AsyncIterator[tuple[NamespaceId, PublishedEvent]]:
        """Yields the changes of a step."""
        if step.phase is WatchPhase.BEGIN:
            await self._begin_replay()
        for event in step.events:
            place = (event.namespace, event.tier)
            if event.kind is EventKind.STORED:
                yield place[0], self._store(place, event.keys)
            elif event.kind is EventKind.REMOVED:
                held = self._held[place]
                yield place[0], self._removed(place, [key for key in event.keys if held.pop(key, False)])
            else:
                async for change in self._remove_all(self._held, place):
                    yield place[0], change
        if step.phase is WatchPhase.END:
            for place in list(self._unconfirmed):
                async for change in self._remove_all(self._unconfirmed, place):
                    yield place[0], change

    async def all(self, namespace: NamespaceId, *, is_stored: bool) -> AsyncIterator[PublishedEvent]:
        """Yields all blocks of a namespace, each once per medium. Meanwhile, call nothing else."""
        for medium in dict.fromkeys(self._media):
            places = self._places(namespace, medium)
            for number, blocks in enumerate(places):
                for keys in _slices(blocks):
                    yield PublishedEvent(is_stored, medium, _without(keys, places[:number]))
                    await pause()

    async def _begin_replay(self) -> None:
        for place, blocks in self._held.items():
            older = self._unconfirmed.get(place)
            if older is None:
                self._unconfirmed[place] = blocks
            else:  # the last replay was interrupted
                while blocks:
                    older.update(islice(_newest(blocks), _SLICE_KEYS))
                    await pause()
        self._held.clear()

    def _store(self, place: _Place, keys: Sequence[bytes]) -> PublishedEvent:
        medium = self._media[place[1]]
        new = _without(keys, self._places(place[0], medium))
        self._held[place].update(dict.fromkeys(keys, True))
        if unconfirmed := self._unconfirmed.get(place):
            for key in keys:
                unconfirmed.pop(key, None)
        return PublishedEvent(True, medium, new)

    def _removed(self, place: _Place, keys: Sequence[bytes]) -> PublishedEvent:
        medium = self._media[place[1]]
        return PublishedEvent(False, medium, _without(keys, self._places(place[0], medium)))

    async def _remove_all(self, places: dict[_Place, _Blocks], place: _Place) -> AsyncIterator[PublishedEvent]:
        """Removes the blocks one by one, because freeing a million at once takes 50 ms."""
        blocks = places[place]
        while blocks:
            yield self._removed(place, [key for key, _ in islice(_newest(blocks), _SLICE_KEYS)])
            await pause()
        del places[place]

    def _places(self, namespace: NamespaceId, medium: str) -> list[_Blocks]:
        """Returns the blocks of each tier of a medium. There are only a few tiers."""
        tiers = [tier for tier, each in enumerate(self._media) if each == medium]
        found = (blocks.get((namespace, tier)) for blocks in (self._held, self._unconfirmed) for tier in tiers)
        return [blocks for blocks in found if blocks]


def _without(keys: Iterable[bytes], places: Sequence[_Blocks]) -> list[bytes]:
    """Returns the keys that are in none of the places."""
    left = list(keys)
    for blocks in places:
        left = [key for key in left if key not in blocks]
    return left


def _newest(blocks: _Blocks) -> Iterator[tuple[bytes, bool]]:
    """Removes and yields blocks, the newest first."""
    while blocks:
        yield blocks.popitem()


def _slices(blocks: _Blocks) -> Iterator[list[bytes]]:
    rest = iter(blocks)
    while keys := list(islice(rest, _SLICE_KEYS)):
        yield keys
