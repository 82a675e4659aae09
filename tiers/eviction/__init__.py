"""Eviction policies, by the names that the configuration uses."""

from __future__ import annotations

from typing import Any

from .arc import ARC
from .forecast import Forecast
from .lru import LRU
from .mq import MQ
from .policy import EvictionPolicy

__all__ = ["ARC", "DEFAULT_POLICY", "LRU", "MQ", "POLICIES", "EvictionPolicy", "Forecast"]

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"forecast": Forecast, "lru": LRU, "arc": ARC, "mq": MQ}

DEFAULT_POLICY = "forecast"
