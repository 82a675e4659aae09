"""Topic of the publisher: the changes of its blocks that it has not published yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import islice

from .messages import ContentOf, PublishedEvent

__all__ = ["Topic"]

_BATCH_KEYS = 256
"""Maximum number of keys of a message: 35 KB with one event per block."""
_BATCH_CONTENT_BYTES = 256 << 10
"""Token ids and adapters after which a message gets no further block: at most 1 MiB in all."""


class Topic:
    """Blocks whose last published event is not the last one that happened.

    A block that changes twice before it is published is not published. So a topic needs no memory
    for what it has published, and catches up however many changes there are.
    """

    def __init__(self, block_tokens: Sequence[int], content_of: ContentOf) -> None:
        self.block_tokens = block_tokens
        """Number of tokens of a block, for each group."""
        self.content_of = content_of
        self.is_wanted = False
        """Whether a session has the topic. If not, the topic ends when all blocks are removed."""
        self.is_sending = False
        """Whether taken events are being sent. If this fails, they become changes again."""
        self._stored: dict[str, _Unsent] = defaultdict(partial(_Unsent, content_of))
        """Stored blocks by medium."""
        self._removed: dict[str, _Unsent] = defaultdict(partial(_Unsent, content_of))

    @property
    def unsent(self) -> int:
        """Number of blocks with changes that are not published yet."""
        return sum(len(unsent.keys) for unsent in (*self._stored.values(), *self._removed.values()))

    @property
    def has_unsent(self) -> bool:
        return self.is_sending or self.unsent > 0

    def change(self, event: PublishedEvent) -> None:
        stored, removed = self._stored[event.medium].keys, self._removed[event.medium].keys
        unsent, opposite = (stored, removed) if event.is_stored else (removed, stored)
        for key in event.keys:
            if not opposite.pop(key, False):
                unsent[key] = True

    def take(self) -> list[PublishedEvent]:
        """Returns the next event of each medium and kind; they count as published.

        A removed event comes after all stored events of its blocks. Otherwise a block that moves
        to another medium has no medium for a moment, and indexers drop it with its children.
        """
        events = [PublishedEvent(True, medium, unsent.take()) for medium, unsent in self._stored.items()]
        still_unsent = [unsent.keys for unsent in self._stored.values()]
        events += (PublishedEvent(False, medium, unsent.take(still_unsent)) for medium, unsent in self._removed.items())
        return [event for event in events if event.keys]


class _Unsent:
    """Queue of blocks, in which each block comes after its parent.

    Indexers drop a block whose parent they do not know.
    """

    def __init__(self, content_of: ContentOf) -> None:
        self.keys: dict[bytes, bool] = {}
        self._content_of = content_of
        self._chain: list[bytes] = []
        """The next blocks, last first, unless they are no longer in `keys`."""

    def take(self, excluded: Sequence[Container[bytes]] = ()) -> list[bytes]:
        """Excluded blocks stay in the queue."""
        taken: list[bytes] = []
        room = _BATCH_CONTENT_BYTES

        def is_next(key: bytes) -> bool:
            return key in self.keys and not any(key in each for each in excluded)

        oldest = iter(list(islice(self.keys, _BATCH_KEYS)))
        while len(taken) < _BATCH_KEYS and room > 0:
            if not self._chain:
                key = next(oldest, None)
                if key is None:
                    break
                self._chain = self._ancestors(key, is_next)
            elif is_next(key := self._chain.pop()):
                del self.keys[key]
                taken.append(key)
                if (content := self._content_of(key)) is not None:
                    room -= len(content[1]) + len(content[2])
        if not self.keys:
            self.keys.clear()  # a dict keeps its memory when it becomes empty
        return taken

    def _ancestors(self, key: bytes, is_next: Callable[[bytes], bool]) -> list[bytes]:
        """Returns a block, its parent, and so on, as long as they can be taken."""
        chain: dict[bytes, None] = {}
        each: bytes | None = key
        while each is not None and is_next(each) and each not in chain:
            chain[each] = None  # also ends the loop if an engine has described a cycle
            content = self._content_of(each)
            each = content[0] if content is not None else None
        return list(chain)
