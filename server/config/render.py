"""Text forms of the configuration: TOML or JSON with origins, and the reference of all settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from .fields import LISTS, SETTINGS, TABLES, TENANT_SETTINGS, TIER_SETTINGS, Setting
from .loader import Loaded
from .mooncake import MOONCAKE_OPTIONS
from .remote import NO_FILES, VALKEY_OPTIONS
from .s3 import S3_OPTIONS
from .schema import TenantConfig, TierConfig
from .toml import toml_text

__all__ = ["reference", "to_json", "to_toml"]


def to_toml(loaded: Loaded) -> str:
    """Returns a file for `kvtier serve --config`; a comment names the origin of each value."""
    lines = ["# The effective configuration. The comment after each value names its origin."]
    lines += _toml_settings(
        loaded, [setting for key, setting in SETTINGS.items() if "." not in key and key not in LISTS]
    )
    if not loaded.config.tiers:
        lines += _aligned([("tiers = []", loaded.origins["tiers"])])
    for table in TABLES:
        settings = [setting for key, setting in SETTINGS.items() if key.startswith(f"{table}.")]
        lines += ["", f"[{table}]", *_toml_settings(loaded, settings)]
    for tier in loaded.config.tiers:
        lines += ["", f"[[tiers]]  # {loaded.origins['tiers']}", *_toml_tier(tier)]
    for tenant in loaded.config.tenants:
        lines += ["", f"[tenants.{toml_text(tenant.name)}]  # {loaded.origins['tenants']}"]
        lines += [f"{key} = {toml_text(value)}" for key, value in _amounts(tenant).items()]
    return "\n".join(lines) + "\n"


def to_json(loaded: Loaded) -> str:
    """Returns JSON with sizes in bytes, durations in seconds, and the origin of each setting."""
    config: dict[str, Any] = {}
    for key in SETTINGS:
        table, _, name = key.rpartition(".")
        (config.setdefault(table, {}) if table else config)[name] = _value(loaded, key)
    config["tiers"] = [{key: getattr(tier, key) for key in TIER_SETTINGS} for tier in loaded.config.tiers]
    config["tenants"] = {tenant.name: _amounts(tenant) for tenant in loaded.config.tenants}
    return json.dumps({"config": config, "origins": dict(loaded.origins)}, indent=2, default=str)


def reference() -> str:
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{setting.key}` | `{setting.variable}` | {_default_text(setting)} | {_meaning(setting)} |"
        for setting in SETTINGS.values()
    ]
    tables = (
        ("[[tiers]]", TIER_SETTINGS, ""),
        ("[tiers.options]", VALKEY_OPTIONS, " of type `valkey`"),
        ("[tiers.options]", S3_OPTIONS, " of type `s3`"),
        ("[tiers.options]", MOONCAKE_OPTIONS, " of type `mooncake`"),
        ("[tenants.NAME]", TENANT_SETTINGS, ""),
    )
    for table, settings, which in tables:
        lines += [
            "",
            f"Settings of each `{table}` table{which}:",
            "",
            "| setting | default | meaning |",
            "|---|---|---|",
        ]
        lines += [f"| `{key}` | {_default_text(setting)} | {_meaning(setting)} |" for key, setting in settings.items()]
    return "\n".join(lines) + "\n"


def _value(loaded: Loaded, key: str) -> Any:
    value: Any = loaded.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _toml_settings(loaded: Loaded, settings: list[Setting]) -> list[str]:
    rows = []
    for setting in settings:
        name = setting.key.rpartition(".")[2]
        rows.append((f"{name} = {_toml_value(setting, _value(loaded, setting.key))}", loaded.origins[setting.key]))
    return _aligned(rows)


def _toml_tier(tier: TierConfig) -> Iterator[str]:
    for key, setting in TIER_SETTINGS.items():
        if key in ("options", "rules") and not getattr(tier, key):
            continue  # TOML has no null, so an empty value cannot be written
        if key in NO_FILES and tier.is_remote:
            continue
        yield f"{key} = {_toml_value(setting, getattr(tier, key))}"


def _amounts(tenant: TenantConfig) -> dict[str, dict[str, Any]]:
    """Returns a tenant's settings. Sizes, fractions and bytes per second are text."""
    given: dict[str, dict[str, Any]] = {
        key: {tier: str(amount) for tier, amount in getattr(tenant, key).items()}
        for key in TENANT_SETTINGS
        if key != "rates"
    }
    given["rates"] = {
        key: SETTINGS[f"rates.{key}"].show(rate) if SETTINGS[f"rates.{key}"].unit else rate
        for key, rate in msgspec.structs.asdict(tenant.rates).items()
        if rate is not None
    }
    return {key: value for key, value in given.items() if value}


def _toml_value(setting: Setting, value: Any) -> str:
    if setting.unit is not None:
        text = setting.show(value)
        return text if text.isdigit() else f'"{text}"'
    return toml_text("off" if value is None else value)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(text) for text, _ in rows)
    return [f"{text:<{width}}  # {origin}" for text, origin in rows]


def _default_text(setting: Setting) -> str:
    if setting.default_doc is not None:
        return setting.default_doc
    if setting.default is None:
        return '"off"'
    if setting.default is msgspec.NODEFAULT:
        return "(required)"
    return f"`{_toml_value(setting, setting.default)}`"


def _meaning(setting: Setting) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    bounds = f" ({setting.bounds()})" if setting.ge is not None or setting.le is not None else ""
    return f"{setting.doc}{choices}{bounds}"
