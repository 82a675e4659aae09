"""kvtier below vLLM's own tiering manager and primary tier, with a real server and no engine."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from tiering_world import World, content_of, keys_of, request_of, world
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING
FLAG = {"do_remote_decode": True}
BOUND_SECONDS = 12.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that runs."""
    server = ServerProcess(tmp_path_factory.mktemp("kvtier"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the test's own, that runs."""
    server = ServerProcess(tmp_path)
    server.start()
    yield server
    server.kill()


def _pinned(server: ServerProcess) -> int:
    status = server.status()
    return int(status["leases"]) + int(status["stores"])


def _failures(world: World) -> float:
    stats = world.manager.get_stats()
    return 0.0 if stats is None else sum(value for name, value in _counters(stats).items() if "failures" in name)


def _counters(stats: Any) -> dict[str, float]:
    return {str(name): value for name, value in stats.reduce().items()}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_what_one_engine_stored_another_loads_to_the_byte(running: ServerProcess, transport: str) -> None:
    """B3.15 What nobody stored is a miss; what another engine stored is unknown first, then a hit, and arrives as it was."""
    keys = keys_of(40, seed=len(transport))
    with world(running.endpoint, tier={"transport": transport, "tenant": transport}) as first:
        assert first.tier._client is not None
        assert first.tier._client.transport == transport
        early = request_of("early", keys)
        first.manager.on_new_request(early)
        assert first.ask(early, keys) == [RETRY] * 40
        assert first.find(early, keys) == [MISS]
        first.run("stores", keys)
    with world(running.endpoint, tier={"transport": transport, "tenant": transport}) as second:
        late = request_of("late", keys)
        second.manager.on_new_request(late)
        assert second.ask(late, keys)[0] is RETRY
        assert second.find(late, keys) == [HIT] * 40
        assert second.read(late, keys) == [content_of(key) for key in keys]
        second.step("late")
        second.manager.on_request_finished(late)
        second.until(lambda: _pinned(running) == 0)
