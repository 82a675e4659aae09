"""Tier in an object store that several servers share: blocks are stored in packs.

Objects of 64 KiB are too slow, so the blocks of a job become a few objects of many megabytes. A
server finds the packs of others by lists (`pack_finder`), and reads blocks by ranges of bytes. It
never deletes a pack: the store does that by age, or `kvtier remote gc`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ...protos.buffers import address_of, copy_from
from ..secondary_tier import BlockBytes, NamespaceId, Outcome, TierError
from ..storage.batching import batches
from . import value_codec
from .bucket import Bucket, ObjectMissingError, StoreFullError
from .network_tier import NetworkTier, RemoteLimits
from .object_store import StoreRefusedError, StoreUnavailableError
from .pack_directory import KnownPack, PackDirectory
from .pack_finder import PackFinder
from .pack_format import PackedValue, PackName, decode_index, encode_index, folder_of, format_folder
from .value_codec import ValueCodec, is_name

__all__ = ["PackTier"]

READ_BYTES = 8 << 20
"""Limit of the bytes of one ranged read, unless one block is larger. Reads run in parallel."""
GAP_BYTES = 256 << 10
"""Blocks with a smaller gap are read together: 256 KiB take 3 ms at 100 MB/s, a request 20 ms."""
THREADS = 8
"""Number of transfers at the same time, and of reads of indexes."""
MAX_TRIED = 3
"""Limit of the copies of a block that one load tries."""
REWRITE_AFTER = 0.5
"""A repeated store writes a block again after this part of its time to live."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Wanted:
    """A block of a load, and its place in the store."""

    position: int
    block: BlockBytes
    pack: KnownPack
    place: PackedValue


class PackTier(NetworkTier):
    """Tier with packs in a bucket."""

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        *,
        node: str,
        bucket: Bucket,
        limits: RemoteLimits,
        pack_bytes: int = 16 << 20,
        directory_bytes: int = 64 << 20,
        codec: ValueCodec = value_codec,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` is the address of the store, for messages.

        `pack_bytes` limits the blocks of one pack; a larger block has a pack of its own.
        `directory_bytes` limits the memory of the directory.
        """
        super().__init__(name, capacity_bytes, limits=limits, codec=codec)
        self._node = node
        self._bucket = bucket
        self._pack_bytes = self.gather_bytes = pack_bytes
        self._clock = clock
        self._directory = PackDirectory(directory_bytes)
        self._transfers = ThreadPoolExecutor(THREADS, f"kvtier-{name}-transfer")
        # Lookups do not wait for loads.
        self._indexes = ThreadPoolExecutor(THREADS, f"kvtier-{name}-index")
        self._finder = PackFinder(
            bucket,
            self._directory,
            self._indexes,
            self._call,
            codec=codec,
            ttl_seconds=limits.ttl_seconds,
            clock=clock,
        )
        self._buffers = _Buffers()

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Answers from the directory, after a list of new packs if it lacks a block.

        If the store does not answer, it has none of the blocks. If it refuses the list, it has
        those in the directory.
        """
        valid = [name for name in keys if is_name(*name) and self._codec.can_store(name[0])]
        found: set[tuple[NamespaceId, bytes]] = set()
        with self._reporting("lookup") as refusals:
            if self._breaker_of(self._node).is_open:
                self._ping()
            for namespace, wanted in _by_namespace(valid).items():
                with refusals.kept():  # the blocks of other namespaces may be known
                    self._update(namespace, wanted, refusals.texts)
                    found |= {(namespace, key) for key in wanted if self._find(namespace, key) is not None}
        return [name in found for name in keys]

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes the blocks that the store lacks, in packs."""
        outcomes: dict[tuple[NamespaceId, bytes], Outcome] = {}
        storable: defaultdict[NamespaceId, dict[bytes, BlockBytes]] = defaultdict(dict)
        for block in blocks:
            if self._can_move(block):
                storable[block.namespace][block.key] = block
        with self._reporting("store") as refusals:
            packs: list[tuple[NamespaceId, list[BlockBytes]]] = []
            for namespace, some in storable.items():
                with refusals.kept():  # the packs of other namespaces may be readable
                    self._update(namespace, list(some), refusals.texts)
                    fresh = {key for key, block in some.items() if self._is_fresh(block)}
                    outcomes |= dict.fromkeys(((namespace, key) for key in fresh), Outcome.DONE)
                    missing = [block for key, block in some.items() if key not in fresh]
                    packs += [(namespace, batch) for batch in batches(missing, self._pack_bytes)]
            results, errors = self._in_parallel(lambda pack: self._write_pack(*pack), packs)
            for (namespace, batch), result in zip(packs, results, strict=True):
                outcomes |= dict.fromkeys(((namespace, block.key) for block in batch), result or Outcome.FAILED)
            self._raise_first(errors)
        return [outcomes.get((block.namespace, block.key), Outcome.FAILED) for block in blocks]

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Reads and verifies blocks. After a bad copy of a block it tries the next copy."""
        valid = {n: block for n, block in enumerate(blocks) if self._can_move(block)}
        outcomes = [Outcome.FAILED if n in valid else Outcome.MISSING for n in range(len(blocks))]
        with self._reporting("load") as refusals:
            for namespace, keys in _by_namespace([(block.namespace, block.key) for block in valid.values()]).items():
                with refusals.kept():
                    self._update(namespace, keys, refusals.texts)
                    for position, block in valid.items():
                        if block.namespace == namespace:
                            outcomes[position] = Outcome.MISSING
            left = {n: block for n, block in valid.items() if outcomes[n] is Outcome.MISSING}
            tried: dict[int, list[KnownPack]] = {position: [] for position in left}
            errors: list[TierError] = []
            for _ in range(MAX_TRIED):
                errors += self._load_copies(left, tried, outcomes)
                left = {n: block for n, block in left.items() if tried[n] and outcomes[n] is not Outcome.DONE}
                if not left:
                    break
            self._raise_first(errors)
        return outcomes

    def _load_copies(
        self, blocks: dict[int, BlockBytes], tried: dict[int, list[KnownPack]], outcomes: list[Outcome]
    ) -> list[TierError]:
        """Loads each block from its best copy that was not tried. Returns the errors of packs.

        A block keeps its outcome if it has no further copy, or if that is missing in the store.
        """
        by_pack: defaultdict[KnownPack, list[_Wanted]] = defaultdict(list)
        for position, block in blocks.items():
            pack = self._directory.find_other(block.namespace, block.key, tried[position])
            if pack is None or self._is_expired(pack):
                continue
            tried[position].append(pack)
            place = pack.place(block.key)
            if place.nbytes == self._codec.value_bytes(block):
                by_pack[pack].append(_Wanted(position, block, pack, place))
            else:  # its size must not decide what is read
                outcomes[position] = self._forget_corrupt(pack, block)
        runs = [run for wanted in by_pack.values() for run in _runs(wanted)]
        results, errors = self._in_parallel(self._read_run, runs)
        for run, result in zip(runs, results, strict=True):
            for wanted, outcome in zip(run, result or [Outcome.FAILED] * len(run), strict=True):
                if outcome is not Outcome.MISSING:
                    outcomes[wanted.position] = outcome
                if result is None:
                    self._directory.forget_copy(wanted.pack, wanted.block.key)
        return errors

    def free_disk_bytes(self) -> None:
        """Returns None. Checks the store, so that the status is right without any traffic."""
        with self._reporting("ping"):
            self._ping()

    def close(self) -> None:
        for executor in (self._transfers, self._indexes):
            executor.shutdown()

    def _call(self, call: Callable[[], T]) -> T:
        return self._guarded(self._node, call)

    def _ping(self) -> None:
        # No name sorts after it, so the answer is empty.
        folder = format_folder(self._codec.FORMAT)
        self._call(lambda: self._bucket.listed(folder, f"{folder}~", 1))

    def _update(self, namespace: NamespaceId, keys: Sequence[bytes], refusals: list[str]) -> None:
        """Looks for new packs. If the store refuses that, the directory is still valid."""
        try:
            self._finder.update(namespace, keys)
        except StoreRefusedError as error:
            refusals.append(f"{error}")

    def _find(self, namespace: NamespaceId, key: bytes) -> KnownPack | None:
        """Returns the pack that has a block and has not expired."""
        pack = self._directory.find(namespace, key)
        return None if pack is None or self._is_expired(pack) else pack

    def _is_expired(self, pack: KnownPack) -> bool:
        return self._clock() - pack.name.written_at >= self._limits.ttl_seconds

    def _is_fresh(self, block: BlockBytes) -> bool:
        pack = self._directory.find(block.namespace, block.key)
        return pack is not None and self._clock() - pack.name.written_at < REWRITE_AFTER * self._limits.ttl_seconds

    def _in_parallel(self, work: Callable[[T], R], items: Sequence[T]) -> tuple[list[R | None], list[TierError]]:
        """Returns the results, None where a call failed, and the errors. Waits for all calls.

        A call that is still running must not use the memory of blocks after the job.
        """
        jobs: list[Future[R]] = []
        try:
            jobs += (self._transfers.submit(work, item) for item in items)
        finally:
            wait(jobs)
        results: list[R | None] = []
        errors: list[TierError] = []
        for job in jobs:
            try:
                results.append(job.result())
            except TierError as error:
                results.append(None)
                errors.append(error)
        return results, errors

    def _raise_first(self, errors: Sequence[TierError]) -> None:
        """Raises the first error. The status shows it even if another call succeeded after it."""
        if not errors:
            return
        if isinstance(errors[0], StoreUnavailableError):
            self._health.report(f"node {self._node}", f"{errors[0]}")
        raise errors[0]

    def _write_pack(self, namespace: NamespaceId, blocks: Sequence[BlockBytes]) -> Outcome:
        keys, sizes = [block.key for block in blocks], [self._codec.value_bytes(block) for block in blocks]
        entries = encode_index(keys, sizes)
        index_bytes = len(entries) + self._codec.INDEX_SEAL_BYTES
        name = PackName.new(folder_of(namespace, self._codec.FORMAT), self._clock(), index_bytes)
        index = self._codec.seal_index(namespace, name.path, entries)
        total = len(index) + sum(sizes)
        with self._budget.reserve(total), self._buffers.lend(total) as buffer:
            buffer[: len(index)] = index
            at = len(index)
            for block, size in zip(blocks, sizes, strict=True):
                _join(self._codec.encode(block), buffer[at : at + size])
                at += size
            try:
                self._call(lambda: self._bucket.write(name.path, buffer))
            except StoreFullError as error:
                self._health.report("space", f"{self._node}: {error}")
                return Outcome.NO_SPACE
        self._health.report("space", None)
        self._finder.stored(KnownPack(namespace, name, decode_index(entries, index_bytes, total)))
        return Outcome.DONE

    def _read_run(self, run: Sequence[_Wanted]) -> list[Outcome]:
        """Reads neighbours in a pack with one call, and fills their parts."""
        pack = run[0].pack
        start, end = run[0].place.offset_bytes, run[-1].place.offset_bytes + run[-1].place.nbytes
        with self._budget.reserve(end - start):
            try:
                content = self._call(lambda: self._bucket.read(pack.name.path, start, end))
            except ObjectMissingError:
                self._directory.drop(pack)
                return [Outcome.MISSING] * len(run)
            outcomes = []
            for wanted in run:
                at = wanted.place.offset_bytes - start
                outcomes.append(self._decode(wanted, content[at : at + wanted.place.nbytes]))
            return outcomes

    def _decode(self, wanted: _Wanted, value: memoryview) -> Outcome:
        """Fills a block. Stops using a value that is not DONE."""
        block = wanted.block
        pieces = self._codec.pieces_of(block)
        _divide(value, pieces)
        outcome = self._codec.decode(pieces, value.nbytes, block)
        if outcome is Outcome.CORRUPT:
            return self._forget_corrupt(wanted.pack, block)
        if outcome is not Outcome.DONE:
            self._directory.forget(wanted.pack, block.key)
        return outcome

    def _forget_corrupt(self, pack: KnownPack, block: BlockBytes) -> Outcome:
        """Stops using a value. The pack stays, because its other values can be good."""
        self._finder.warn("tier %s: block %s in %s is corrupt", self.name, block.key.hex(), pack.name.path)
        self._directory.forget(pack, block.key)
        return Outcome.CORRUPT


class _Buffers:
    """Buffers for packs, used again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[bytearray] = []

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """Yields a buffer. After an error it is not used again: the library may still send it."""
        with self._lock:
            buffer = self._free.pop() if self._free else bytearray()
        if len(buffer) < nbytes:
            buffer = bytearray(nbytes)
        yield memoryview(buffer)[:nbytes]
        with self._lock:
            self._free.append(buffer)


def _join(pieces: Sequence[bytes | memoryview], buffer: memoryview) -> None:
    """Copies pieces into a buffer, without the GIL."""
    at = 0
    for piece in pieces:
        if piece:
            copy_from(address_of(buffer[at:], writable=True), memoryview(piece))
            at += len(piece)


def _divide(value: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copies a value into pieces, without the GIL. A short value leaves the last ones."""
    for piece in pieces:
        some, value = value[: piece.nbytes], value[piece.nbytes :]
        if some.nbytes:
            copy_from(address_of(piece, writable=True), some)


def _by_namespace(names: Sequence[tuple[NamespaceId, bytes]]) -> dict[NamespaceId, list[bytes]]:
    keys: defaultdict[NamespaceId, list[bytes]] = defaultdict(list)
    for namespace, key in names:
        keys[namespace].append(key)
    return keys


def _runs(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Divides blocks of one pack into runs that are read with one call each."""
    wanted.sort(key=lambda each: each.place.offset_bytes)
    run: list[_Wanted] = []
    for each in wanted:
        if run:
            end = run[-1].place.offset_bytes + run[-1].place.nbytes
            total = each.place.offset_bytes + each.place.nbytes - run[0].place.offset_bytes
            if each.place.offset_bytes - end > GAP_BYTES or total > READ_BYTES:
                yield run
                run = []
        run.append(each)
    if run:
        yield run
