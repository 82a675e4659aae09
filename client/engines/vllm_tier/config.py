"""What a table of ``secondary_tiers`` may say to kvtier, checked once at engine start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..vllm.config import ServerConfig

__all__ = ["TierConfig"]

_LOCALITIES = (None, "LOCAL", "REMOTE")


@dataclass(frozen=True)
class TierConfig(ServerConfig):
    """The tier's settings, besides those of every way to kvtier.

    ``identity``: a name for these weights and settings, part of the namespace; wanted where the tier cannot see the engine's
    configuration (it says so at start), and otherwise a way to keep engines apart. Where it is wanted it also vouches for what then
    cannot be checked: block hashes that are the same in every process (``--prefix-caching-hash-algo sha256``), and no LoRA.
    ``locality``: vLLM's word for where this tier is, ``LOCAL`` or ``REMOTE``; requests can leave tiers out by it.
    """

    where: ClassVar[str] = "the tier's table in secondary_tiers"

    identity: str = ""
    locality: str | None = None

    def check(self) -> None:
        """Raises ValueError for a value that cannot be."""
        super().check()
        if not isinstance(self.identity, str):
            raise ValueError(f"kvtier: identity must be a string, not {self.identity!r}")  # noqa: TRY004 - one kind for all
        if self.locality not in _LOCALITIES:
            raise ValueError(f"kvtier: locality must be LOCAL or REMOTE, not {self.locality!r}")
