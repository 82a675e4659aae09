"""Settings of the tier's table in `secondary_tiers`, checked when vLLM creates the tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..server_config import ServerConfig

__all__ = ["ManagerConfig"]

_LOCALITIES = (None, "LOCAL", "REMOTE")


@dataclass(frozen=True)
class ManagerConfig(ServerConfig):
    """The tier's settings, besides the common ones.

    `identity`: a name for weights and settings, part of the namespace. Required if the tier cannot
    see the engine's configuration (a warning at start says so). The operator then guarantees what
    the tier cannot check: equal block hashes in every process (`--prefix-caching-hash-algo sha256`)
    and no LoRA adapters.
    `locality`: `LOCAL` or `REMOTE` in vLLM's terms. Requests can exclude tiers by locality.
    """

    source: ClassVar[str] = "the tier's table in secondary_tiers"

    identity: str = ""
    locality: str | None = None

    def check(self) -> None:
        super().check()
        if not isinstance(self.identity, str):
            raise ValueError(f"kvtier: identity must be a string, not {self.identity!r}")  # noqa: TRY004 - one kind for all
        if self.locality not in _LOCALITIES:
            raise ValueError(f"kvtier: locality must be LOCAL or REMOTE, not {self.locality!r}")
