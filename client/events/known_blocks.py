"""Table of the blocks that the tiers of a server hold, as its events tell. Pure.

The client and the server's publisher of events use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["KnownBlocks"]

G = TypeVar("G", bound=Hashable)

_SLICE_KEYS = 1024
"""Keys per slice: less than 1 ms. Sometimes a dict grows meanwhile: 20 ms at a million keys."""

_Blocks = dict[bytes, bool]
"""Keys in the order in which they were stored. The values are true."""
_Places = defaultdict[G, dict[Hashable, _Blocks]]


class KnownBlocks(Generic[G]):
    """The blocks of each tier, and the changes of each group of tiers, such as a medium.

    A block of a group is stored when the first tier of the group has it, and removed when no tier
    of the group has it any more. During a replay, blocks from before the replay stay known, so that
    only differences are changes. Iterators do their work in slices, each with the keys of a change.
    Before an iterator has ended, call nothing else.

    Memory: 60 bytes per block and tier beside those of the keys; twice that during a replay.
    """

    def __init__(self) -> None:
        self._held: _Places[G] = defaultdict(dict)
        self._unconfirmed: _Places[G] = defaultdict(dict)
        """Blocks from before a replay that the replay has not confirmed yet."""

    def store(self, group: G, tier: Hashable, keys: Sequence[bytes]) -> list[bytes]:
        """Adds blocks of a tier; returns those that are new in the group."""
        new = self._unknown(group, dict.fromkeys(keys))
        self._held[group].setdefault(tier, {}).update(dict.fromkeys(keys, True))
        if unconfirmed := self._unconfirmed.get(group, {}).get(tier):
            for key in keys:
                unconfirmed.pop(key, None)
        return new

    def remove(self, group: G, tier: Hashable, keys: Sequence[bytes]) -> list[bytes]:
        """Removes blocks of a tier; returns those that the group has no more."""
        blocks = self._held.get(group, {}).get(tier, {})
        removed = [key for key in keys if blocks.pop(key, False)]
        _drop_if_empty(self._held, group, tier)
        return self._unknown(group, removed)

    def clear(self, group: G, tier: Hashable) -> Iterator[list[bytes]]:
        """Removes all blocks of a tier."""
        return self._remove_all(self._held, group, tier)

    def begin_replay(self) -> Iterator[None]:
        """After this, only blocks that are stored again stay known until `end_replay`."""
        for group, tiers in self._held.items():
            for tier, blocks in tiers.items():
                older = self._unconfirmed[group].setdefault(tier, blocks)
                while older is not blocks and blocks:  # the last replay was interrupted
                    older.update(islice(_newest(blocks), _SLICE_KEYS))
                    yield
        self._held.clear()

    def end_replay(self) -> Iterator[tuple[G, list[bytes]]]:
        """Removes the blocks that the replay has not confirmed."""
        return self._remove_everything(self._unconfirmed)

    def lose(self) -> Iterator[tuple[G, list[bytes]]]:
        """Removes all blocks."""
        yield from self._remove_everything(self._held)
        yield from self._remove_everything(self._unconfirmed)

    def all(self, group: G) -> Iterator[list[bytes]]:
        """Yields each block of a group once."""
        places = self._blocks_of(group)
        for number, blocks in enumerate(places):
            rest = iter(blocks)
            while keys := list(islice(rest, _SLICE_KEYS)):
                yield _without(keys, places[:number])

    def _remove_everything(self, places: _Places[G]) -> Iterator[tuple[G, list[bytes]]]:
        for group in list(places):
            for tier in list(places[group]):
                for keys in self._remove_all(places, group, tier):
                    yield group, keys

    def _remove_all(self, places: _Places[G], group: G, tier: Hashable) -> Iterator[list[bytes]]:
        """Removes the blocks one by one, because freeing a million at once takes 50 ms."""
        blocks = places.get(group, {}).get(tier, {})
        while blocks:
            yield self._unknown(group, [key for key, _ in islice(_newest(blocks), _SLICE_KEYS)])
        _drop_if_empty(places, group, tier)

    def _unknown(self, group: G, keys: Iterable[bytes]) -> list[bytes]:
        return _without(keys, self._blocks_of(group))

    def _blocks_of(self, group: G) -> list[_Blocks]:
        """Returns the blocks of each tier of a group. There are only a few tiers."""
        found = (places.get(group, {}).values() for places in (self._held, self._unconfirmed))
        return [blocks for tiers in found for blocks in tiers if blocks]


def _without(keys: Iterable[bytes], places: Sequence[_Blocks]) -> list[bytes]:
    """Returns the keys that are in none of the places."""
    left = list(keys)
    for blocks in places:
        left = [key for key in left if key not in blocks]
    return left


def _drop_if_empty(places: _Places[G], group: G, tier: Hashable) -> None:
    """Drops a tier without blocks, because clients can make any number of groups."""
    tiers = places.get(group, {})
    if not tiers.get(tier, True):
        del tiers[tier]
        if not tiers:
            del places[group]


def _newest(blocks: _Blocks) -> Iterator[tuple[bytes, bool]]:
    """Removes and yields blocks, the newest first."""
    while blocks:
        yield blocks.popitem()
