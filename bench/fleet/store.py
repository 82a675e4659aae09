"""Shared tier of a simulated fleet: bounded memory and bandwidth, a time to live."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["SharedStore", "StoreLink"]


class StoreLink:
    """Bandwidth of the store. Loads go before stores, except stores that are already under way."""

    def __init__(self, bytes_per_second: float, in_flight_bytes: float) -> None:
        self.speed = bytes_per_second
        self.moved_bytes = 0.0
        self.free_at = 0.0
        """When all transfers have ended."""
        self._loads_end = 0.0
        self._most_in_flight_seconds = in_flight_bytes / bytes_per_second

    def load_wait(self, now: float) -> float:
        """Returns the seconds until a new load would begin."""
        loads = max(0.0, self._loads_end - now)
        stores = max(0.0, self.free_at - now) - loads
        return loads + min(stores, self._most_in_flight_seconds)

    def store_wait(self, now: float) -> float:
        return max(0.0, self.free_at - now)

    def load(self, now: float, nbytes: float) -> float:
        """Queues a load; returns the time of its end."""
        end = now + self.load_wait(now) + nbytes / self.speed
        self._loads_end = max(now, self._loads_end) + nbytes / self.speed
        self.store(now, nbytes)
        return end

    def store(self, now: float, nbytes: float) -> float:
        """Queues a store; returns the time of its end."""
        self.free_at = max(now, self.free_at) + nbytes / self.speed
        self.moved_bytes += nbytes
        return self.free_at


class SharedStore:
    """Store with LRU eviction."""

    def __init__(self, capacity: int, link: StoreLink, *, visible_after_seconds: float, ttl_seconds: float) -> None:
        self.capacity = capacity
        self.used = 0
        """Blocks."""
        self.link = link
        self._visible_after = visible_after_seconds
        self._ttl = ttl_seconds
        self._held: OrderedDict[int, tuple[int, float, float]] = OrderedDict()
        """Per segment: length, time of the store, time of the last load; the oldest use first."""

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def prefix(self, keys: Sequence[int], skipped: int, now: float) -> int:
        """Returns how many segments after the first `skipped` ones other hosts can load."""
        latest = now - self._visible_after
        held = self._held
        for place in range(skipped, len(keys)):
            found = held.get(keys[place])
            if found is None or found[1] > latest or now - found[2] > self._ttl:
                return place - skipped
        return len(keys) - skipped

    def loaded(self, keys: Sequence[int], now: float) -> None:
        """Records a use: starts the time to live of the segments again."""
        for key in reversed(keys):
            length, stored, _ = self._held[key]
            self._held[key] = length, stored, now
            self._held.move_to_end(key)

    def store(self, key: int, length: int, now: float) -> None:
        """Stores a segment that the store lacks; evicts others if it is full."""
        if length > self.capacity:
            return
        self._held[key] = length, now, now
        self.used += length
        while self._held:
            oldest = next(iter(self._held))
            size, _, used = self._held[oldest]
            if self.used <= self.capacity and now - used <= self._ttl:
                return
            del self._held[oldest]
            self.used -= size
