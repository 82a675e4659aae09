"""Descriptions of settings: the annotations of the fields of configuration structs."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["_duration", "_setting", "_size"]


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
