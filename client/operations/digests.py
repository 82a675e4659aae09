"""Digests of parts in a client: recorded after a store, compared after a load."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ...cuda.host.region import DIGEST_PAGE_BYTES, HostRegion
from ...protos.wire.part_digests import is_sampled, part_digest, sampled
from ..errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["PartDigests", "Verify", "chosen", "digests_of_slots"]

Verify: TypeAlias = Literal["always", "sampled", "off"]

_VARIABLE = "KVTIER_VERIFY"
_CHOICES = ", ".join(get_args(Verify))

_log = logging.getLogger(__name__)


def chosen(verify: Verify | None) -> Verify:
    """Returns what a client verifies; None: `KVTIER_VERIFY`, or "sampled".

    Raises InvalidRequest for another argument. Another value of the variable is ignored, because it
    must not end an engine.
    """
    if verify is not None:
        if verify not in get_args(Verify):
            raise InvalidRequest(f"verify must be one of {_CHOICES}, not {verify!r}")
        return verify
    found = os.environ.get(_VARIABLE, "")
    for known in get_args(Verify):
        if found == known:
            return known  # type: ignore[no-any-return]
    if found:
        _log.warning("kvtier: %s=%s is ignored: it must be one of %s", _VARIABLE, found, _CHOICES)
    return "sampled"


class PartDigests:
    """The digests that one client records and compares.

    `verify`: of all parts, of the parts of about one in 32 keys, or of none. All clients have the
    same sample.
    """

    def __init__(self, verify: Verify, rank: int | None) -> None:
        self._verify = verify
        self._rank = rank or 0

    def names(self, keys: Sequence[bytes]) -> dict[int, bytes]:
        """Returns the keys of the parts that have a digest for this client, by position."""
        if self._verify == "off":
            return {}
        return dict(enumerate(keys)) if self._verify == "always" else {n: keys[n] for n in sampled(keys)}

    def record(
        self,
        region: HostRegion,
        namespace_id: bytes,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Records the digests of parts at these addresses, for the slots at these offsets."""
        if not namespace_id:
            return
        table = region.digests
        for number, key in self.names(keys).items():
            part = _bytes_at(addresses[number], sizes[number])
            table[offsets[number] // DIGEST_PAGE_BYTES] = part_digest(namespace_id, key, self._rank, part)

    def damaged(
        self,
        namespace_id: bytes,
        names: Mapping[int, bytes],
        digests: Mapping[int, int] | Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        """Returns the positions of parts that do not match their digest. 0 matches any bytes.

        `names`: of the parts to compare. Another client may have chosen them, for which more is
        verified than for this one.
        """
        found = []
        for number, key in names.items():
            if self._verify == "off" or (self._verify == "sampled" and not is_sampled(key)):
                continue
            if digest := digests[number]:
                part = _bytes_at(addresses[number], sizes[number])
                if part_digest(namespace_id, key, self._rank, part) != digest:
                    found.append(number)
        return found


def digests_of_slots(region: HostRegion, offsets: Sequence[int], positions: Sequence[int]) -> dict[int, int]:
    """Returns the digests of the parts in slots, by position in `offsets`."""
    table = region.digests
    return {number: table[offsets[number] // DIGEST_PAGE_BYTES] for number in positions}


@lru_cache(64)
def _array_type(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def _bytes_at(address: int, nbytes: int) -> ReadableBuffer:
    array: ReadableBuffer = _array_type(nbytes).from_address(address)
    return array
