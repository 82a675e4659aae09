"""Reader of the tenant tables, and conversion of the configuration to the settings of the core."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

from ...protos.spelling import did_you_mean
from ...tiers.core.settings import CPU_TIER, TierSettings
from ...tiers.eviction.quotas import QuotaError, Quotas, Tenant
from ...tiers.secondary_tier import SecondaryTier
from ...tiers.types import TENANT_TAG_BYTES
from .fields import SETTINGS, TENANT_SETTINGS, TableError, read_table
from .schema import Amount, Config, RateConfig, TenantConfig, TierConfig
from .toml import toml_text
from .units import human_size, parse_size

__all__ = ["quota_error_text", "read_tenants", "tenant_tag", "tenants_of", "tier_settings"]

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)
_USABLE = {"lmdb": 0.8, "disk": 0.9}
"""Estimated usable fraction of a tier's size, until the open tier reports its capacity."""


def read_tenants(
    tables: object, tiers: Sequence[TierConfig], region_size: int
) -> tuple[tuple[TenantConfig, ...], list[str]]:
    """Returns the tenants of these tables, and the problems found, one line each."""
    if not isinstance(tables, Mapping):
        return (), ["tenants: must be tables, [tenants.NAME]"]
    names = [CPU_TIER, *(tier.name for tier in tiers)]
    tenants: list[TenantConfig] = []
    problems: list[str] = []
    for name, table in tables.items():
        try:
            tenants.append(_read_tenant(name, table, names))
        except TableError as error:
            problems.append(f"[tenants.{name}] {error}")
    if not problems:
        capacities = {CPU_TIER: region_size} | {tier.name: int(tier.size * _USABLE.get(tier.type, 1)) for tier in tiers}
        problems += _conflicts(tenants, capacities)
    return tuple(tenants), problems


def tenants_of(config: Config, region_bytes: int, tiers: Sequence[SecondaryTier]) -> list[Tenant]:
    """Returns the configured tenants, with their quotas and limits in the open tiers."""
    return _tenants(config.tenants, {CPU_TIER: region_bytes} | {tier.name: tier.capacity_bytes for tier in tiers})


def tier_settings(config: Config, tenants: Sequence[Tenant], pool_starts: Sequence[int]) -> TierSettings:
    """Returns the core's settings. `pool_starts`: see `TierSettings`."""
    configured = {CPU_TIER: config.cpu} | {tier.name: tier for tier in config.tiers}
    return TierSettings(
        eviction={name: tier.eviction for name, tier in configured.items()},
        admission={tier.name: tier.admission for tier in config.tiers},
        ttl={name: tier.ttl for name, tier in configured.items() if tier.ttl is not None},
        tenants=tenants,
        retained_part=config.retention.part,
        held_part=config.handoff.part,
        leased_part=config.leases.part,
        max_holds=config.handoff.max_holds,
        estimates=config.estimates,
        content_bytes=config.events.token_memory,
        pool_starts=pool_starts,
    )


def quota_error_text(error: ValueError) -> str:
    """Returns the message of an error of `Quotas`, with sizes in readable units."""
    if not isinstance(error, QuotaError):
        return f"{error}"
    quotas, over, room = map(
        human_size, (error.quota_bytes, error.quota_bytes - error.capacity_bytes, error.capacity_bytes)
    )
    return f"tier {error.tier}: the quotas add up to {quotas}, {over} more than the {room} that the tier has for blocks"


def _read_tenant(name: str, table: object, tiers: Sequence[str]) -> TenantConfig:
    if not isinstance(table, Mapping):
        raise TableError("must be a table")
    if not name:
        raise TableError("a tenant must have a name; clients without a tenant share the space without a quota")
    for key in table:
        if key not in TENANT_SETTINGS:
            raise TableError(f"{key}: no such setting{did_you_mean(key, TENANT_SETTINGS)}")
    if not table:
        raise TableError("must have quota, limit or rates")
    amounts = {key: _read_amounts(key, value, tiers) for key, value in table.items() if key != "rates"}
    return TenantConfig(name=name, **amounts, rates=_read_rates(table.get("rates", {})))


def _read_rates(table: object) -> RateConfig:
    if not isinstance(table, Mapping):
        raise TableError("rates: must be a table")
    settings = {key.removeprefix("rates."): setting for key, setting in SETTINGS.items() if key.startswith("rates.")}
    return RateConfig(**read_table(table, settings, "rates."))


def _read_amounts(key: str, value: object, tiers: Sequence[str]) -> dict[str, Amount]:
    """Returns the amount per tier name; a single fraction applies to every tier."""
    if isinstance(value, Mapping):
        for tier in value:
            if tier not in tiers:
                raise TableError(
                    f"{key}: there is no tier {tier}; the tiers are {', '.join(tiers)}{did_you_mean(tier, tiers)}"
                )
        return {tier: _read_amount(f"{key}.{tier}", amount) for tier, amount in value.items()}
    amount = _read_amount(key, value)
    if amount.part is None:
        raise TableError(
            f'{key}: a size needs a tier: write it like {{{CPU_TIER} = "2GiB"}}, or write "25%" for all tiers'
        )
    return dict.fromkeys(tiers, amount)


def _read_amount(key: str, value: object) -> Amount:
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        try:
            return Amount(parse_size(value))
        except ValueError:
            raise TableError(
                f'{key} = {toml_text(value)}: must be a size like "2GiB", or a fraction of a tier like "25%"'
            ) from None
    if float(match[1]) > 100:
        raise TableError(f"{key} = {toml_text(value)}: must be at most 100%")
    return Amount(part=float(match[1]) / 100)


def _tenants(tenants: Sequence[TenantConfig], capacities: Mapping[str, int]) -> list[Tenant]:
    def in_bytes(amounts: Mapping[str, Amount]) -> dict[str, int]:
        return {tier: amount.of(capacities[tier]) for tier, amount in amounts.items()}

    return [
        Tenant(tenant.name, tenant_tag(tenant.name), in_bytes(tenant.quota), in_bytes(tenant.limit))
        for tenant in tenants
    ]


def _conflicts(tenants: Sequence[TenantConfig], capacities: Mapping[str, int]) -> Iterator[str]:
    resolved = _tenants(tenants, capacities)
    for tier, capacity in capacities.items():
        try:
            Quotas(tier, capacity, resolved)
        except ValueError as error:
            yield f"tenants: {quota_error_text(error)}"


def tenant_tag(tenant: str) -> bytes:
    """Returns the prefix of all namespace ids of a tenant. It shows which tenant owns a block."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_TAG_BYTES, person=b"kvtier.tenant").digest()
