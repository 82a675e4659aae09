"""Contract of shared tiers, at a store in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.shared_tier import ExpiringValueContract
from harness.memory_store import MemoryStore

from kvtier.tiers.remote import value_codec
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import OneNode
from kvtier.tiers.remote.remote_tier import RemoteTier
from kvtier.tiers.remote.value_codec import ValueCodec

__all__ = ["SharedTierInMemory", "memory_tier"]


class MemoryTier(RemoteTier):
    type = "memory"


def memory_tier(store: MemoryStore, limits: RemoteLimits | None = None, codec: ValueCodec = value_codec) -> MemoryTier:
    limits = limits or RemoteLimits()
    node = OneNode("store", lambda: store.client(limits.deadline_seconds))
    return MemoryTier("far", 1 << 30, topology=node, limits=limits, codec=codec)


class SharedTierInMemory(ExpiringValueContract):
    """Hooks of a store in memory. A subclass opens the tiers."""

    @pytest.fixture(autouse=True)
    def _store_before_its_start(self) -> None:
        self.memory = MemoryStore()
        self.memory.is_up = False

    def start_store(self, directory: Path) -> None:
        self.memory.values.clear()
        self.memory.is_up = True

    def kill_store(self) -> None:
        self.memory.is_up = False

    def write(self, name: bytes, value: bytes) -> None:
        self.memory.values[name] = value

    def read(self, name: bytes) -> bytes | None:
        return self.memory.values.get(name)

    def ttl_of(self, name: bytes) -> float:
        return self.memory.ttl_seconds[name]

    def freeze(self, *, frozen: bool) -> None:
        self.memory.answers.clear() if frozen else self.memory.answers.set()

    def make_full(self) -> None:
        self.memory.capacity_bytes = 0
