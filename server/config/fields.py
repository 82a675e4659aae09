"""Table of all settings, derived from the structs of `schema`, and conversion of single values.

The key of a setting is its path in the file: `limits.max_keys` is `max_keys` in the table
`[limits]`. The environment variable of this setting is `KVTIER_LIMITS_MAX_KEYS`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...protos.spelling import did_you_mean
from .schema import Config, TenantConfig, TierConfig
from .toml import toml_text
from .units import format_duration, format_size, parse_duration, parse_size

__all__ = [
    "LISTS",
    "SETTINGS",
    "TABLES",
    "TENANT_SETTINGS",
    "TIER_SETTINGS",
    "Setting",
    "TableError",
    "read_address",
    "read_table",
    "settings_of",
]


class TableError(ValueError):
    """The table of a tier or tenant is invalid. The message starts with the key of the setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    type: Any
    doc: str
    unit: str | None = None
    ge: float | None = None
    le: float | None = None
    default: Any = msgspec.NODEFAULT
    default_doc: str | None = None

    @property
    def variable(self) -> str:
        return f"KVTIER_{self.key.replace('.', '_').upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Permitted values of an enumerated setting; empty for other settings."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()

    def show(self, value: Any) -> str:
        if value is None:
            return "off"
        if self.unit == "bytes":
            return format_size(int(value))
        if self.unit == "seconds":
            return format_duration(value)
        return f"{value}".lower() if isinstance(value, bool) else f"{value}"

    def read(self, value: Any, *, is_text: bool = False) -> Any:
        """Converts and checks a value. `is_text`: the value comes from the environment or a flag.

        Raises `ValueError`. The caller puts the setting's name and value before the message.
        """
        result = self._convert(value, is_text=is_text)
        if result is None:
            return None
        low, high = self.ge, self.le
        # A comparison with NaN is False, so this form rejects NaN.
        if not ((low is None or result >= low) and (high is None or result <= high)):
            raise ValueError(f"must be {self.bounds()}")
        return result

    def _convert(self, value: Any, *, is_text: bool) -> Any:
        if self.default is None and (
            value is None or (isinstance(value, str) and value.lower() in ("off", "none", ""))
        ):
            return None
        if self.unit == "bytes":
            return parse_size(value)
        if self.unit == "seconds":
            return parse_duration(value)
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"must be one of {', '.join(self.choices)}{did_you_mean(str(value), self.choices)}")
            return value
        if self.type in (Path, Path | None):
            return _path(value)
        if self.type is bool and is_text:
            value = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower(), value.lower())
        try:
            return msgspec.convert(value, self.type, strict=not is_text)
        except msgspec.ValidationError as error:
            # A type without a name is a nested table, for which msgspec's message names the field.
            wanted = _TYPE_NAMES.get(self.type)
            raise ValueError(f"must be {wanted}" if wanted else str(error)) from None

    def bounds(self) -> str:
        """Returns the bounds as text: "between 1MiB and 1GiB"."""
        if self.le is None:
            return f"at least {self.show(self.ge)}"
        if self.ge is None:
            return f"at most {self.show(self.le)}"
        return f"between {self.show(self.ge)} and {self.show(self.le)}"


def read_table(table: Mapping[str, Any], settings: Mapping[str, Setting], prefix: str = "") -> dict[str, Any]:
    """Returns the checked values. Raises `TableError`; `prefix` precedes the key in its message."""
    for key in table:
        if key not in settings:
            raise TableError(f"{prefix}{key}: no such setting{did_you_mean(key, settings)}")
    values = {}
    for key, value in table.items():
        try:
            values[key] = settings[key].read(value)
        except ValueError as error:
            raise TableError(f"{prefix}{key} = {toml_text(value)}: {error}") from None
    return values


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    str: "text",
    bool: "true or false",
    str | None: "text",
    float | None: 'a number, or "off"',
    int | None: 'a whole number, or "off"',
    tuple[str, ...]: "a list of texts",
}


def read_address(table: Mapping[str, Any], key: str, example: str, parse: Callable[[str], Any]) -> Any:
    """Returns a parsed address of the options. Raises `TableError` if it is absent or invalid."""
    if key not in table:
        raise TableError(f"options.{key}: must be given, like {example}")
    try:
        return parse(table[key])
    except ValueError as error:
        raise TableError(f"options.{key}: {error}") from None


def _path(value: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError("must be a path")
    try:
        str(value).encode()
        return Path(value).expanduser().absolute()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8, because logs and messages contain the path") from None
    except RuntimeError:
        raise ValueError("the home directory is not known: set HOME, or write a path without ~") from None


def settings_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, Setting]:
    hints = typing.get_type_hints(struct, include_extras=True)
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if typing.get_origin(hint) is not Annotated:
            if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
                found |= settings_of(hint, f"{prefix}{field.name}.")
            continue
        base, meta = typing.get_args(hint)
        extra = meta.extra
        key = prefix + field.name
        found[key] = Setting(
            key, base, meta.description, extra["unit"], extra["ge"], extra["le"], field.default, extra["default"]
        )
    return found


SETTINGS: dict[str, Setting] = settings_of(Config)
"""All settings by key, in the order of the documentation. Each of `LISTS` counts once."""

LISTS = ("tiers", "tenants")
"""Settings whose value is a list of tables or a table of tables."""

TABLES: tuple[str, ...] = tuple(dict.fromkeys(key.partition(".")[0] for key in SETTINGS if "." in key))
"""Names of the tables of the file: "log", "limits", …"""

TIER_SETTINGS: dict[str, Setting] = settings_of(TierConfig)
TENANT_SETTINGS: dict[str, Setting] = settings_of(TenantConfig)
