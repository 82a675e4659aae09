"""Steps and storage back ends of the tests with SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from scenario import BLOCK
from server_process import ServerProcess

__all__ = ["FORGET", "TRIGGER", "RunSglang", "file_storage", "hits", "kvtier_storage", "opened", "stored"]

TRIGGER = "KVTIER_TEST_TRIGGER"
"""Environment variable with the file that `acting_storage` reads."""
RunSglang = Callable[..., dict[str, Any]]
FORGET = {"op": "forget"}
"""Empties SGLang's caches in device and host memory, so that pages can come from storage only."""


def hits(prompt: list[int]) -> int:
    """Returns the tokens that a hit may cover: whole pages, and never the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def opened(server: ServerProcess, ranks: int = 1) -> dict[str, Any]:
    """Returns a step that waits for the engine's sessions: those since its start or last clear.

    Until they are open, the engine stores nothing and finds nothing. It does not wait for them.
    """
    return {"op": "opened", "folder": str(server.folder), "ranks": ranks}


def stored(server: ServerProcess, blocks: int) -> dict[str, Any]:
    """Returns a step that waits until the server has this many blocks, on disk too."""
    return {"op": "stored", "folder": str(server.folder), "blocks": blocks}


def file_storage(folder: str) -> dict[str, Any]:
    """Returns the arguments of SGLang's own storage in files."""
    extra = json.dumps({"file_storage_path": folder})
    return {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": extra}


def kvtier_storage(endpoint: str, module: str = "kvtier.client.engines.sglang", **extra: Any) -> dict[str, Any]:
    """Returns the arguments with which a user starts SGLang with kvtier."""
    settings = {
        "backend_name": "kvtier",
        "module_path": module,
        "interface_v1": 1,
        "endpoint": endpoint,
        "class_name": "KVTierStorage" if module.startswith("kvtier.") else "ActingStorage",
        **extra,
    }
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(settings),
    }
