"""The ways to run one and the same engine: alone, or with a connector and what that needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.service import Service

from .lmcache import LmcacheServer
from .workload import FULL

__all__ = ["ALONE", "CONFIGURATIONS", "KVTIER", "Configuration", "kvtier_connector", "within"]

HOST_BYTES = 512 << 20
"""What each of them may keep outside of the engine: enough for all conversations."""
PATIENCE_SECONDS = 20.0
"""kvtier's look-up budget: on a busy machine a late answer is to show as time, not as a miss."""

Setting = Mapping[str, Any] | None
Serve = Callable[[Path], AbstractContextManager[Setting]]


@dataclass(frozen=True, slots=True)
class Configuration:
    """``serve(directory)`` starts what the connector needs and gives the engine's ``kv_transfer_config``.

    One that does not run is a line of the report, unless it ``must_run``. ``python`` is the interpreter of its environment, where
    that is not this one.
    """

    name: str
    serve: Serve
    must_run: bool = False
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def kvtier_connector(endpoint: str, **extra: Any) -> dict[str, Any]:
    """Returns the setting of kvtier's connector."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.client.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, "lookup_timeout_s": PATIENCE_SECONDS, **extra},
    }


def within(setting: Setting) -> Serve:
    """A connector that lives in the engine's processes alone."""

    @contextmanager
    def serve(_: Path) -> Iterator[Setting]:
        yield setting

    return serve


def _kvtier(**extra: Any) -> Serve:
    @contextmanager
    def serve(directory: Path) -> Iterator[Setting]:
        with Service(directory, HOST_BYTES) as service:
            service.start()
            yield kvtier_connector(service.tcp if extra.get("transport") == "grpc" else service.unix, **extra)

    return serve


@contextmanager
def _lmcache(directory: Path) -> Iterator[Setting]:
    with LmcacheServer(LMCACHE.with_name("lmcache"), directory, HOST_BYTES, FULL.block_tokens) as server:
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
                "lmcache.mp.mq_timeout": 60,
            },
        }


def _offloading(name: str) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": HOST_BYTES}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


LMCACHE = Path(__file__).resolve().parents[2] / "build" / "lmcache" / "bin" / "python"
ALONE = "no connector"
KVTIER = "kvtier, shm"
CONFIGURATIONS = (
    Configuration(ALONE, within(None), must_run=True),
    Configuration(KVTIER, _kvtier(transport="shm"), must_run=True),
    Configuration("kvtier, shm, lazy", _kvtier(transport="shm", lazy_offload=True), must_run=True),
    Configuration("kvtier, grpc", _kvtier(transport="grpc"), must_run=True),
    Configuration("vLLM OffloadingConnector", within(_offloading("OffloadingConnector"))),
    Configuration("vLLM SimpleCPUOffloadConnector", within(_offloading("SimpleCPUOffloadConnector"))),
    Configuration("LMCache server", _lmcache, python=LMCACHE, environment={"LMCACHE_TRACK_USAGE": "false"}),
)
