"""CPU tiers of simulated hosts, and links with a bounded bandwidth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.tiers.eviction.admission import SecondUse

from ..policies import GROUP, Replay

__all__ = ["Change", "CoreTier", "CpuTier", "Host", "Link", "LruTier"]


class Change(NamedTuple):
    """A segment of which a CPU tier now holds other blocks than before."""

    key: int
    length: int
    """Leading blocks that the tier holds now."""
    stored: int
    """Number of stored blocks; negative if they were removed."""


class CpuTier(Protocol):
    """CPU tier of one host."""

    def prefix(self, keys: Sequence[int], lengths: Sequence[int], now: float) -> int:
        """Returns the number of leading blocks that the tier holds."""
        ...

    def use(self, keys: Sequence[int], lengths: Sequence[int]) -> list[Change]:
        """Records a use of the segments and stores the blocks that are missing."""
        ...

    def clear(self) -> list[Change]:
        """Removes all blocks."""
        ...


class LruTier:
    """CPU tier with the order of the policy `lru`: the oldest segment first, its tail first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        """Blocks."""
        self.held: OrderedDict[int, int] = OrderedDict()
        """Per segment the number of its leading blocks that are held; least recently used first."""

    def prefix(self, keys: Sequence[int], lengths: Sequence[int], now: float) -> int:
        hits = 0
        held = self.held
        for key, length in zip(keys, lengths, strict=True):
            have = held.get(key, 0)
            hits += have
            if have < length:
                break
        return hits

    def use(self, keys: Sequence[int], lengths: Sequence[int]) -> list[Change]:
        held, changes = self.held, []
        total = sum(lengths)
        for place in range(len(keys) - 1, -1, -1):
            key, length = keys[place], lengths[place]
            total -= length
            length = min(length, self.capacity - total)  # a request larger than the tier: its head
            if length <= 0:
                continue
            have = held.get(key, 0)
            if have < length:
                held[key] = length
                self.used += length - have
                changes.append(Change(key, length, length - have))
            held.move_to_end(key)
        while self.used > self.capacity:
            key = next(iter(held))
            length = held[key]
            evicted = min(length, self.used - self.capacity)
            self.used -= evicted
            if evicted == length:
                del held[key]
            else:
                held[key] = length - evicted
            changes.append(Change(key, length - evicted, -evicted))
        return changes

    def clear(self) -> list[Change]:
        changes = [Change(key, 0, -length) for key, length in self.held.items()]
        self.held.clear()
        self.used = 0
        return changes


class CoreTier:
    """CPU tier with a core of kvtier and any eviction policy. Its changes are not known."""

    def __init__(self, policy: str, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._replay = Replay(policy, capacity)
        self._requests = 0

    def prefix(self, keys: Sequence[int], lengths: Sequence[int], now: float) -> int:
        self._replay.core.tick(now)
        self._requests += 1
        blocks = [
            b"%d:%d" % (key, place) + GROUP
            for key, length in zip(keys, lengths, strict=True)
            for place in range(length)
        ]
        return self._replay.serve(str(self._requests), blocks)

    def use(self, keys: Sequence[int], lengths: Sequence[int]) -> list[Change]:
        return []  # `prefix` has served the whole request

    def clear(self) -> list[Change]:
        self._replay = Replay(self._policy, self._capacity)
        return []


class Link:
    """One direction of a network interface, or a store: transfers one after the other."""

    __slots__ = ("free_at", "sent_bytes", "speed")

    def __init__(self, bytes_per_second: float) -> None:
        self.speed = bytes_per_second
        self.free_at = 0.0
        self.sent_bytes = 0.0

    def wait(self, now: float) -> float:
        """Returns the seconds until a new transfer would begin."""
        return max(0.0, self.free_at - now)

    def send(self, now: float, nbytes: float) -> float:
        """Queues a transfer; returns the time of its end."""
        self.free_at = max(now, self.free_at) + nbytes / self.speed
        self.sent_bytes += nbytes
        return self.free_at


class Host:
    """One host: CPU tier, network interface, and the queue of its engines."""

    __slots__ = ("admission", "busy_until", "incoming", "outgoing", "tier", "up_at")

    def __init__(self, tier: CpuTier, nic_bytes_per_second: float) -> None:
        self.tier = tier
        self.incoming = Link(nic_bytes_per_second)
        self.outgoing = Link(nic_bytes_per_second)
        self.admission = SecondUse()
        self.busy_until = 0.0
        """When the engines have computed all requests that have arrived."""
        self.up_at = 0.0

    def fail(self, up_at: float) -> list[Change]:
        """Loses the CPU tier and restarts."""
        self.admission = SecondUse()
        self.up_at = self.busy_until = up_at
        return self.tier.clear()
