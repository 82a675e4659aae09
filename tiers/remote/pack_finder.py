"""Discovery of packs that other servers have stored, by incremental lists of the bucket.

The list of a namespace's folder is read at most every `REFRESH_SECONDS`, and only if a lookup asks
for a block that is not in the directory. It begins shortly before the last list. Older packs, for
example after the start of a server, are read hour by hour, newest first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from ..base import NamespaceId, TierError
from .bucket import Bucket, ObjectMissingError
from .object_store import StoreUnavailableError
from .pack_directory import KnownPack, PackDirectory
from .pack_format import PackName, decode_index, folder_of, hour_of, mark_of, start_of

__all__ = ["PackFinder"]

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
OVERLAP_SECONDS = 15.0
"""Each list begins this time before the last one: clocks differ, and a store takes a while."""
WIDE_SECONDS = 900.0
"""Once per `WIDE_EVERY_SECONDS` a list begins this time before. S3 refuses requests if the clock
of a server differs more."""
WIDE_EVERY_SECONDS = 60.0
INDEXES_AT_ONCE = 64
"""Number of indexes that are read before the directory is asked again."""
OLDER_SECONDS = 0.25
"""A lookup reads older packs for about this time. The next lookup continues."""
MAX_LISTED = 20_000
"""Limit of the names of one list: 20 answers of S3. The next lookup continues the list."""
MAX_NAMESPACES = 256
"""The finder forgets its progress in the least recently used namespace beyond this number."""
HOUR_SECONDS = 3600.0


@dataclass(slots=True)
class _Progress:
    """What has been listed of one namespace's folder."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    listed_at: float = 0.0
    """Time of the last list, since 1970. Earlier if the next list continues it."""
    listed_wide_at: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    """Time of each pack that lists can return again."""
    pending: list[PackName] = field(default_factory=list)
    """Packs whose index has not been read yet, ascending."""
    refused: set[PackName] = field(default_factory=set)
    """Packs that the store refused to read. Each wide list makes them pending again."""
    first_hour: str = ""
    """The lists of new packs contain this hour completely."""
    older: list[str] | None = None
    """Start of the list of each older hour that has not been listed yet, ascending; None if
    unknown."""


class PackFinder:
    """Fills a directory with the packs of a bucket. Thread-safe."""

    def __init__(
        self,
        bucket: Bucket,
        directory: PackDirectory,
        executor: Executor,
        guarded: Callable[[Callable[[], Any]], Any],
        *,
        value_format: int,
        ttl_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`guarded` makes each call of the bucket through the circuit breaker.

        `executor` reads indexes in parallel.
        """
        self._bucket = bucket
        self._directory = directory
        self._executor = executor
        self._guarded = guarded
        self._value_format = value_format
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: OrderedDict[NamespaceId, _Progress] = OrderedDict()

    def update(self, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
        """Looks for packs with these blocks, if the directory lacks some. Raises TierError."""
        if not self._missing(namespace, keys):
            return
        progress = self._progress(namespace)
        ends_at = time.monotonic() + OLDER_SECONDS
        with progress.lock:
            if abs(self._clock() - progress.listed_at) >= REFRESH_SECONDS:
                self._list_new(namespace, progress)
            while self._missing(namespace, keys) and time.monotonic() < ends_at:
                if progress.pending:
                    self._read_indexes(namespace, progress)
                elif not self._list_older(namespace, progress):
                    return

    def stored(self, pack: KnownPack) -> None:
        """Adds a pack that this server has stored."""
        progress = self._progress(pack.namespace)
        progress.seen[pack.name.path] = pack.name.written_at
        self._directory.add(pack)

    def _missing(self, namespace: NamespaceId, keys: Sequence[bytes]) -> bool:
        return any(self._directory.find(namespace, key) is None for key in keys)

    def _progress(self, namespace: NamespaceId) -> _Progress:
        with self._lock:
            progress = self._spaces.setdefault(namespace, _Progress())
            self._spaces.move_to_end(namespace)
            if len(self._spaces) > MAX_NAMESPACES:
                self._spaces.popitem(last=False)
            return progress

    def _list_new(self, namespace: NamespaceId, progress: _Progress) -> None:
        """Lists packs that were stored since the last list, and those shortly before."""
        folder, now = folder_of(namespace, self._value_format), self._clock()
        is_wide = abs(now - progress.listed_wide_at) >= WIDE_EVERY_SECONDS
        if not progress.first_hour:
            hour = hour_of(now - WIDE_SECONDS)
            after = start_of(folder, hour)
        else:
            hour = progress.first_hour
            start = progress.listed_at - OVERLAP_SECONDS
            after = mark_of(folder, min(start, now - WIDE_SECONDS) if is_wide else start)
        paths = self._guarded(lambda: self._bucket.names(folder, after, MAX_LISTED))
        reached = self._take(progress, paths, now)
        if len(paths) < MAX_LISTED:
            progress.listed_at = now
        else:
            progress.listed_at = min(now, max(progress.listed_at, reached + OVERLAP_SECONDS))
        progress.first_hour = hour
        if is_wide:
            progress.listed_wide_at = now
            seen = progress.seen.copy().items()
            oldest = now - 2 * WIDE_SECONDS - HOUR_SECONDS
            progress.seen = {path: written_at for path, written_at in seen if written_at > oldest}
            progress.refused = {name for name in progress.refused if now - name.written_at < self._ttl_seconds}
            progress.pending = sorted(progress.refused.union(progress.pending), key=lambda name: name.written_at)
            self._directory.drop_before(now - self._ttl_seconds)

    def _list_older(self, namespace: NamespaceId, progress: _Progress) -> bool:
        """Lists the next older hour. Returns False if all are listed, or the directory is full."""
        folder, now = folder_of(namespace, self._value_format), self._clock()
        oldest = max(now - self._ttl_seconds, self._directory.dropped_until)
        if progress.older is None:
            hours = self._guarded(lambda: self._bucket.folders(folder))
            progress.older = [start_of(folder, hour) for hour in hours if hour < progress.first_hour]
        if not progress.older:
            return False
        after = progress.older[-1]
        if after < start_of(folder, hour_of(oldest)):
            progress.older.clear()
            return False
        hour_folder = after[: after.rindex("/") + 1]
        paths = self._guarded(lambda: self._bucket.names(hour_folder, after, MAX_LISTED))
        if len(paths) < MAX_LISTED:
            progress.older.pop()
        else:
            progress.older[-1] = paths[-1]
        self._take(progress, paths, now)
        return True

    def _take(self, progress: _Progress, paths: Sequence[str], now: float) -> float:
        """Queues the packs of a list that are new and not too old. Returns the latest time."""
        latest = 0.0
        for path in paths:
            name = PackName.parse(path)
            if name is None:
                continue
            latest = name.written_at
            if path in progress.seen:
                continue
            progress.seen[path] = name.written_at
            if now - name.written_at < self._ttl_seconds and name.written_at > self._directory.dropped_until:
                progress.pending.append(name)
        progress.pending.sort(key=lambda name: name.written_at)
        return latest

    def _read_indexes(self, namespace: NamespaceId, progress: _Progress) -> None:
        """Reads the indexes of the newest pending packs. Raises StoreUnavailableError.

        A pack that the store refuses to read does not affect the others.
        """
        names = progress.pending[-INDEXES_AT_ONCE:]
        results = list(self._executor.map(lambda name: self._read_index(namespace, name), names))
        unanswered: dict[PackName, StoreUnavailableError] = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, KnownPack):
                self._directory.add(result)
            if isinstance(result, StoreUnavailableError):
                unanswered[name] = result
            elif not isinstance(result, TierError):
                progress.refused.discard(name)
            elif name not in progress.refused:
                progress.refused.add(name)
                _log.warning("pack %s cannot be read: %s", name.path, result)
        progress.pending[-len(names) :] = list(unanswered)
        if unanswered:
            raise next(iter(unanswered.values()))

    def _read_index(self, namespace: NamespaceId, name: PackName) -> KnownPack | TierError | None:
        """Returns a pack or an error; None if it is damaged, or was deleted after the list."""
        try:
            index = self._guarded(lambda: self._bucket.read(name.path, 0, name.index_bytes))
            return KnownPack(namespace, name, decode_index(namespace, bytes(index)))
        except ObjectMissingError:
            return None
        except TierError as error:
            return error
        except ValueError as error:
            _log.warning("pack %s is ignored: %s", name.path, error)
            return None
