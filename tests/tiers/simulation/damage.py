"""Damage of copies of the records: bits that flip, and records that were being written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from zlib import crc32

from kvtier.tiers.core import slot_records as layout
from kvtier.tiers.core.slot_records import SlotRecords
from kvtier.tiers.secondary_tier import NamespaceId

from .model import EXTENT

__all__ = ["Damage", "damage"]

_KINDS = ("header", "classes", "namespace", "record", "record", "record", "write", "write", "grant")
_KEY = b"cut off!"
_PART = layout._head(layout._READY[0], len(_KEY), 0, 1, 1, 1) + _KEY
"""The record of a part whose namespace has no number that is used."""


@dataclass(slots=True)
class Damage:
    """What is damaged.

    Attributes:
        refused: whether the records must be refused as a whole.
        slots: slots whose record may be lost.
        torn: slots whose record was being replaced by that of a complete part.
        namespaces: namespaces that may be lost.
    """

    refused: bool = False
    slots: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)
    namespaces: set[NamespaceId] = field(default_factory=set)


def damage(rng: random.Random, memory: bytearray, records: SlotRecords) -> Damage:
    """Damages a copy of the memory of `records`."""
    done, kind, places = Damage(), rng.choice(_KINDS), _places(records)
    if kind == "header":
        at = _flip(rng, memory, 0, 80)
        done.refused = at < layout._HEADER.size or 0 <= at - layout._UNKEPT_AT < layout._U32.size
        done.refused |= layout._U32.unpack_from(memory, layout._ATTEMPTS_AT)[0] >= layout.MAX_ATTEMPTS
    elif kind == "classes":
        _flip(rng, memory, layout._PAGE, records._sizes.extents * layout._CLASS.size)
        done.refused = True
    elif kind == "namespace" and records._numbers:
        at = records._namespace_at(rng.choice(list(records._numbers)) & layout._INDEX_MASK)
        done.namespaces.add(NamespaceId(layout._NAMESPACE.unpack_from(memory, at)[-1]))
        _flip(rng, memory, at, layout._NAMESPACE_BYTES)
    elif kind == "record":
        for offset in rng.sample(list(places), min(3, len(places))):
            start, nbytes = rng.choice(_areas(records, places[offset]))
            _flip(rng, memory, start, nbytes)
            done.slots.add(offset)
    elif kind in ("write", "grant"):
        is_grant, states_at = kind == "grant", records._states_at
        written = {
            slot for slot, place in places.items() if (memory[states_at + place] == layout._GRANTED[0]) != is_grant
        }
        if written:
            offset = rng.choice(sorted(written))
            _cut_off(rng, memory, _areas(records, places[offset]), is_grant=is_grant)
            (done.slots if is_grant else done.torn).add(offset)
    return done


def _places(records: SlotRecords) -> dict[int, int]:
    """Returns the place of the record of each slot, by its offset."""
    places = {}
    for extent, slot_bytes in enumerate(records._slot_bytes):
        for slot in range(EXTENT // slot_bytes if slot_bytes else 0):
            places[extent * EXTENT + slot * slot_bytes] = records._first_place(extent) + slot
    return places


def _areas(records: SlotRecords, place: int) -> list[tuple[int, int]]:
    """Returns begin and size of the record, the checksum and the state at a place."""
    return [
        (records._records_at + place * layout._RECORD.size, layout._RECORD.size),
        (records._checks_at + place * layout._U32.size, layout._U32.size),
        (records._states_at + place, 1),
    ]


def _flip(rng: random.Random, memory: bytearray, start: int, nbytes: int) -> int:
    """Flips a bit; returns the place of its byte."""
    at = start + rng.randrange(nbytes)
    memory[at] ^= 1 << rng.randrange(8)
    return at


def _cut_off(rng: random.Random, memory: bytearray, areas: list[tuple[int, int]], *, is_grant: bool) -> None:
    """The server was killed while it wrote a record: a grant, or the part of a granted slot."""
    (record, _), (check, _), (state, _) = areas
    if is_grant:
        tag = rng.getrandbits(64)
        pieces = [(record, layout._RECORD.pack(layout._head(layout._GRANTED[0], 0, 0, 0, 0, tag), b""))]
        pieces.append((state, layout._GRANTED))
    else:
        pieces = [(record, _PART), (check, layout._U32.pack(crc32(_KEY))), (state, layout._READY)]
    left = rng.randrange(1, sum(len(data) for _, data in pieces))
    for at, data in pieces:
        memory[at : at + min(left, len(data))] = data[:left]
        left -= min(left, len(data))
