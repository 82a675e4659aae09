"""Warm restart: the memory of the CPU tier outlives the server.

A descriptor store keeps what the next server needs (`process/descriptor_store.py`):

- `region-*` and `records`: the memory of each pool, and the records of all slots
  (`tiers/core/slot_records.py`).
- `alive-*`: one end of a pipe. The server and each child process that maps the region have the
  other end. End of file means that all of them have ended, so none of them writes to the region.
- `writer-*`: the connections of clients that map the region. The end of a connection means that
  the client does not write to the region any more.

If anything is missing, damaged or of other settings, the server starts with new, empty memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import mmap
import os
import re
import secrets
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ..cuda.host.region import HostRegion, Pool, RegionError
from ..cuda.host.shared_memory import sealed_memory
from ..tiers.core.manager import TierManager
from ..tiers.core.slot_allocator import extent_bytes_for
from ..tiers.core.slot_records import RecordsError, SlotRecords, session_tag
from .memory_pools import MemoryLayout
from .process.descriptor_store import DescriptorStore, DescriptorStoreError, open_descriptor_store
from .telemetry.downgrades import Downgrades
from .telemetry.logs import get_logger

__all__ = ["WarmMemory", "open_memory"]

_log = get_logger(__name__)

_END_SECONDS = 5.0
"""Time that the processes of the earlier server have to end."""
_REGION, _RECORDS, _ALIVE = "region", "records", "alive"
_WRITER = re.compile(r"writer-([0-9a-f]{16})-\d+")
_REMEDY = "docs/warm-restart.md"


class _Cold(Exception):
    """The memory of an earlier server cannot be used; the message says why."""


class WarmMemory:
    """The region of a server, and what the next server needs to use it.

    Attributes:
        region: the region.
        records: records of its slots; None if the region ends with the server.
        is_warm: whether they are those of an earlier server.
    """

    def __init__(
        self,
        region: HostRegion,
        downgrades: Downgrades,
        store: DescriptorStore | None = None,
        records: SlotRecords | None = None,
        writers: Mapping[int, dict[str, socket.socket]] | None = None,
        opened: contextlib.ExitStack | None = None,
    ) -> None:
        """Takes ownership of all arguments but `downgrades`.

        `writers`: kept connections of an earlier server, by the tag of their session and by name.
        `opened` closes the records, and may close the region.
        """
        self.region = region
        self.records = records
        self.is_warm = writers is not None
        self._store = store
        self._downgrades = downgrades
        self._writers = dict(writers or {})
        self._unwatch: Callable[[socket.socket], object] = lambda _: None
        self._opened = opened or contextlib.ExitStack()
        self._opened.callback(region.close)

    def recover(self, core: TierManager) -> None:
        """Adds the blocks of the earlier server to the core. Watches the clients of that server."""
        if not self.is_warm:
            return
        assert self.records is not None
        began = time.monotonic()
        self.records.count_recovery()
        gc.disable()  # all of the many new objects stay
        try:
            found = core.recover(self._writers)
        finally:
            gc.enable()
        loop = asyncio.get_running_loop()
        self._unwatch = loop.remove_reader
        for tag, connections in self._writers.items():
            for name, connection in connections.items():
                connection.setblocking(False)
                loop.add_reader(connection, self._read, tag, name, core.former_writer_gone)
        _log.info(
            "warm start: the blocks of the earlier server are in the CPU tier",
            blocks=len(found.blocks),
            lost=found.lost,
            clients=len(self._writers),
            unusable_bytes=found.unusable_bytes,
            seconds=round(time.monotonic() - began, 3),
        )

    def server_is_ready(self) -> None:
        """Called when the server has started with the recovered blocks."""
        if self.is_warm and self.records is not None:
            self.records.count_recovery(has_ended=True)

    def _read(self, tag: int, name: str, gone: Callable[[int], object]) -> None:
        connection = self._writers[tag][name]
        with contextlib.suppress(ConnectionError):
            try:
                if connection.recv(64):
                    return
            except BlockingIOError:
                return
        self._unwatch(connection)
        connection.close()
        del self._writers[tag][name]
        self._forget(name)
        if not self._writers[tag]:
            del self._writers[tag]
            gone(tag)

    @contextlib.contextmanager
    def keeping(self, session_id: bytes, number: int, connection: socket.socket) -> Iterator[None]:
        """Context in which a client of a session maps the region.

        If the context is cancelled, the server ends, and the client may still write.
        """
        if self._store is None or self.records is None:
            yield
            return
        name = f"writer-{session_tag(session_id):016x}-{number}"
        is_kept = self._keep(self._store, name, connection)
        if not is_kept:
            self.records.count_unkept(1)
        ended = True
        try:
            yield
        except asyncio.CancelledError:
            ended = False
            raise
        finally:
            if ended and is_kept:
                self._forget(name)
            elif ended:
                self.records.count_unkept(-1)

    def close(self) -> None:
        """Closes everything. The store keeps the region and the records.

        Called when no thread or child process of the server accesses the region any more.
        """
        for connections in self._writers.values():
            for connection in connections.values():
                self._unwatch(connection)
                connection.close()
        self._writers.clear()
        self._opened.close()
        while self.region.inherited:
            os.close(self.region.inherited.pop())
        if self._store is not None:
            self._store.close()

    def _keep(self, store: DescriptorStore, name: str, connection: socket.socket) -> bool:
        try:
            store.keep(name, connection.fileno(), until_hangup=True)
        except OSError as error:
            _report(self._downgrades, f"the connection of a client cannot be kept: {error}")
            return False
        return True

    def _forget(self, name: str) -> None:
        try:
            assert self._store is not None
            self._store.forget(name)
        except OSError as error:
            _report(self._downgrades, f"the keeper does not answer: {error}")


def open_memory(keeper: Path | None, layout: MemoryLayout, downgrades: Downgrades, *, is_shared: bool) -> WarmMemory:
    """Returns the memory that an earlier server has left in the store, else new memory.

    `is_shared`: whether a tier has given the region to a process of its own, whose end the next
    server could not notice. Then the memory ends with the server. May take `_END_SECONDS`. Raises
    `RegionError`.
    """
    store = None
    try:
        store = open_descriptor_store(keeper)
    except DescriptorStoreError as error:
        _report(downgrades, str(error))
    if store is not None and is_shared:
        _report(downgrades, "a tier shares the memory with a process of its own")
    elif store is not None:
        try:
            return _open_kept(store, layout, downgrades)
        except (DescriptorStoreError, RecordsError, OSError) as error:
            _report(downgrades, str(error))
    if store is not None:
        store.close()
    return WarmMemory(layout.create_region(), downgrades)


def _open_kept(store: DescriptorStore, layout: MemoryLayout, downgrades: Downgrades) -> WarmMemory:
    """Returns the memory in the store, or new memory that the store keeps from now on.

    Raises DescriptorStoreError and `OSError` if the store fails.
    """
    kept: dict[str, list[int]] = defaultdict(list)
    with contextlib.ExitStack() as taken:
        for name, descriptor in store.take():
            kept[name].append(descriptor)
            taken.callback(os.close, descriptor)
        try:
            memory = _adopt(kept, layout, store, downgrades)
        except _Cold as error:
            if kept:
                _log.warning("cold start: the memory of the earlier server is not used", reason=str(error))
            for name in kept:
                store.forget(name)
            memory = _create(layout, store, downgrades)
    return memory


def _adopt(
    kept: Mapping[str, Sequence[int]], layout: MemoryLayout, store: DescriptorStore, downgrades: Downgrades
) -> WarmMemory:
    """Raises _Cold if the kept memory cannot be used."""
    ended = [name for name in kept if name.startswith(f"{_ALIVE}-")]
    names = [name for name in kept if name.startswith(f"{_REGION}-")]
    if not ended or not names or any(len(kept.get(name, ())) != 1 for name in (*names, _RECORDS)):
        raise _Cold("it is not complete, or that of another version")
    if set(names) != set(_pool_names(layout)):
        raise _Cold("other tenants had memory of their own, or other amounts")
    deadline = time.monotonic() + _END_SECONDS
    for name in ended:
        poll = select.poll()
        poll.register(kept[name][0], 0)  # POLLHUP is always reported
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _Cold(f"processes of the earlier server have not ended within {_END_SECONDS:g} s")
    with contextlib.ExitStack() as opened:
        try:
            edges = pairwise((*layout.pool_starts, layout.region_bytes))
            pools = [Pool(*edge, kept[name][0]) for edge, name in zip(edges, _pool_names(layout), strict=True)]
            region = HostRegion.attach(pools, layout.region_bytes)
            opened.callback(region.close)
            records = _records(kept[_RECORDS][0], layout, opened)
            records.check()
        except (RegionError, RecordsError) as error:
            raise _Cold(str(error)) from None
        _stay_alive(region, store)
        for name in ended:
            store.forget(name)
        writers: dict[int, dict[str, socket.socket]] = defaultdict(dict)
        for name, descriptors in kept.items():
            if match := _WRITER.fullmatch(name):
                writers[int(match[1], 16)][name] = socket.socket(fileno=os.dup(descriptors[0]))
        return WarmMemory(region, downgrades, store, records, writers, opened.pop_all())


def _create(layout: MemoryLayout, store: DescriptorStore, downgrades: Downgrades) -> WarmMemory:
    with contextlib.ExitStack() as opened:
        region = layout.create_region()
        opened.callback(region.close)
        size_bytes = SlotRecords.size_bytes(layout.region_bytes, extent_bytes_for(layout.region_bytes))
        with _closing(sealed_memory(size_bytes, "kvtier-records")) as descriptor:
            records = _records(descriptor, layout, opened)
            records.format()
            for name, pool in zip(_pool_names(layout), region.pools, strict=True):
                store.keep(name, pool.fd)
            store.keep(_RECORDS, descriptor)
        _stay_alive(region, store)
        return WarmMemory(region, downgrades, store, records, opened=opened.pop_all())


def _pool_names(layout: MemoryLayout) -> list[str]:
    return [f"{_REGION}-{number}" for number in range(len(layout.pool_starts))]


def _records(descriptor: int, layout: MemoryLayout, opened: contextlib.ExitStack) -> SlotRecords:
    """Maps records. Raises RecordsError if they do not have the size for this region."""
    region_bytes, extent_bytes = layout.region_bytes, extent_bytes_for(layout.region_bytes)
    size_bytes = SlotRecords.size_bytes(region_bytes, extent_bytes)
    if os.fstat(descriptor).st_size != size_bytes:
        raise RecordsError("its records are those of another region_size or version")
    own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
    opened.callback(os.close, own)

    def back(start: int, nbytes: int) -> bool:
        try:
            os.posix_fallocate(own, start, nbytes)
        except OSError:
            return False
        return True

    memory = memoryview(mmap.mmap(own, size_bytes))
    return SlotRecords(memory, region_bytes, extent_bytes, back, layout.pool_owners)


def _stay_alive(region: HostRegion, store: DescriptorStore) -> None:
    """Gives the store one end of a pipe, and this process and its children the other one."""
    ours, theirs = os.pipe()
    with _closing(ours):
        store.keep(f"{_ALIVE}-{secrets.token_hex(8)}", ours)
    region.inherited.append(theirs)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _report(downgrades: Downgrades, cause: str) -> None:
    downgrades.report("warm_restart", f"a restart will lose the CPU tier: {cause}", _REMEDY)
