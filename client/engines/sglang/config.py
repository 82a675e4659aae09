"""Settings in `--hicache-storage-backend-extra-config`, checked when SGLang attaches kvtier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..server_config import ServerConfig, check_number
from .deadlines import CALL_SECONDS, COPY_SECONDS

__all__ = ["StorageConfig"]

MAX_WAIT_SECONDS = CALL_SECONDS - COPY_SECONDS

_OF_SGLANG = frozenset({"allocator", "backend_name", "class_name", "interface_v1", "module_path"})


@dataclass(frozen=True)
class StorageConfig(ServerConfig):
    """The settings of kvtier in SGLang.

    `lookup_timeout_s`: longest wait of a lookup for the answers of tiers on other hosts.
    `load_timeout_s`: longest wait of a load for blocks of lower tiers.
    `model_name`: name of the model in the namespace. Default: SGLang's name, which may be a path.
    """

    source: ClassVar[str] = "hicache_storage_backend_extra_config"

    load_timeout_s: float = MAX_WAIT_SECONDS
    model_name: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], warn: Callable[[str], None]) -> Self:
        """Parses the settings of kvtier. Raises ValueError for a wrong value."""
        if not extra.get("interface_v1"):
            # Otherwise SGLang copies each page, and calls methods that know no leases.
            raise ValueError(f'kvtier: {cls.source} must have "interface_v1": 1')
        return super().parse({key: value for key, value in extra.items() if key not in _OF_SGLANG}, warn)

    def check(self) -> None:
        # First, because the limit for other engines is higher.
        check_number("lookup_timeout_s", self.lookup_timeout_s, 0.0, MAX_WAIT_SECONDS)
        super().check()
        if self.transport == "cuda_ipc":
            raise ValueError("kvtier: transport must not be cuda_ipc, because HiCache's pools are in host memory")
        if not isinstance(self.model_name, str):
            raise ValueError(f"kvtier: model_name must be a string, not {self.model_name!r}")  # noqa: TRY004 - one kind for all
        check_number("load_timeout_s", self.load_timeout_s, 0.1, MAX_WAIT_SECONDS)
