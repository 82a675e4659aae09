"""What all operations have in common: a link, calls with deadlines, and how a request is made of what the user gave us."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ...cuda.host.copy import HostBuffer, addresses_of
from ...cuda.host.pinning import Pin
from ...protos.v1 import common_pb2
from ..effects import Call, Operation
from ..errors import DeadlineExceeded, InvalidRequest, KVTierError, SessionLost
from ..namespace import Namespace
from ..session.session import Session
from ..staging import StagingPool
from ..timeouts import Timeouts

__all__ = ["Base", "as_json", "consecutive", "duration", "keys_for", "message"]


_group_of: Callable[[bytes], bytes] = itemgetter(slice(-4, None))


class Base:
    """Operations of one client; stateless but for the staging buffers."""

    def __init__(
        self, namespace: Namespace, timeouts: Timeouts, lost: Callable[[Session], None], pin: Pin | None = None
    ) -> None:
        """`lost` is told of a link whose session the server does not know any more; `pin` pins staging buffers."""
        self._namespace = namespace
        self._timeouts = timeouts
        self._lost = lost
        self._staging = StagingPool(pin)
        self._sizes_by_group = {
            number.to_bytes(4, "big"): group.part_bytes for number, group in enumerate(namespace.groups)
        }

    def close(self) -> None:
        """Gives up the staging buffers; those in use when they are given back."""
        self._staging.close()

    def _call(self, link: Session, method: str, request: Any, wait: float = 0.0) -> Operation[Any]:
        try:
            return (yield Call(method, request, self._timeouts.call + wait))
        except SessionLost:
            self._lost(link)
            raise

    def _call_for_sure(self, link: Session, method: str, request: Any) -> Operation[Any]:
        """Calls what grants slots or gives them back.

        Where nobody knows whether it was carried out (no answer in time, or the caller was cancelled), slots could stay with
        a session that does not know of them: so that session ends, and with it whatever it holds.
        """
        try:
            return (yield from self._call(link, method, request))
        except BaseException as error:
            if isinstance(error, DeadlineExceeded) or not isinstance(error, KVTierError):
                self._lost(link)
            raise

    def _quietly(self, operation: Operation[None]) -> Operation[None]:
        """Runs an operation that tidies up after a failure, whose own failure is of no interest."""
        try:
            yield from operation
        except KVTierError:
            return

    def _sizes(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the size of each key's part."""
        by_group = self._sizes_by_group
        try:
            return list(map(by_group.__getitem__, map(_group_of, keys)))
        except (KeyError, TypeError) as error:
            raise InvalidRequest(f"{error} ends no key of this namespace; see make_key") from None

    def _places(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, writable: bool
    ) -> tuple[list[int], list[int]]:
        """Returns addresses and sizes of buffers, which are those of the keys' parts."""
        if len(keys) != len(buffers):
            raise InvalidRequest(f"{len(keys)} keys, but {len(buffers)} buffers")
        try:
            addresses, sizes = addresses_of(buffers, writable=writable)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        wanted = self._sizes(keys)
        if sizes != wanted:
            wrong = next(number for number, size in enumerate(sizes) if size != wanted[number])
            raise InvalidRequest(f"a buffer of {sizes[wrong]} bytes for a part of {wanted[wrong]}")
        return addresses, sizes


M = TypeVar("M", bound=Message)


def message(make: type[M], **fields: Any) -> M:
    """Makes a request of what the user gave us."""
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def keys_for(link: Session, keys: Sequence[bytes]) -> dict[str, Any]:
    """Returns the fields of a request that carry keys: packed if the server takes that, and they are of one length."""
    try:
        lengths = set(map(len, keys)) if link.takes_packed_keys else set()
        if len(lengths) == 1 and (length := lengths.pop()):
            packed = b"".join(keys)
            if len(packed) != length * len(keys):
                raise InvalidRequest("keys are bytes, and not items of another size")
            return {"packed_keys": common_pb2.PackedKeys(keys=packed, key_bytes=length)}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"keys are bytes: {error}") from error
    return {"keys": keys}


def as_json(params: Mapping[str, Any] | None) -> str:
    """Returns parameters as text; nothing for none."""
    try:
        return json.dumps(params) if params else ""
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"kv_transfer_params are not JSON: {error}") from error


def duration(seconds: float | None) -> Duration | None:
    """Returns a time span as it travels."""
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def consecutive(sizes: Sequence[int]) -> list[int]:
    """Returns where pieces of these sizes begin that lie one behind the other."""
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
