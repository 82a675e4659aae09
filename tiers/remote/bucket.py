"""Client of an object store (S3, Google Cloud Storage, Azure, a directory), through `obstore`.

The library is the optional extra `kvtier[s3]`. This module imports it when a tier is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from types import ModuleType
from typing import Any, TypeVar

from ..secondary_tier import TierError, TierOpenError
from .object_store import StoreRefusedError, StoreUnavailableError

__all__ = [
    "Bucket",
    "InvalidNameError",
    "ObjectMissingError",
    "StoreFullError",
    "StoredObject",
    "import_obstore",
]

BYTES_PER_SECOND = 16 << 20
"""Transfers have this rate at least: the deadline of a call grows with its bytes."""
LIST_DEADLINES = 4.0
"""A list of several requests ends after this many deadlines: 5 answers of S3 take half a second."""
LEVELS = 4
"""Folders below that of a format: tenant, namespace, hour, and one that no pack is in."""
MAX_PATH_BYTES = 1024
"""Limit of the names of S3, Google and Azure."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_PATH = re.compile(r'Path "([^"]*)"')
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_FULL = re.compile(
    r"QuotaExceeded|InsufficientStorage|EntityTooLarge\b.{0,20}quota|No space left|StorageFull|XMinioStorageFull"
)

_REFUSALS = frozenset({"InvalidPathError", "NotSupportedError", "PermissionDeniedError", "UnauthenticatedError"})

T = TypeVar("T")


class ObjectMissingError(TierError):
    """The store does not have the object."""


class InvalidNameError(StoreRefusedError):
    """The library refuses a list, because it refuses the name of an object in it."""


class StoreFullError(StoreRefusedError):
    """The store has no space for an object."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a list; `stored_at` is by the clock of the store."""

    path: str
    nbytes: int
    stored_at: datetime


class Bucket:
    """Objects below a prefix of a bucket. Thread-safe.

    All methods raise `StoreUnavailableError`, `StoreRefusedError` and `ObjectMissingError`. Each
    request ends within the deadline plus the time for its bytes at `BYTES_PER_SECOND`. A list makes
    one request per 1,000 names, and ends after `LIST_DEADLINES`: a store can name each answer as
    its own next one.
    """

    def __init__(self, connect: Callable[[float], Any], prefix: str, deadline_seconds: float) -> None:
        """`connect` returns a store of `obstore` whose calls end within the given seconds."""
        self._obstore = import_obstore()
        self._connect = connect
        self._prefix = prefix
        self._deadline_seconds = deadline_seconds
        self._clients: dict[int, Any] = {}

    def listed(self, folder: str, after: str, limit: int, before: str = "\U0010ffff") -> list[StoredObject]:
        """Returns the objects in a folder whose paths sort between `after` and `before`.

        They are ascending, and at most `limit`. Paths of other folders are ignored.
        """
        found: dict[str, StoredObject] = {}
        start = self._prefix + folder

        async def collect(client: Any) -> None:
            async for chunk in self._obstore.list(client, start, offset=self._prefix + after, chunk_size=1000):
                for each in chunk:
                    path = each["path"][len(self._prefix) :]
                    # The store may ignore `offset`, and repeat objects.
                    is_wanted = each["path"].startswith(start) and len(each["path"]) <= MAX_PATH_BYTES
                    if is_wanted and after < path < before:
                        found.setdefault(path, StoredObject(path, each["size"], each["last_modified"]))
                if len(found) >= limit or (chunk and chunk[-1]["path"] >= self._prefix + before):
                    return

        self._list(collect)
        # A directory has no order.
        return sorted(found.values(), key=lambda each: each.path)[:limit]

    def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders in a folder, ascending."""
        return self._content(folder)[0]

    def objects(self, folder: str, after: str = "", levels: int = LEVELS) -> Iterator[StoredObject]:
        """Yields all objects of a folder whose paths sort after `after`, in lists of 1,000.

        If the library refuses the name of an object, each folder in the folder gets a list of its
        own, down to `levels` folders deep. So the name hides only the folder that has an invalid
        part in it. Raises `InvalidNameError` after the last object. This needs a store whose lists
        are ascending.
        """
        last = after
        try:
            stream = self._call(lambda client: self._obstore.list(client, self._prefix + folder, chunk_size=1000))
            while chunk := self._call(lambda _: next(stream, None)):
                for each in map(self._stored, chunk):
                    if each.path > after:
                        last = max(last, each.path)
                        yield each
        except InvalidNameError as error:
            if not levels:
                raise
            refused = error
            folders, direct = self._content(folder)
            yield from (each for each in direct if each.path > last)
            for name in folders:
                try:
                    yield from self.objects(f"{folder}{name}/", last, levels - 1)
                except InvalidNameError as another:
                    refused = another
            raise refused from None

    def read(self, path: str, start: int, end: int) -> memoryview:
        """Returns the bytes from `start` to `end`; fewer if the object is shorter."""
        if end <= start:
            return memoryview(b"")
        try:
            found = self._call(
                lambda client: self._obstore.get_range(client, self._prefix + path, start=start, end=end), end - start
            )
        except _RangeError:
            return memoryview(b"")
        content = memoryview(found)
        if content.nbytes > end - start:
            raise StoreRefusedError(f"the store sent {content.nbytes} bytes instead of {end - start}")
        return content

    def write(self, path: str, content: memoryview) -> None:
        """Writes an object that does not exist yet, in one atomic step."""
        with contextlib.suppress(_ExistsError):  # an earlier attempt has succeeded
            self._call(
                lambda client: self._obstore.put(
                    client, self._prefix + path, content, mode="create", use_multipart=False
                ),
                content.nbytes,
            )

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; ignores missing ones."""
        for start in range(0, len(paths), 256):
            some = [self._prefix + path for path in paths[start : start + 256]]
            try:
                self._call(lambda client, some=some: self._obstore.delete(client, some))  # type: ignore[misc]
            except ObjectMissingError:
                for path in some:  # a store without bulk deletion ends at the first missing object
                    try:
                        self._call(lambda client, path=path: self._obstore.delete(client, path))  # type: ignore[misc]
                    except ObjectMissingError:
                        continue

    def _content(self, folder: str) -> tuple[list[str], list[StoredObject]]:
        """Returns the names of the folders in a folder, and the objects, but not those below.

        Ignores names outside of the folder.
        """
        start = self._prefix + folder

        async def collect(client: Any) -> Any:
            return await self._obstore.list_with_delimiter_async(client, start)

        found = self._list(collect)
        names = {path[len(start) :].rstrip("/") for path in found["common_prefixes"] if path.startswith(start)}
        objects = [each for each in found["objects"] if each["path"].startswith(start)]
        return sorted(name for name in names if name and "/" not in name), list(map(self._stored, objects))

    def _stored(self, entry: Any) -> StoredObject:
        return StoredObject(entry["path"][len(self._prefix) :], entry["size"], entry["last_modified"])

    def _list(self, collect: Callable[[Any], Awaitable[T]]) -> T:
        """Runs a list, which may make many requests, until its deadline.

        Only the asynchronous calls of the library can be ended between two requests.
        """
        seconds = LIST_DEADLINES * self._deadline_seconds

        async def within(client: Any) -> T:
            try:
                async with asyncio.timeout(seconds):
                    return await collect(client)
            except TimeoutError:
                raise StoreUnavailableError(f"a list did not end within {seconds:.2g} s") from None

        return self._call(lambda client: asyncio.run(within(client)))

    def _call(self, call: Callable[[Any], T], nbytes: int = 0) -> T:
        """Runs a call of the library and translates its errors."""
        megabytes = 1 << max(0, (nbytes >> 20).bit_length())  # 1, 2, 4, 8 …: few clients
        seconds = self._deadline_seconds + (megabytes << 20) / BYTES_PER_SECOND
        try:
            client = self._clients.get(megabytes)
            if client is None:
                client = self._clients[megabytes] = self._connect(seconds)
            return call(client)
        except TierError:
            raise
        except (KeyboardInterrupt, SystemExit, AttributeError, TypeError):  # not the store's
            raise
        except BaseException as error:  # noqa: BLE001 - errors of the Rust library have no common base
            raise _translated(error, seconds) from None


class _RangeError(StoreRefusedError):
    """The object is shorter than the start of the range."""


class _ExistsError(StoreRefusedError):
    """The object exists already."""


def import_obstore() -> ModuleType:
    """Returns the client library. Raises TierOpenError if it is not installed."""
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise TierOpenError(f"needs the package obstore: pip install 'kvtier[s3]' ({error})") from error


def _translated(error: BaseException, seconds: float) -> TierError:
    """Returns the error of the store that an error of the library means."""
    text, kind = f"{error}", type(error).__name__
    if _NO_BUCKET.search(text):
        return StoreRefusedError("the bucket does not exist")
    if isinstance(error, OSError):
        return (ObjectMissingError if isinstance(error, FileNotFoundError) else StoreRefusedError)(_short(error))
    status, code = _STATUS.search(text), _CODE.search(text)
    number = int(status.group(1)) if status else 0
    if kind == "AlreadyExistsError" or number == HTTPStatus.PRECONDITION_FAILED:
        return _ExistsError("the object exists")
    if number == HTTPStatus.INSUFFICIENT_STORAGE or _FULL.search(text):
        return StoreFullError("the store is full")
    if number == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or "Wanted range starting at" in text:
        return _RangeError("the object is too short")
    is_busy = number >= HTTPStatus.INTERNAL_SERVER_ERROR or number == HTTPStatus.TOO_MANY_REQUESTS
    if number and code:
        message = f"status {number}, {code.group(1)}"
    elif kind == "InvalidPathError":
        path = _PATH.search(text)
        message = f"the client library refuses the name of an object: {ascii(path.group(1) if path else text)[:300]}"
    elif "kind: Timeout" in text or "TimedOut" in text:
        message = f"no answer within {seconds:.2g} s"
    else:
        message = _short(error)
    is_answer = (number and not is_busy) or kind in _REFUSALS
    refusal = InvalidNameError if kind == "InvalidPathError" else StoreRefusedError
    return refusal(message) if is_answer else StoreUnavailableError(message)


def _short(error: BaseException) -> str:
    """Returns the first line of an error. The rest has debug output of the library."""
    text = f"{error}".partition("\n")[0] or type(error).__name__
    # An error of `s3._s3_credentials`, which the library calls.
    return text.rpartition(f"{StoreUnavailableError.__name__}: ")[2][:200]
