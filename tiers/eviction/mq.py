"""Multi-Queue eviction policy (Zhou, Philbin and Li, USENIX 2001) for second-level caches.

In a second-level cache, recency predicts little: the first level serves the repeated uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Generic

from .open_requests import LastRequest
from .policy import T

__all__ = ["MQ"]

QUEUES = 8
GHOSTS_PER_ITEM = 4
HALF_LIFE = 16
"""After this many uses per item, earlier observed distances count half."""


class _State:
    __slots__ = ("expires", "last", "queue", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.queue = 0
        self.last = 0
        self.expires = 0


class MQ(Generic[T]):
    """One queue per logarithm of the use count. An item unused for a lifetime moves down one queue.

    The lifetime is adapted as in the paper: from the peak of a histogram of reuse distances.
    """

    declines: ClassVar[bool] = False

    def __init__(self) -> None:
        self._queues: list[OrderedDict[T, _State]] = [OrderedDict() for _ in range(QUEUES)]
        self._states: dict[T, _State] = {}
        self._ghosts: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self._distances = [0.0] * 64
        self._lifetime = 0
        self._clock = 0
        self._next_review = 0
        self._requests = LastRequest[T]()

    def use(self, items: Sequence[T], request: Hashable = None, now: float = 0.0) -> None:
        for item in reversed(self._requests.fresh(items, request)):
            self._clock += 1
            state = self._states.get(item)
            if state is None:
                uses, last = self._ghosts.pop(item.name, (0, 0))
                state = self._states[item] = _State(uses)
                state.last = last
            else:
                del self._queues[state.queue][item]
            if state.uses:
                self._distances[(self._clock - state.last).bit_length()] += 1
            state.uses += 1
            state.last = self._clock
            self._enter(item, state, min(state.uses.bit_length() - 1, QUEUES - 1))
            self._age()

    def finish(self, request: Hashable) -> None:
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        """Removes an item and stores its use count in a ghost."""
        state = self._states.pop(item, None)
        if state is None:
            return
        del self._queues[state.queue][item]
        self._ghosts[item.name] = (state.uses, state.last)
        self._ghosts.move_to_end(item.name)
        while len(self._ghosts) > GHOSTS_PER_ITEM * (len(self) + 1):
            self._ghosts.popitem(last=False)
        self._requests.forget(item)

    def victims(self) -> Iterator[T]:
        for queue in self._queues:
            yield from queue

    def oldest(self) -> T | None:
        heads = [
            (state.last, item)
            for queue in self._queues
            for item, state in [next(iter(queue.items()), (None, None))]
            if item is not None and state is not None
        ]
        return min(heads, key=lambda pair: pair[0])[1] if heads else None

    def __len__(self) -> int:
        return len(self._states)

    def _enter(self, item: T, state: _State, queue: int) -> None:
        state.queue = queue
        state.expires = self._clock + self._lifetime
        self._queues[queue][item] = state

    def _age(self) -> None:
        """Moves the head of each queue one queue down if the head's lifetime has passed."""
        if self._clock >= self._next_review:
            self._review()
        for number in range(1, QUEUES):
            queue = self._queues[number]
            if queue:
                item, state = next(iter(queue.items()))
                if state.expires < self._clock:
                    del queue[item]
                    self._enter(item, state, number - 1)

    def _review(self) -> None:
        """Sets the lifetime to the octave above the octave with the most reuse."""
        peak = max(range(len(self._distances)), key=self._distances.__getitem__)
        self._lifetime = max(2 << peak, len(self)) if self._distances[peak] else len(self)
        period = max(1024, len(self))
        self._next_review = self._clock + period
        fade = 0.5 ** (1 / HALF_LIFE)
        self._distances = [fade * count for count in self._distances]
