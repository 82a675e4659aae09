"""Factory of tiers: opens the tiers of the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ...cuda.host.region import HostRegion
from ...tiers.remote.value_codec import ValueCodec
from ...tiers.secondary_tier import Medium, SecondaryTier, TierError, TierOpenError
from ..auth.credential_files import FileError
from ..config.remote import read_remote_options
from ..config.schema import TierConfig
from .guard import describe_error, safe_repr
from .key_file import KeyFile

__all__ = ["open_on_thread", "open_tier", "share_region", "tier_class"]

_ATTRIBUTES = {
    "type": str,
    "durable": bool,
    "medium": Medium,
    "local": bool,
    "shared": bool,
    "parallel_stores": int,
    "parallel_loads": int,
    "gather_bytes": int,
}
"""Types of the attributes that a tier must have besides `name` and `capacity_bytes`."""

_MAX_PARALLEL = 16


def _open_tiers(configs: Sequence[TierConfig]) -> list[SecondaryTier]:
    """Opens all tiers in order. If one cannot be opened, closes the open ones and raises TierError.

    A custom class gets the keyword arguments `name`, `directory`, `size_bytes`, `durability` and
    the options of its configuration.
    """
    tiers: list[SecondaryTier] = []
    try:
        tiers.extend(map(open_tier, configs))
    except TierError:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def share_region(tiers: Sequence[SecondaryTier], region: HostRegion) -> None:
    """Gives the region to all tiers. Raises TierOpenError, which names the tier."""
    for tier in tiers:
        try:
            tier.use_region(region.pools, region.address, region.size_bytes)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a third-party class may raise anything
            raise TierOpenError(f"tier {tier.name}: {describe_error(error)}") from error


async def open_on_thread(configs: Sequence[TierConfig]) -> list[SecondaryTier]:
    """Opens the tiers on a thread, because a large one takes long, and signals must be handled.

    If it is cancelled, the thread continues until the process ends. A daemon thread does not delay
    this, and for the tiers it is the same as a SIGKILL.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[list[SecondaryTier]] = loop.create_future()

    def settle(tiers: list[SecondaryTier], error: BaseException | None) -> None:
        if opened.cancelled():
            return
        if error is not None:
            opened.set_exception(error)
        else:
            opened.set_result(tiers)

    def work() -> None:
        tiers: list[SecondaryTier] = []
        error: BaseException | None = None
        try:
            tiers = _open_tiers(configs)
        except BaseException as failure:  # noqa: BLE001 - the caller raises it
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: a signal has ended the start
            loop.call_soon_threadsafe(settle, tiers, error)

    threading.Thread(target=work, name="kvtier-open", daemon=True).start()
    return await opened


def open_tier(config: TierConfig, *, repair: bool = True) -> SecondaryTier:
    """Opens a tier. If a file of one of kvtier's own tiers is damaged, the tier moves it aside.

    With `repair=False` the tier raises `TierDamagedError` instead. Classes outside kvtier do not
    get `repair`. Raises TierError, which names the tier, if the tier cannot be opened.
    """
    try:
        arguments = _remote_arguments(config) if config.is_remote else _local_arguments(config, repair=repair)
        tier = tier_class(config)(name=config.name, size_bytes=config.size, **arguments)
        _check(tier, config)
        if config.rules is not None:
            tier.rules = tuple(rule.to_rule() for rule in config.rules)
    except TierError as error:
        # Keep the error's class, because callers distinguish a tier in use from a damaged tier.
        kind = type(error) if isinstance(error, TierOpenError) else TierOpenError
        raise kind(f"tier {config.name}: {error}") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a third-party class may raise anything
        raise TierOpenError(f"tier {config.name}: {describe_error(error)}") from error
    return tier


def _local_arguments(config: TierConfig, *, repair: bool) -> dict[str, Any]:
    leave: dict[str, Any] = {} if repair or config.is_custom else {"repair": False}
    return {"directory": config.path, "durability": config.durability, **leave, **config.options}


def _remote_arguments(config: TierConfig) -> dict[str, Any]:
    from ...tiers.remote.network_tier import RemoteLimits

    options = msgspec.structs.asdict(read_remote_options(config.type, {"options": config.options}))
    limits = RemoteLimits(deadline_seconds=options.pop("deadline"), in_flight_bytes=options.pop("in_flight"))
    if config.ttl is not None:
        limits = replace(limits, ttl_seconds=config.ttl)
    key_file: Path | None = options.pop("encryption_keys")
    codec = {"codec": _encrypted(key_file)} if key_file is not None else {}
    return {"limits": limits, **codec, **options}


def _encrypted(key_file: Path) -> ValueCodec:
    from ...tiers.remote.encryption import EncryptedValues

    try:
        return EncryptedValues(KeyFile(key_file))
    except FileError as error:
        raise TierOpenError(f"encryption_keys: {error}") from None


def _check(tier: SecondaryTier, config: TierConfig) -> None:
    name, capacity = getattr(tier, "name", None), getattr(tier, "capacity_bytes", None)
    if name != config.name:
        raise TierOpenError(f"its `name` is {safe_repr(name)}; has it called SecondaryTier.__init__?")
    if type(capacity) is not int or capacity <= 0:
        raise TierOpenError(f"its `capacity_bytes` is {safe_repr(capacity)}; it must be a positive int")
    for attribute, kind in _ATTRIBUTES.items():
        value = getattr(tier, attribute, None)
        if not isinstance(value, kind):
            raise TierOpenError(f"its `{attribute}` is {safe_repr(value)}; it must be a {kind.__name__}")
    if tier.durable and tier.gather_bytes:
        raise TierOpenError("it has `gather_bytes` although it is `durable`; a flush must not wait for more blocks")
    # Removals of a tier that is not shared are ordered by running one store or removal at a time.
    for attribute, most in (
        ("parallel_stores", _MAX_PARALLEL if tier.shared else 1),
        ("parallel_loads", _MAX_PARALLEL),
    ):
        if not 1 <= getattr(tier, attribute) <= most:
            raise TierOpenError(f"its `{attribute}` is {getattr(tier, attribute)}; it must be between 1 and {most}")


def tier_class(config: TierConfig) -> Callable[..., SecondaryTier]:
    """Returns the class of a tier. Raises TierError, or an error of the third-party module."""
    if config.type == "lmdb":
        from ...tiers.lmdb.tier import LMDBTier

        return LMDBTier
    if config.type == "disk":
        from ...tiers.disk.tier import DiskTier

        return DiskTier
    if config.type == "valkey":
        from ...tiers.remote.valkey import ValkeyTier

        return ValkeyTier
    if config.type == "s3":
        from ...tiers.remote.bucket import import_obstore
        from ...tiers.remote.s3 import S3Tier

        import_obstore()
        return S3Tier
    if config.type == "mooncake":
        from ...tiers.remote.mooncake import MooncakeTier
        from ...tiers.remote.mooncake_process import require_mooncake

        require_mooncake()
        return MooncakeTier
    module_name, _, class_name = config.type.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TierOpenError(f"cannot import {config.type}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SecondaryTier)):
        raise TierOpenError(f"{config.type} is not a SecondaryTier")
    return found
