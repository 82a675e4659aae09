"""Contract of tiers that store packs in an object store, besides `contracts.shared_tier`."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
from contracts.shared_tier import ROW, SharedTierContract
from contracts.tier import CORRUPT, DONE, KIB, MISSING, SPACE, content, empty, fetch, full, held, key
from harness.polling import wait_until

from kvtier.tiers.remote import value_codec
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.pack_finder import REFRESH_SECONDS
from kvtier.tiers.remote.pack_format import PackedValue, PackName, decode_index, encode_index, folder_of
from kvtier.tiers.remote.value_codec import ValueCodec
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, SecondaryTier

__all__ = ["PackTierContract"]


def wait_until_found(tier: SecondaryTier, *keys: bytes) -> None:
    """Waits until a server finds the blocks of another. A slow store answers its list late."""
    wait_until(lambda: tier.lookup([(SPACE, name) for name in keys]) == [True] * len(keys), 30)


class PackTierContract(SharedTierContract):
    visible_after_seconds: ClassVar[float] = REFRESH_SECONDS
    smallest_value = 1
    codec: ClassVar[ValueCodec] = value_codec

    def folder_of(self, namespace: NamespaceId) -> str:
        return folder_of(namespace, self.codec.FORMAT)

    @abstractmethod
    def paths(self) -> list[str]:
        """Returns the paths of all objects, ascending."""

    @abstractmethod
    def get(self, path: str) -> bytes: ...

    @abstractmethod
    def put(self, path: str, content: bytes) -> None:
        """Writes an object, replacing an existing one."""

    @abstractmethod
    def delete(self, *paths: str) -> None: ...

    def packs_with(self, block: BlockBytes) -> list[tuple[str, int, int]]:
        """Returns path, offset and size of each stored value of a block, oldest first."""
        found = []
        for path in self.paths():
            name = PackName.parse(path)
            if name is not None and path.startswith(self.folder_of(block.namespace)):
                pack = self.get(path)
                places = self.places_in(block.namespace, name, pack)
                found += [(path, place.offset_bytes, place.nbytes) for place in places if place.key == block.key]
        return found

    def places_in(self, namespace: NamespaceId, name: PackName, pack: bytes) -> list[PackedValue]:
        entries = self.codec.open_index(namespace, name.path, pack[: name.index_bytes])
        assert entries is not None
        return decode_index(entries, name.index_bytes, len(pack))

    def value_of(self, block: BlockBytes) -> bytes | None:
        places = self.packs_with(block)
        path, offset, nbytes = places[-1]
        return self.get(path)[offset : offset + nbytes]

    def replace_value(self, block: BlockBytes, value: bytes) -> None:
        """Writes the pack with another value and a matching index."""
        path, offset, nbytes = self.packs_with(block)[-1]
        pack = self.get(path)
        name = PackName.parse(path)
        assert name is not None
        places = self.places_in(block.namespace, name, pack)
        sizes = [len(value) if place.key == block.key else place.nbytes for place in places]
        entries = encode_index([place.key for place in places], sizes)
        index = self.codec.seal_index(block.namespace, path, entries)
        self.put(path, index + pack[name.index_bytes : offset] + value + pack[offset + nbytes :])

    def test_names_have_format_tenant_namespace_and_hour(self, first: SecondaryTier) -> None:
        """So permissions and lifecycle rules can be given per tenant."""
        namespace = NamespaceId(bytes(range(32)))
        before = time.time()
        first.store([full(ROW[0], [b"x"], namespace)])
        (path,) = self.paths()
        assert path.startswith(
            f"kvtier/pack{self.codec.FORMAT}/000102030405060708090a0b0c0d0e0f/101112131415161718191a1b1c1d1e1f/20"
        )
        name = PackName.parse(path)
        assert name is not None
        assert before - 0.001 <= name.written_at <= time.time()

    def test_a_job_is_a_few_packs(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Small blocks of one namespace are in one object, and each server finds them by a list."""
        blocks = {name: content(name, (64 * KIB,)) for name in (key(number) for number in range(100))}
        assert first.store([full(name, parts) for name, parts in blocks.items()]) == [DONE] * 100
        assert len(self.paths()) == 1
        wait_until_found(second, *blocks)
        into = [empty(name, (64 * KIB,)) for name in list(blocks)[::3]]
        assert second.load(into) == [DONE] * len(into)
        assert all(held(block) == blocks[block.key] for block in into)

    def test_a_block_is_written_once(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Keys name the content, so a server that finds a block in a pack does not send it."""
        first.store([full(ROW[0], content(0, (5000,)))])
        wait_until_found(second, ROW[0])
        assert second.store([full(ROW[0], content(0, (5000,))), full(ROW[1], [b"x"])]) == [DONE, DONE]
        assert len(self.paths()) == 2
        assert len(self.packs_with(full(ROW[0], [b""]))) == 1

    def test_two_stores_of_a_block_at_the_same_time(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Each server may write a pack. Both are good, and the loss of one pack does no harm."""
        blocks = [full(name, content(name, (3000,))) for name in ROW]
        barrier = threading.Barrier(2)

        def store(tier: SecondaryTier) -> None:
            barrier.wait()
            assert tier.store(blocks) == [DONE] * len(ROW)

        threads = [threading.Thread(target=store, args=(tier,)) for tier in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= len(self.paths()) <= 2
        for tier in (first, second):
            assert fetch(tier, ROW[3], (3000,)) == content(ROW[3], (3000,))

    def test_a_damaged_block_leaves_the_others_of_its_pack(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """The pack stays. A new pack with the block is found by all servers."""
        sizes = (5000,)
        blocks = [full(name, content(name, sizes)) for name in ROW[:5]]
        first.store(blocks)
        (path,) = self.paths()
        value = bytearray(self.value_of(blocks[2]) or b"")
        value[2000] ^= 4
        self.replace_value(blocks[2], bytes(value))
        assert second.load([empty(name, sizes) for name in ROW[:5]]) == [DONE, DONE, CORRUPT, DONE, DONE]
        assert second.lookup([(SPACE, name) for name in ROW[:5]]) == [True, True, False, True, True]
        assert second.load([empty(ROW[2], sizes)]) == [MISSING]
        assert second.store(blocks) == [DONE] * 5
        assert len(self.paths()) == 2
        assert path in self.paths()
        assert fetch(second, ROW[2], sizes) == content(ROW[2], sizes)
        assert first.load([empty(ROW[2], sizes)]) == [CORRUPT], "the first server still knows the old pack"
        time.sleep(REFRESH_SECONDS)
        assert fetch(first, ROW[2], sizes) == content(ROW[2], sizes)

    @pytest.mark.parametrize("left", [0.0, 0.3, 0.99])
    def test_a_truncated_pack_is_never_loaded(self, first: SecondaryTier, second: SecondaryTier, left: float) -> None:
        """The blocks before its end are good."""
        blocks = [full(name, content(name, (40_000,))) for name in ROW[:3]]
        first.store(blocks)
        (path,) = self.paths()
        pack = self.get(path)
        places = [self.packs_with(block)[0] for block in blocks]
        end = places[1][1] + int(places[1][2] * left)
        assert second.lookup([(SPACE, ROW[0])]) == [True]
        self.put(path, pack[:end])
        assert second.load([empty(name, (40_000,)) for name in ROW[:3]]) == [DONE, CORRUPT, CORRUPT]
        assert second.load([empty(ROW[2], (40_000,))]) == [MISSING]

    @pytest.mark.parametrize("damage", ["byte", "short", "empty", "other namespace"])
    def test_a_damaged_index_hides_its_pack(self, first: SecondaryTier, second: SecondaryTier, damage: str) -> None:
        """Blocks of other packs are unaffected, and the hidden ones can be stored again."""
        first.store([full(ROW[0], [b"good"])])
        first.store([full(ROW[1], [b"lost"])])
        path, *_ = self.packs_with(full(ROW[1], [b""]))[0]
        pack = bytearray(self.get(path))
        match damage:
            case "byte":
                pack[20] ^= 1
            case "short":
                del pack[30:]
            case "empty":
                pack.clear()
            case "other namespace":
                first.store([full(ROW[1], [b"lost"], NamespaceId(bytes(32)))])
                pack = bytearray(self.get(self.packs_with(full(ROW[1], [b""], NamespaceId(bytes(32))))[0][0]))
        self.put(path, bytes(pack))
        assert second.lookup([(SPACE, ROW[0]), (SPACE, ROW[1])]) == [True, False]
        assert second.store([full(ROW[1], [b"lost"])]) == [DONE]
        assert fetch(second, ROW[1], (4,)) == (b"lost",)

    def test_a_deleted_pack_is_forgotten(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """A lifecycle rule or `kvtier remote gc` deletes packs at any time."""
        first.store([full(name, content(name, (300,))) for name in ROW])
        wait_until_found(second, *ROW)
        self.delete(*self.paths())
        for tier in (first, second):
            assert tier.load([empty(ROW[0], (300,))]) == [MISSING]
            assert tier.lookup([(SPACE, name) for name in ROW]) == [False] * len(ROW)
            assert tier.last_error is None
        assert second.store([full(ROW[0], content(ROW[0], (300,)))]) == [DONE]
        assert fetch(second, ROW[0], (300,)) == content(ROW[0], (300,))

    def test_foreign_objects_are_ignored(self, first: SecondaryTier, second: SecondaryTier) -> None:
        first.store([full(ROW[0], [b"x"])])
        self.put(f"{self.folder_of(SPACE)}2026-11-25T03/readme.txt", b"hello")
        self.put(f"{self.folder_of(SPACE)}zzz", b"hello")
        self.put(f"{self.folder_of(SPACE)}9999-99-99T99/9999999-0123456789abcdef-40", b"hello")
        assert second.lookup([(SPACE, ROW[0]), (SPACE, ROW[1])]) == [True, False]

    def test_expired_packs_are_not_used(self, store: None, open_tier: Callable[[RemoteLimits], SecondaryTier]) -> None:
        """By the age in their name. A store writes a block again if its pack is not young."""
        long, short = (open_tier(replace(self.limits, ttl_seconds=seconds)) for seconds in (1000, 0.5))
        long.store([full(ROW[0], [b"x"])])
        time.sleep(0.6)
        assert short.lookup([(SPACE, ROW[0])]) == [False]
        assert short.load([empty(ROW[0], (1,))]) == [MISSING]
        assert long.lookup([(SPACE, ROW[0])]) == [True]
        assert short.store([full(ROW[0], [b"x"])]) == [DONE]
        assert len(self.paths()) == 2
