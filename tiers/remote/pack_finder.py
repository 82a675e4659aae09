"""Discovery of packs that other servers have stored, by incremental lists of the bucket.

The list of a namespace's folder is read at most every `REFRESH_SECONDS`, and only if a lookup asks
for a block that is not in the directory. It begins shortly before the last list. Older packs, for
example after the start of a server, are read hour by hour, newest first.

A pack that is damaged, or that the store does not send, has no effect on other packs. The finder
ignores it for `RETRY_SECONDS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from ..secondary_tier import NamespaceId, TierError
from ..types import tenant_of
from .bucket import Bucket, ObjectMissingError, StoredObject
from .limits import AvoidedNames
from .object_store import NotAskedError, StoreUnavailableError
from .pack_directory import KnownPack, PackDirectory
from .pack_format import PackName, decode_index, folder_of, hour_of, is_hour, mark_of, start_of
from .value_codec import ValueCodec

__all__ = ["PackFinder"]

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
OVERLAP_SECONDS = 15.0
"""Each list begins this time before the last one: clocks differ, and a store takes a while."""
WIDE_SECONDS = 900.0
"""Once per `WIDE_EVERY_SECONDS` a list begins this time before. S3 refuses requests if the clock
of a server differs more. Packs with a time that is more than this ahead are ignored."""
WIDE_EVERY_SECONDS = 60.0
INDEXES_AT_ONCE = 64
"""Number of indexes that are read before the directory is asked again."""
INDEX_BYTES_AT_ONCE = 4 << 20
"""Limit of the bytes of these indexes. Decoded, they need up to 100 MB if their keys are short."""
RETRY_SECONDS = 60.0
"""A pack that could not be used is not read again during this time."""
FAILURES = 2
"""A pack is ignored after this many reads without an answer."""
OLDER_SECONDS = 0.25
"""A lookup reads older packs for about this time. The next lookup continues."""
MAX_LISTED = 5_000
"""Limit of the names of one list: 5 answers of S3. The next lookup continues the list."""
MAX_PENDING = 1 << 16
"""Limit of the packs of all namespaces whose index has not been read yet: 32 MiB. A namespace may
have its share, and at least 1,000."""
LOGGED_PER_MINUTE = 10
"""Limit of the packs that the log names: a hostile store can have thousands."""
MAX_NAMESPACES = 256
"""Beyond this number, the finder forgets its progress in the least recently used namespace of the
tenant with most. Otherwise a tenant with many namespaces would make others list all their packs
again at each lookup."""
HOUR_SECONDS = 3600.0


class UnknownKeyError(Exception):
    """Only other servers can read the pack."""


@dataclass(slots=True)
class _Candidate:
    """A pack whose index has not been read yet."""

    name: PackName
    pack_bytes: int
    """Size of the object, according to the list."""
    rank: float
    failures: int = 0


@dataclass(slots=True)
class _Progress:
    """What has been listed of one namespace's folder."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    listed_at: float = 0.0
    """Time of the last complete list, since 1970."""
    continues_at: str = ""
    """Path at which the next list continues an incomplete one."""
    began_at: float = 0.0
    """Time of the first part of that list."""
    is_wide: bool = False
    """Whether that list began `WIDE_SECONDS` before."""
    listed_wide_at: float = 0.0
    pending: list[_Candidate] = field(default_factory=list)
    """Packs whose index has not been read yet, by their rank, ascending."""
    paths: set[str] = field(default_factory=set)
    """Paths of the pending packs."""
    refused: dict[str, _Candidate] = field(default_factory=dict)
    """Packs that the store refused to read. Wide lists make them pending again."""
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
        codec: ValueCodec,
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
        self._codec = codec
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: OrderedDict[NamespaceId, _Progress] = OrderedDict()
        self._unusable = AvoidedNames(RETRY_SECONDS)
        self._keys = codec.known_keys()
        self._log_until, self._logged = 0.0, 0

    def update(self, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
        """Looks for packs with these blocks, if the directory lacks some. Raises TierError."""
        if not self._missing(namespace, keys):
            return
        self._forget_unreadable()
        progress = self._progress(namespace)
        ends_at = time.monotonic() + OLDER_SECONDS
        with progress.lock:
            if abs(self._clock() - progress.listed_at) >= REFRESH_SECONDS:
                self._list_new(namespace, progress)
            while self._missing(namespace, keys) and time.monotonic() < ends_at:
                if progress.pending:
                    if not self._read_indexes(namespace, progress):
                        return
                elif not self._list_older(namespace, progress):
                    return

    def stored(self, pack: KnownPack) -> None:
        """Adds a pack that this server has stored."""
        self._directory.add(pack)

    def _forget_unreadable(self) -> None:
        """Lists all packs again if the keys of encrypted packs have changed."""
        keys = self._codec.known_keys()
        if keys != self._keys:
            with self._lock:
                self._keys = keys
                self._unusable.with_keys(keys)
                self._spaces.clear()

    def _missing(self, namespace: NamespaceId, keys: Sequence[bytes]) -> bool:
        return any(self._directory.find(namespace, key) is None for key in keys)

    def _progress(self, namespace: NamespaceId) -> _Progress:
        with self._lock:
            progress = self._spaces.setdefault(namespace, _Progress())
            self._spaces.move_to_end(namespace)
            if len(self._spaces) > MAX_NAMESPACES:
                numbers = Counter(map(tenant_of, self._spaces))
                most = max(numbers.values())
                del self._spaces[next(each for each in self._spaces if numbers[tenant_of(each)] == most)]
            return progress

    def _list_new(self, namespace: NamespaceId, progress: _Progress) -> None:
        """Lists packs that were stored since the last list, and those shortly before."""
        folder, now = folder_of(namespace, self._codec.FORMAT), self._clock()
        limit = min(MAX_LISTED, self._room(progress))
        if not limit:
            return
        is_wide = abs(now - progress.listed_wide_at) >= WIDE_EVERY_SECONDS
        if not progress.first_hour:
            hour = hour_of(now - WIDE_SECONDS)
            after = start_of(folder, hour)
        else:
            hour = progress.first_hour
            # Names that are no packs must not stop the list either, so it continues after a name.
            start = progress.listed_at - OVERLAP_SECONDS
            after = progress.continues_at or mark_of(folder, min(start, now - WIDE_SECONDS) if is_wide else start)
        # Names of later times cannot hide those of now.
        before = mark_of(folder, now + WIDE_SECONDS)
        found = self._guarded(lambda: self._bucket.listed(folder, after, limit, before))
        self._take(namespace, progress, found, now)
        progress.first_hour = hour
        if not progress.continues_at:
            progress.began_at, progress.is_wide = now, is_wide
        if len(found) == limit:
            progress.continues_at = found[-1].path
            return
        progress.listed_at, progress.continues_at = progress.began_at, ""
        if progress.is_wide:
            progress.listed_wide_at = progress.began_at
            self._directory.drop_before(now - self._ttl_seconds)
            refused, progress.refused = progress.refused, {}
            self._queue(namespace, progress, refused.values(), now)

    def _list_older(self, namespace: NamespaceId, progress: _Progress) -> bool:
        """Lists the next older hour. Returns False if all are listed, or the directory is full."""
        folder, now = folder_of(namespace, self._codec.FORMAT), self._clock()
        oldest = max(now - self._ttl_seconds, self._directory.dropped_until(namespace))
        if progress.older is None:
            found_hours = filter(is_hour, dict.fromkeys(self._guarded(lambda: self._bucket.folders(folder))))
            first, end = hour_of(oldest), progress.first_hour
            progress.older = [start_of(folder, hour) for hour in found_hours if first <= hour < end]
        if not progress.older:
            return False
        after = progress.older[-1]
        if after < start_of(folder, hour_of(oldest)):
            progress.older.clear()
            return False
        hour_folder = after[: after.rindex("/") + 1]
        limit = min(MAX_LISTED, self._room(progress))
        found = self._guarded(lambda: self._bucket.listed(hour_folder, after, limit))
        if len(found) < limit:
            progress.older.pop()
        else:
            progress.older[-1] = found[-1].path
        self._take(namespace, progress, found, now)
        return True

    def _room(self, progress: _Progress) -> int:
        """Returns how many further packs of a namespace may be pending."""
        return max(0, max(1_000, MAX_PENDING // max(1, len(self._spaces))) - len(progress.pending))

    def _take(self, namespace: NamespaceId, progress: _Progress, found: Sequence[StoredObject], now: float) -> None:
        """Queues the packs of a list."""
        folder = folder_of(namespace, self._codec.FORMAT)
        candidates = []
        for each in found:
            name = PackName.parse(each.path, folder)
            if name is not None:
                # A time ahead counts as one in the past, so that it does not win over others.
                candidates.append(_Candidate(name, each.nbytes, now - abs(now - name.written_at)))
        self._queue(namespace, progress, candidates, now)

    def _queue(self, namespace: NamespaceId, progress: _Progress, candidates: Iterable[_Candidate], now: float) -> None:
        """Queues the packs that are new and usable."""
        oldest = max(now - self._ttl_seconds, self._directory.dropped_until(namespace))
        for each in candidates:
            path = each.name.path
            is_known = path in progress.paths or path in self._directory or path in progress.refused
            if (
                not is_known
                and path.encode() not in self._unusable
                and each.rank > oldest
                and each.name.written_at <= now + WIDE_SECONDS
            ):
                progress.pending.append(each)
                progress.paths.add(path)
        progress.pending.sort(key=lambda each: each.rank)

    def _read_indexes(self, namespace: NamespaceId, progress: _Progress) -> bool:
        """Reads the indexes of the newest pending packs. Returns whether all calls had an answer.

        A pack that cannot be read does not affect the others. Raises StoreUnavailableError if there
        was no answer at all.
        """
        some = [progress.pending.pop()]
        nbytes = some[0].name.index_bytes
        while progress.pending and len(some) < INDEXES_AT_ONCE:
            nbytes += progress.pending[-1].name.index_bytes
            if nbytes > INDEX_BYTES_AT_ONCE:
                break
            some.append(progress.pending.pop())
        results = list(self._executor.map(lambda each: self._read_index(namespace, each), some))
        for each, result in zip(some, results, strict=True):
            self._settle(progress, each, result)
        progress.pending.sort(key=lambda each: each.rank)
        unanswered = [result for result in results if isinstance(result, StoreUnavailableError)]
        if len(unanswered) == len(results):
            raise unanswered[0]
        return not unanswered

    def _settle(self, progress: _Progress, candidate: _Candidate, result: KnownPack | Exception | None) -> None:
        """Adds a pack to the directory, or decides when its index is read again."""
        progress.paths.discard(candidate.name.path)
        if isinstance(result, KnownPack):
            self._directory.add(result)
        elif isinstance(result, StoreUnavailableError):
            candidate.failures += not isinstance(result, NotAskedError)
            if candidate.failures < FAILURES:
                progress.pending.append(candidate)
                progress.paths.add(candidate.name.path)
            else:
                self._ignore(candidate, result)
        elif isinstance(result, TierError) and len(progress.refused) < INDEXES_AT_ONCE:
            if candidate.failures == 0:
                self.warn("pack %s cannot be read: %s", candidate.name.path, result)
            candidate.failures = FAILURES - 1
            progress.refused[candidate.name.path] = candidate
        elif result is not None:
            self._ignore(candidate, result)

    def warn(self, text: str, *values: object) -> None:
        """Logs a warning about a pack, at most `LOGGED_PER_MINUTE`."""
        now = time.monotonic()
        if now >= self._log_until:
            self._log_until, self._logged = now + 60.0, 0
        self._logged += 1
        if self._logged <= LOGGED_PER_MINUTE:
            _log.warning(text, *values)

    def _ignore(self, candidate: _Candidate, why: Exception) -> None:
        if not isinstance(why, UnknownKeyError):  # the codec reports it
            self.warn("pack %s is ignored: %s", candidate.name.path, why)
        self._unusable.add([candidate.name.path.encode()])

    def _read_index(self, namespace: NamespaceId, candidate: _Candidate) -> KnownPack | Exception | None:
        """Returns a pack; an error if it is unusable; None if it was deleted after the list."""
        name = candidate.name
        try:
            index = bytes(self._guarded(lambda: self._bucket.read(name.path, 0, name.index_bytes)))
            if len(index) != name.index_bytes:
                return ValueError(f"it has {len(index)} bytes, and its index should have {name.index_bytes}")
            entries = self._codec.open_index(namespace, name.path, index)
            if entries is None:
                return UnknownKeyError("it is encrypted with an unknown key")
            values = decode_index(entries, name.index_bytes, candidate.pack_bytes)
            return KnownPack(namespace, name, values, candidate.rank)
        except ObjectMissingError:
            return None
        except Exception as error:  # noqa: BLE001 - bytes of another host, which must not affect other packs
            return error
