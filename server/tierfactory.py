"""Makes the tiers that the configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from ..tiers.base import SecondaryTier, TierError, TierOpenError
from .config import TierConfig

__all__ = ["open_tiers"]


def open_tiers(configs: Sequence[TierConfig]) -> list[SecondaryTier]:
    """Opens the tiers, in order; all or none of them.

    A class of somebody else's is called with the keywords `name`, `directory`, `size_bytes` and `durability`, and its options.

    Raises:
        TierError: one cannot be opened; the message names it.
    """
    tiers: list[SecondaryTier] = []
    try:
        tiers.extend(map(_open, configs))
    except TierError:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def _open(config: TierConfig) -> SecondaryTier:
    try:
        make = _tier_class(config)
        tier = make(
            name=config.name,
            directory=config.path,
            size_bytes=config.size,
            durability=config.durability,
            **config.options,
        )
    except TierError as error:
        raise TierOpenError(f"tier {config.name}: {error}") from error
    except (TypeError, ValueError, OSError) as error:
        raise TierOpenError(f"tier {config.name}: {type(error).__name__}: {error}") from error
    if config.rules is not None:
        tier.rules = tuple(rule.to_rule() for rule in config.rules)
    return tier


def _tier_class(config: TierConfig) -> Callable[..., SecondaryTier]:
    if config.type == "lmdb":
        from ..tiers.lmdb import LMDBTier

        return LMDBTier
    module_name, _, class_name = config.type.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TierOpenError(f"cannot import {config.type}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SecondaryTier)):
        raise TierOpenError(f"{config.type} is not a SecondaryTier")
    return found
