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
_PART = layout._HEAD.pack(layout._READY, 8, 0, 1, 1, 1) + b"cut off!"
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
        done.refused = at < layout._HEADER.size or 0 <= at - layout._UNKEPT_AT < layout._UNKEPT.size
    elif kind == "classes":
        _flip(rng, memory, layout._PAGE, records._sizes.extents * layout._CLASS.size)
        done.refused = True
    elif kind == "namespace" and records._numbers:
        at = records._namespace_at(layout._place_of(rng.choice(list(records._numbers))))
        done.namespaces.add(NamespaceId(layout._NAMESPACE.unpack_from(memory, at)[-1]))
        _flip(rng, memory, at, layout._NAMESPACE_BYTES)
    elif kind == "record":
        for offset in rng.sample(list(places), min(3, len(places))):
            _flip(rng, memory, places[offset], layout._RECORD.size)
            done.slots.add(offset)
    elif kind in ("write", "grant"):
        is_grant = kind == "grant"
        written = {
            slot for slot, at in places.items() if (memory[at + layout._STATE_AT] == layout._GRANTED) != is_grant
        }
        if written:
            _cut_off(rng, memory, rng.choice(sorted(written)), places, done, is_grant=is_grant)
    return done


def _places(records: SlotRecords) -> dict[int, int]:
    """Returns the place of the record of each slot, by its offset."""
    places = {}
    for extent, slot_bytes in enumerate(records._slot_bytes):
        for slot in range(EXTENT // slot_bytes if slot_bytes else 0):
            places[extent * EXTENT + slot * slot_bytes] = records._position(extent, slot)
    return places


def _flip(rng: random.Random, memory: bytearray, start: int, nbytes: int) -> int:
    """Flips a bit; returns the place of its byte."""
    at = start + rng.randrange(nbytes)
    memory[at] ^= 1 << rng.randrange(8)
    return at


def _cut_off(
    rng: random.Random, memory: bytearray, offset: int, places: dict[int, int], done: Damage, *, is_grant: bool
) -> None:
    """The server was killed while it wrote a record: a grant, or the part of a granted slot."""
    at = places[offset]
    if is_grant:
        record = layout._HEAD.pack(layout._GRANTED, 0, 0, 0, 0, rng.getrandbits(64))
        at += layout._STATE_AT
        done.slots.add(offset)
    else:
        record = layout._CRC.pack(crc32(_PART)) + _PART
    count = rng.randrange(1, len(record))
    memory[at : at + count] = record[:count]
    if not is_grant and count > layout._STATE_AT:
        done.torn.add(offset)
