"""Configurations of the engine: alone, or with a connector and the connector's server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.service import Service

from .lmcache import LmcacheServer, server_settings
from .workload import FULL

__all__ = ["ALONE", "CONFIGURATIONS", "DEAD_STORES", "KVTIER", "Configuration", "kvtier_connector", "within"]

HOST_BYTES = 512 << 20
"""Memory of each connector's server: enough for all conversations."""

Setting = Mapping[str, Any] | None
Serve = Callable[[Path], AbstractContextManager[Setting]]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Configuration of the engine.

    ``serve(directory)`` starts the connector's server and returns the engine's
    ``kv_transfer_config``. ``settings`` names the settings that are not defaults. A configuration
    that cannot run becomes a line of the report; if it ``must_run``, it is an error. ``python`` is
    the interpreter, if the configuration needs a separate environment.
    """

    name: str
    serve: Serve
    settings: str = ""
    must_run: bool = False
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def kvtier_connector(endpoint: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.client.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


def within(setting: Setting) -> Serve:
    """Returns a `Serve` for a connector that needs no server."""

    @contextmanager
    def serve(_: Path) -> Iterator[Setting]:
        yield setting

    return serve


def _kvtier(name: str, **extra: Any) -> Configuration:
    @contextmanager
    def serve(directory: Path) -> Iterator[Setting]:
        with Service(directory, HOST_BYTES) as service:
            service.start()
            yield kvtier_connector(service.tcp if extra.get("transport") == "grpc" else service.unix, **extra)

    settings = f"{_text(extra)}; server: {_text({'region_size': HOST_BYTES, 'tiers': []})}"
    return Configuration(name, serve, settings, must_run=True)


def _kvtier_with_dead_store(name: str, *, hangs: bool) -> Configuration:
    """Returns kvtier with a shared tier whose store is dead.

    A store that `hangs` accepts connections and never answers; the other one refuses connections.
    """

    @contextmanager
    def serve(directory: Path) -> Iterator[Setting]:
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            if hangs:
                store.listen()
            url = f"valkey://127.0.0.1:{store.getsockname()[1]}"
            with Service(directory, HOST_BYTES, valkey_url=url) as service:
                service.start()
                yield kvtier_connector(service.unix, transport="shm")

    tier = f"a valkey tier whose store {'accepts connections and does not answer' if hangs else 'refuses connections'}"
    return Configuration(name, serve, f"transport=shm; server: region_size={HOST_BYTES}, {tier}", must_run=True)


def _lmcache(name: str, chunk_tokens: int | None = None) -> Configuration:
    settings = server_settings(HOST_BYTES, chunk_tokens)

    @contextmanager
    def serve(directory: Path) -> Iterator[Setting]:
        with LmcacheServer(LMCACHE.with_name("lmcache"), directory, settings) as server:
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": server.port,
                },
            }

    text = f"server: {' '.join(settings)}"
    return Configuration(name, serve, text, python=LMCACHE, environment={"LMCACHE_TRACK_USAGE": "false"})


def _offloading(name: str) -> Configuration:
    extra = {"cpu_bytes_to_use": HOST_BYTES}
    setting = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return Configuration(f"vLLM {name}", within(setting), _text(extra))


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


LMCACHE = Path(__file__).resolve().parents[2] / "build" / "lmcache" / "bin" / "python"
ALONE = "no connector"
KVTIER = "kvtier, shm"
CONFIGURATIONS = (
    Configuration(ALONE, within(None), must_run=True),
    _kvtier(KVTIER, transport="shm"),
    _kvtier("kvtier, shm, lazy", transport="shm", lazy_offload=True),
    _kvtier("kvtier, grpc", transport="grpc"),
    _offloading("OffloadingConnector"),
    _offloading("SimpleCPUOffloadConnector"),
    _lmcache("LMCache server"),
    _lmcache("LMCache server, small chunks", FULL.block_tokens),  # equal to kvtier's block size
)
DEAD_STORES = (
    _kvtier_with_dead_store("kvtier, store refuses", hangs=False),
    _kvtier_with_dead_store("kvtier, store hangs", hangs=True),
)
"""Configurations of the part `stores`."""
