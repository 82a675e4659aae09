"""Writer of TOML values, for the printed configuration and for error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["toml_text"]

_LONG_BITS = 14_000
"""Longer integers are printed in hexadecimal: Python prints at most 4,300 decimal digits."""


def toml_text(value: Any) -> str:
    """Returns a value as one line of TOML, without the fields of a struct that are None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Path)):
        # JSON strings are TOML strings, except that TOML requires DEL to be escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, msgspec.Struct):
        value = {key: item for key, item in msgspec.structs.asdict(value).items() if item is not None}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return hex(value) if isinstance(value, int) and value.bit_length() > _LONG_BITS else str(value)
