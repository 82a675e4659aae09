"""What ``kv_connector_extra_config`` may say, checked once at engine start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

__all__ = ["ConnectorConfig", "ServerConfig"]

Transport = Literal["auto", "shm", "grpc"]


@dataclass(frozen=True)
class ServerConfig:
    """The settings that all of vLLM's ways to kvtier have.

    ``endpoint``: where the server is (``unix:PATH`` or ``host:port``); by default ``$KVTIER_ENDPOINT``, else this user's socket.
    ``transport``: ``auto``, ``shm`` or ``grpc``.
    ``lookup_timeout_s``: how long a request may wait to learn what is cached; afterwards it is computed.
    ``tenant``: part of the namespace; engines of different tenants never share blocks.
    """

    where: ClassVar[str] = "kv_connector_extra_config"

    endpoint: str | None = None
    transport: Transport = "auto"
    lookup_timeout_s: float = 1.0
    tenant: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], warn: Callable[[str], None]) -> Self:
        """Read ``extra``; an unknown key is a warning that names the nearest known one, a wrong value a ValueError.

        Called once per process, while the engine starts: the one moment when raising helps more than it hurts.
        """
        known = [field.name for field in fields(cls)]
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                warn(f"kvtier: unknown key {key!r} in {cls.where} is ignored{hint}")
        values = {key: extra[key] for key in known if key in extra}
        values.setdefault("endpoint", os.environ.get("KVTIER_ENDPOINT") or None)
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError for a value that cannot be."""
        if self.endpoint is not None and not isinstance(self.endpoint, str):
            raise ValueError(f"kvtier: endpoint must be a string, not {self.endpoint!r}")
        if self.transport not in get_args(Transport):
            raise ValueError(
                f"kvtier: transport must be one of {', '.join(get_args(Transport))}, not {self.transport!r}"
            )
        if not isinstance(self.tenant, str):
            raise ValueError(f"kvtier: tenant must be a string, not {self.tenant!r}")  # noqa: TRY004 - one kind for all
        _check_number("lookup_timeout_s", self.lookup_timeout_s, 0.0, 60.0)


@dataclass(frozen=True)
class ConnectorConfig(ServerConfig):
    """The connector's settings, besides those.

    ``max_held_fraction``: the share of the engine's KV blocks that saves in flight may hold back from reuse.
    ``lazy_offload``: store blocks when the engine is about to evict them, not when they are full.
    """

    max_held_fraction: float = 0.5
    lazy_offload: bool = False

    def check(self) -> None:
        """Raises ValueError for a value that cannot be."""
        super().check()
        if not isinstance(self.lazy_offload, bool):
            raise ValueError(f"kvtier: lazy_offload must be true or false, not {self.lazy_offload!r}")  # noqa: TRY004
        _check_number("max_held_fraction", self.max_held_fraction, 0.01, 1.0)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"kvtier: {name} must be a number from {low:g} to {high:g}, not {value!r}")
