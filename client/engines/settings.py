"""Digest of an engine's settings: each setting counts unless an adapter lists it as neutral.

So a setting that a later version of an engine adds also counts. All adapters use this rule. If a
setting is missing in the digest, an engine can load KV that it would compute differently. If a
setting counts without need, engines that differ in it share no blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch

from .failures import Unsupported
from .file_digests import digest_of_file, fingerprint_of

__all__ = ["NeutralSettings", "digest_of_settings", "plain_settings", "settings_of_environment"]

_MAX_DEPTH = 24
_OWN_PATHS = ("_path", "_dir", "_file", "_folder")


class NeutralSettings:
    """Settings that do not change the KV of tokens, by the reason.

    An entry `OWNER.NAME` is the setting NAME of the table or object OWNER, also if the owner's name
    has a prefix (`draft_model_config` for `model_config`). `OWNER.*` are all settings of OWNER,
    except for those in `counted`. An entry without a dot is a setting with this name anywhere.
    """

    def __init__(self, reasons: Mapping[str, Collection[str]], counted: Collection[str] = ()) -> None:
        self.reasons = reasons
        self._entries = frozenset(entry for entries in reasons.values() for entry in entries)
        self._counted = frozenset(counted)

    def has(self, owner: str, name: str) -> bool:
        if name in self._counted:
            return False
        words = owner.split("_")
        owners = ["_".join(words[first:]) for first in range(len(words))]
        return name in self._entries or any(
            f"{each}.{part}" in self._entries for each in owners for part in (name, "*")
        )


def plain_settings(settings: Any, neutral: NeutralSettings, owner: str = "") -> Any:
    """Returns the settings that count, as a value for `digest_of_settings`. Reads no file.

    Raises Unsupported for a value of an unknown type: its text could contain an address, which
    differs between processes, or could leave something out.
    """
    return _plain(settings, neutral, owner, owner, _MAX_DEPTH)


def digest_of_settings(plain: Any, known: Mapping[str, str] | None = None) -> str:
    """Returns a digest of plain settings, and of the files and folders that they name.

    `known`: digests of files and folders by path. Raises OSError if a file cannot be read.
    """
    text = _text_of(_with_content(plain, "", dict(known or {})))
    return hashlib.sha256(text.encode()).hexdigest()


def settings_of_environment(prefix: str, neutral: NeutralSettings) -> dict[str, str]:
    """Returns the environment variables with a prefix that are set and not neutral."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix) and not neutral.has("environment", name)
    }


def _plain(value: Any, neutral: NeutralSettings, owner: str, name: str, depth: int) -> Any:
    if depth == 0:
        raise Unsupported(f"the engine's settings are nested too deeply at {name!r}")

    def inner(child: Any, child_owner: str = owner, child_name: str = name) -> Any:
        return _plain(child, neutral, child_owner, child_name, depth - 1)

    match value:
        case Enum() | torch.dtype() | torch.device():
            plain: Any = str(value)
        case None | bool() | int() | float() | str():
            plain = value
        case PurePath() | bytes():
            plain = {"path": os.fsdecode(value)}
        case list() | tuple():
            plain = [inner(each) for each in value]
        case set() | frozenset():
            plain = {"set": sorted((inner(each) for each in value), key=_text_of)}
        case type() | FunctionType() | BuiltinFunctionType():
            plain = _code_of(value) | {"values": inner(_values_of(value))}
        case _ if (table := _table_of(value)) is not None:
            plain = _plain_table(table, neutral, name, inner)
        case _:
            plain = {"hash": _hash_of(value, name)}
    return plain


def _hash_of(value: Any, name: str) -> str:
    if callable(method := getattr(value, "compute_hash", None)):  # as vLLM's `SupportsHash` has it
        return str(method())
    raise Unsupported(f"the setting {name!r} has a value of an unknown type: {type(value).__qualname__}")


def _plain_table(table: Mapping[Any, Any], neutral: NeutralSettings, name: str, inner: Callable[..., Any]) -> Any:
    counted = []
    for key, child in table.items():
        if neutral.has(name, str(key)):
            continue
        plain = inner(child, name, str(key))
        # A table of neutral settings only is as if it were absent, or None.
        if (plain != {} or not child) and not (plain in (None, {}) and neutral.has(str(key), "*")):
            counted.append((key, plain))
    if all(isinstance(key, str) for key, _ in counted):
        return dict(counted)
    return {"pairs": sorted(([inner(key), plain] for key, plain in counted), key=_text_of)}


def _text_of(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True)


def _table_of(value: Any) -> Mapping[Any, Any] | None:
    """Returns the parts of a value that has parts, or None."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        return vars(value)
    for to_table in ("to_dict", "model_dump"):  # configurations of transformers and of pydantic
        if callable(method := getattr(value, to_table, None)):
            table = method()
            return table if isinstance(table, Mapping) else None
    return None


def _code_of(code: Callable[..., Any]) -> dict[str, Any]:
    """Identifies a class or function by its name and its source file."""
    try:
        source = inspect.getsourcefile(code) or ""
    except TypeError:  # a part of the interpreter
        source = ""
    return {"code": f"{code.__module__}.{code.__qualname__}", "path": source}


def _values_of(code: Callable[..., Any]) -> list[Any]:
    """Returns the values that a function has from its definition."""
    cells = [cell.cell_contents for cell in getattr(code, "__closure__", None) or ()]
    return [cells, getattr(code, "__defaults__", None), getattr(code, "__kwdefaults__", None)]


def _with_content(value: Any, name: str, known: dict[str, str]) -> Any:
    """Adds the content of files and folders that settings name, as it may change in place.

    A word such as "auto" is no path, even if the current directory has a file with this name.
    """
    if isinstance(value, dict):
        return {key: _with_content(child, key, known) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_content(child, name, known) for child in value]
    if not isinstance(value, str) or not (os.sep in value or "." in value or name.endswith(_OWN_PATHS)):
        return value
    if value not in known:
        if os.path.isdir(value):  # noqa: PTH112 - any text, also too long for a path
            known[value] = fingerprint_of(Path(value))
        elif os.path.isfile(value):  # noqa: PTH113 - as above
            known[value] = digest_of_file(Path(value))
    return [value, known[value]] if value in known else value
