"""Configuration loader. Flags override the environment, which overrides the file.

The loader records the origin of each value, which `kvtier config` and error messages show. All
problems of the configuration are reported together.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...cuda.host.memory import available_bytes
from ...protos.endpoint import CREDENTIAL_VARIABLES, ENDPOINT_VARIABLE, default_endpoint
from ...protos.spelling import closest, did_you_mean
from ...protos.trusted_files import read_trusted
from .fields import LISTS, SETTINGS, TABLES
from .machine import memory_bytes
from .schema import Config, ConfigError
from .tenants import read_tenants
from .tiers import DEFAULT_TABLES, read_tiers, size_notes
from .toml import toml_text
from .units import GIB, MIB, human_size
from .validation import conflicts, proxy_warnings, read_value, warnings

__all__ = ["CONFIG_VARIABLE", "Loaded", "load"]

CONFIG_VARIABLE = "KVTIER_CONFIG"
"""Environment variable with the path of the configuration file."""

_USUAL_REGION = 8 * GIB
_PREFIX = "KVTIER_"
_VARIABLES = {setting.variable: setting for setting in SETTINGS.values()}
_OTHER_VARIABLES = (CONFIG_VARIABLE, ENDPOINT_VARIABLE, *CREDENTIAL_VARIABLES.values())

# The server ignores these variables. Kubernetes sets the first group in every container of a
# namespace that has a service called "kvtier" or "kvtier-…". Other programs of the project read
# the second group.
_NOT_OURS = re.compile(
    r"KVTIER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
    r"|KVTIER_(BENCH|CLIENT|DEMO|TEST)_\w+"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    origins: Mapping[str, str]
    """Origin of each setting's value by key, as text."""
    warnings: tuple[str, ...] = ()
    """Warnings about permitted settings, for the log."""
    notes: tuple[str, ...] = ()
    """Lines about defaults that are smaller than usual for lack of memory or disk space."""


@dataclass(slots=True)
class _Builder:
    """Values and problems found so far. A later source overwrites values of the earlier sources."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str, *, is_text: bool = False) -> None:
        """Records a value, or a problem if the value is invalid."""
        try:
            # The checks of tiers and tenants need other settings, so `load` runs them last.
            self.values[key] = (
                _parse_tables(key, value) if key in LISTS else read_value(SETTINGS[key], value, is_text=is_text)
            )
            self.origins[key] = origin
        except ValueError as error:
            self.problems.append(f"{origin}: {key} = {toml_text(value)}: {error}")


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Returns the effective configuration. Raises `ConfigError`.

    `flags` maps the keys of settings to values (text, or the setting's type); None means that the
    flag was not given. `file` takes precedence over `KVTIER_CONFIG`. Some defaults depend on the
    size of the machine's memory and disk. `load` creates no file or directory.
    """
    builder = _Builder()
    # Blanks around a value are ignored: it may come from a file with a line end.
    environ = {name: value.strip() for name, value in environ.items()}
    path = file or environ.get(CONFIG_VARIABLE)
    if path:
        _read_file(Path(path), builder)
    _read_environment(environ, builder)
    for key, value in (flags or {}).items():
        if value is not None:
            builder.put(key, value, _flag(key), is_text=isinstance(value, str))
    if builder.problems:
        raise ConfigError(*builder.problems)

    _add_defaults(builder, environ)
    if builder.problems:
        raise ConfigError(*builder.problems)
    values = builder.values
    if "tiers" in builder.origins:
        tier_tables = values["tiers"]
        values["tiers"], tier_problems = read_tiers(tier_tables, values["data_dir"])
    else:
        tier_tables = DEFAULT_TABLES
        values["tiers"], tier_problems = read_tiers(tier_tables, values["data_dir"])
        builder.origins["tiers"] = "default"
    builder.origins.setdefault("tenants", "default")
    tables = values.get("tenants", {})
    values["tenants"], tenant_problems = read_tenants(tables, values["tiers"], values["region_size"])
    problems = [f"{builder.origins['tiers']}: {problem}" for problem in tier_problems]
    if not tier_problems:
        problems += [f"{builder.origins['tenants']}: {problem}" for problem in tenant_problems]
    problems += conflicts(values, builder.origins)
    if problems:
        raise ConfigError(*problems)
    config = _build(values)
    notes = (*builder.notes, *size_notes(config.tiers, tier_tables))
    found = (*builder.warnings, *warnings(config), *proxy_warnings(config, environ))
    return Loaded(config, builder.origins, found, notes)


def _flag(key: str) -> str:
    return "--cpu-only" if key == "tiers" else f"--{re.sub('[._]', '-', key)}"


def _read_file(path: Path, builder: _Builder) -> None:
    try:
        tables = tomllib.loads(read_trusted(path).decode("utf-8"))
    except OSError as error:
        builder.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except (ValueError, RecursionError) as error:  # an integer of over 4,300 digits
        builder.problems.append(f"{path}: is not TOML: {error}")
        return
    top_level = [key for key in SETTINGS if "." not in key] + list(TABLES)
    for name, value in tables.items():
        if name in TABLES:
            _read_table(path, name, value, builder)
        elif name in SETTINGS:
            builder.put(name, value, f"{path}")
        else:
            builder.problems.append(f"{path}: {name}: no such setting{did_you_mean(name, top_level)}")


def _read_table(path: Path, table: str, values: object, builder: _Builder) -> None:
    if not isinstance(values, dict):
        builder.problems.append(f"{path}: {table}: must be a table, [{table}]")
        return
    known = [key.removeprefix(f"{table}.") for key in SETTINGS if key.startswith(f"{table}.")]
    for name, value in values.items():
        if name in known:
            builder.put(f"{table}.{name}", value, f"{path}")
        else:
            builder.problems.append(f"{path}: [{table}] {name}: no such setting{did_you_mean(name, known)}")


def _read_environment(environ: Mapping[str, str], builder: _Builder) -> None:
    for name, value in environ.items():
        if name in _VARIABLES:
            builder.put(_VARIABLES[name].key, value, name, is_text=True)
        elif name.startswith(_PREFIX) and name not in _OTHER_VARIABLES and not _NOT_OURS.fullmatch(name):
            # Compare without the common prefix, which would make all names similar.
            known = [variable.removeprefix(_PREFIX) for variable in (*_VARIABLES, *_OTHER_VARIABLES)]
            near = closest(name.removeprefix(_PREFIX), known, 0.7)
            if near:
                builder.problems.append(f"{name}: no such environment variable; did you mean {_PREFIX}{near}?")
            else:
                builder.warnings.append(f"{name}: no such setting of the server; ignored")


_EXAMPLES = {
    "tiers": 'a list of tables in TOML, like [{type = "lmdb", size = "64GiB"}]',
    "tenants": 'a table of tables in TOML, like {acme = {quota = "25%"}}',
}


def _parse_tables(key: str, value: Any) -> Any:
    """Returns the value of `tiers` or `tenants`. In the environment it is TOML text, or "none"."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", ""):
        return [] if key == "tiers" else {}
    try:
        return tomllib.loads(f"{key} = {value}")[key]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'must be "none" or {_EXAMPLES[key]}: {error}') from None


def _add_defaults(builder: _Builder, environ: Mapping[str, str]) -> None:
    region_size, note = _default_region()
    if note and "region_size" not in builder.values:
        builder.notes.append(note)
    data_home = environ.get("XDG_DATA_HOME") or "~/.local/share"
    computed: dict[str, Any] = {
        "listen": (str(default_endpoint(environ)),),
        "region_size": region_size,
        "data_dir": f"{data_home}/kvtier",
    }
    for key, setting in SETTINGS.items():
        if key not in builder.values and key not in LISTS:
            builder.put(key, computed.get(key, setting.default), "default")


def _default_region() -> tuple[int, str]:
    """Returns the default size of the region, and a note if it is less than usual."""
    rooms = [(memory_bytes() // 4, "a quarter of this machine's memory")]
    if (free := available_bytes()) is not None:
        rooms.append((free // 2, f"half of the {human_size(free)} of free memory"))
    room, name = min(rooms)
    if room >= _USUAL_REGION:
        return _USUAL_REGION, ""
    size = max(MIB, room // MIB * MIB)
    return size, f"region_size is {human_size(size)} by default, not {human_size(_USUAL_REGION)}: {name}"


def _build(values: Mapping[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[name] = value
    for field_ in msgspec.structs.fields(Config):
        if field_.name in TABLES:
            tree[field_.name] = field_.type(**tree[field_.name])
    return Config(**tree)
