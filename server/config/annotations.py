"""Descriptions of settings: the annotations of the fields of configuration structs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from .units import MIB

__all__ = ["InFlight", "KeyFilePath", "_duration", "_setting", "_size"]


def _setting(
    doc: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    default: str | None = None,
    unit: Literal["bytes", "seconds"] | None = None,
) -> msgspec.Meta:
    """Describes one field. `default` is the documented text of a default that the code computes."""
    return msgspec.Meta(description=doc, extra={"unit": unit, "ge": ge, "le": le, "default": default})


def _size(doc: str, ge: int, le: int | None = None, default: str | None = None) -> msgspec.Meta:
    return _setting(doc, ge=ge, le=le, default=default, unit="bytes")


def _duration(doc: str, ge: float, le: float | None = None) -> msgspec.Meta:
    return _setting(doc, ge=ge, le=le, unit="seconds")


KeyFilePath: TypeAlias = Annotated[
    Path | None,
    _setting(
        "File with the keys that encrypt values in the store (TOML, readable by its owner only). The server reads it "
        "again when it changes. Needs the extra `kvtier[encryption]`.",
        default="no encryption",
    ),
]
"""The option `encryption_keys` of shared tiers."""

InFlight: TypeAlias = Annotated[
    int, _size("Maximum size of all transfers to and from the store at the same time.", MIB)
]
"""The option `in_flight` of shared tiers."""
