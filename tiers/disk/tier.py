"""Disk tier: blocks in preallocated slab files with direct I/O, and an index in LMDB."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import lmdb

from ..lmdb.environment import Durability
from ..lmdb.format import DamagedRecordError, entries_of, is_name, is_storable, names_of
from ..negotiation import vote
from ..secondary_tier import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from ..storage.batching import BATCH_BLOCKS, batches
from ..storage.checksum import checksum_of
from ..storage.disk_space import FULL
from ..storage.fsck import Finding, Slice
from ..storage.health import TierHealth
from ..types import NAMESPACE_BYTES
from .check import check_slice
from .format import parse_record
from .slabs import Place
from .store import DiskStore

__all__ = ["DiskTier"]

_log = logging.getLogger(__name__)

CAPACITY_SHARE = 0.95
"""Fraction of the slabs that blocks may use. The rest is for partly used pages and quarantine."""
BATCH_BYTES = 32 << 20


class DiskTier(SecondaryTier):
    """Disk tier. Reports errors of its `DiskStore` as outcomes and in `last_error`."""

    type: ClassVar[str] = "disk"
    durable: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        directory: Path,
        size_bytes: int,
        durability: Durability,
        *,
        repair: bool = True,
        slab_bytes: int | None = None,
    ) -> None:
        """Opens or creates the store in `directory`; its files never grow beyond `size_bytes`.

        If the size was reduced, blocks beyond the new size are dropped. With `repair`, a damaged
        index is moved aside and reported in `last_error`. `slab_bytes` is the size of one slab file
        of a new store. Raises `TierOpenError`, without `repair` also for a damaged index.
        """
        self._store = DiskStore(directory, size_bytes, durability, repair=repair, slab_bytes=slab_bytes)
        self._directory = directory
        super().__init__(name, int(self._store.payload_bytes * CAPACITY_SHARE))
        self._health = TierHealth(self)
        self._health.report("open", self._store.index.warning)

    def limitation(self) -> str | None:
        if self._store.slabs.are_direct:
            return None
        return f"the file system of {self._directory} does not support direct I/O, so blocks also use the page cache"

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        """Yields the blocks in store order. Removes unusable records."""
        with self._store.writing:
            found = self._store.recover()
        if found is None:
            return
        for what, names in (
            ("index records are damaged and are dropped", found.damaged),
            ("blocks are dropped, because the configured size was reduced", found.outside),
        ):
            if names:
                _log.warning("tier %s: %d %s", self.name, len(names), what)
        self._health.report("lost", found.missing)
        if found.lost:
            self._health.report("files", f"slab files were missing or too short: {len(found.lost)} blocks are lost")
        yield from entries_of(found.blocks)

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes blocks in batches of up to 32 MiB. A batch becomes visible as a whole."""
        outcomes: list[Outcome] = []
        for batch in batches(blocks, BATCH_BYTES):
            storable = list(map(is_storable, batch))
            fit = [block for block, good in zip(batch, storable, strict=True) if good]
            written = iter(self._put(fit) if fit else [])
            outcomes += [next(written) if good else Outcome.FAILED for good in storable]
            if not all(storable):
                self._health.report("store", "was given a block without bytes, or with a key that is too long")
        return outcomes

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Reads blocks into their slots and verifies them. Drops corrupt blocks."""
        outcomes = [Outcome.MISSING] * len(blocks)
        names = names_of(blocks)
        try:
            found = self._store.index.get(list(names.values()))
        except lmdb.Error as error:
            self._health.report("load", f"cannot load: {error}")
            return [Outcome.FAILED] * len(blocks)
        wanted: list[tuple[int, bytes, bytes, int]] = []
        places: list[Place] = []
        for (number, name), packed in zip(names.items(), found, strict=True):
            if packed is None:
                continue
            block = blocks[number]
            try:
                _, checksum, sizes, runs = parse_record(name, packed)
            except DamagedRecordError:
                sizes = None
            if sizes == block.sizes:
                wanted.append((number, name, packed, checksum))
                places.append((runs, block.parts))
            else:
                outcomes[number] = self._drop(name, packed, quarantine=False)
        unreadable = self._store.slabs.read(places)
        for at, (number, name, packed, checksum) in enumerate(wanted):
            if at in unreadable:
                outcomes[number] = Outcome.FAILED
                self._health.report("load", f"cannot load: {unreadable[at]}")
            elif checksum_of(name, blocks[number].parts) == checksum:
                outcomes[number] = Outcome.DONE
            else:
                outcomes[number] = self._drop(name, packed, quarantine=True)
        if Outcome.FAILED not in outcomes:
            self._health.report("load", None)
        return outcomes

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        names = [namespace + key for namespace, key in keys if is_name(namespace, key)]
        for start in range(0, len(names), BATCH_BLOCKS):
            self._remove(names[start : start + BATCH_BLOCKS])

    def blocks_to_check(self) -> int:
        return len(self._store.index)

    def free_disk_bytes(self) -> int:
        return shutil.disk_usage(self._directory).free

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        return check_slice(self._store, after, repair=repair)

    def check_count(self, *, repair: bool) -> Finding | None:
        return self._store.index.check_count(self._store.writing, repair=repair)

    def close(self) -> None:
        self._store.close()

    def _put(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        try:
            with self._store.writing:
                stored = self._store.put(blocks)
        except (OSError, lmdb.Error) as error:
            self._health.report("store", f"cannot store: {self._store.describe(error)}")
            return [Outcome.NO_SPACE if _is_full(error) else Outcome.FAILED] * len(blocks)
        # The disk can be full although the store succeeded, in space that a removal had freed.
        reason = self._store.refusal
        if not all(stored):
            reason = reason or f"all of its {self._store.payload_bytes} bytes are in use"
        self._health.report("store", reason and f"cannot store: {reason}")
        return [Outcome.DONE if done else Outcome.NO_SPACE for done in stored]

    def _drop(self, name: bytes, packed: bytes, *, quarantine: bool) -> Outcome:
        _log.warning("tier %s: block %s is corrupt and is dropped", self.name, name[NAMESPACE_BYTES:].hex())
        try:
            with self._store.writing:
                self._store.drop(name, packed, quarantine=quarantine)
        except (OSError, lmdb.Error) as error:
            self._health.report("remove", f"cannot remove: {error}")
            return Outcome.FAILED
        return Outcome.CORRUPT

    def _remove(self, names: Sequence[bytes]) -> None:
        """Removes blocks in one transaction, or in halves if the index is nearly full."""
        try:
            with self._store.writing:
                self._store.remove(names)
        except (OSError, lmdb.Error) as error:
            middle = len(names) // 2
            if _is_full(error) and middle:
                self._remove(names[:middle])
                self._remove(names[middle:])
                return
            self._health.report("remove", f"cannot remove: {self._store.describe(error)}")
            return
        self._health.report("remove", None)


def _is_full(error: Exception) -> bool:
    """Returns whether the storage is full. LMDB reports a short write as an I/O error."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or getattr(error, "code", 0) in FULL
