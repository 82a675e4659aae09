"""The tiers that are not part of kvtier: is there a class of that name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ...tiers.base import TierError
from ..config.schema import TierConfig
from ..tier_host.factory import tier_class
from ..tier_host.strangers import said
from .finding import Finding, Scene, fail, ok

__all__ = ["tiers"]


def tiers(scene: Scene) -> Iterator[Finding]:
    """Can the classes be imported that the tables of tiers name. None of them is made: that would open its storage."""
    if scene.config is None:
        return
    custom = [tier for tier in scene.config.tiers if tier.is_custom]
    if not custom:
        yield ok("all of them are part of kvtier")
    for tier in custom:
        trouble = _trouble(tier)
        if trouble:
            yield fail(
                f"tier {tier.name}: {trouble}",
                "the server does not start",
                "install its package beside kvtier, or set PYTHONPATH; type is module:Class, of a SecondaryTier",
            )
        else:
            yield ok(f"tier {tier.name}: {tier.type} can be imported")


def _trouble(tier: TierConfig) -> str:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a module prints is no part of the JSON
            tier_class(tier)
    except TierError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - somebody else's module may raise anything
        return f"cannot import {tier.type}: {said(error)}"
    return ""
