"""Real engines, each in its own processes, and a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_fork_server import EngineForkServer
from engine_timeouts import LONG_TIMEOUT_SECONDS
from scenario import RunEngine
from server_process import ServerProcess
from tiny_models import make_dense, make_hybrid, make_state

HERE = Path(__file__).resolve().parent
ENGINE_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests here, because they need the environment with vLLM."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `dense`, `hybrid` and `state`."""
    folder = tmp_path_factory.mktemp("models")
    make_dense(folder / "dense")
    make_hybrid(folder / "hybrid")
    make_state(folder / "state")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is not running yet."""
    process = ServerProcess(tmp_path_factory.mktemp("kvtier"), long_timeout=True)
    yield process
    process.kill()


@pytest.fixture(scope="session", autouse=True)
def use_long_timeouts() -> None:
    """Overrides the fixture of all tests, because tests of engines set timeouts per process."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[EngineForkServer]:
    """The process that engines are forked from."""
    engines = EngineForkServer()
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def run_engine(models: Path, fork_server: EngineForkServer, tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Runs one engine over steps and returns the results of the named ones.

    ``afresh``: each of its processes starts as a user's do, which takes longer, and ``bind`` says
        on which cores it computes.
    ``prepare``: modules whose `prepare_engine` the engine calls first; its other processes, which
        it forks, are then as prepared.
    ``long_timeout``: see `engine_timeouts`.
    """
    folder = tmp_path_factory.mktemp("engines")

    def run(
        steps: list[dict[str, Any]],
        *,
        model: str = "dense",
        endpoint: str | None = None,
        lookup_timeout_s: float = LONG_TIMEOUT_SECONDS,
        bind: str = "0",
        extra: dict[str, Any] | None = None,
        runner: str = "engine_run.py",
        seconds: float = ENGINE_SECONDS,
        afresh: bool = False,
        long_timeout: bool = True,
        prepare: Sequence[str] = (),
        **llm: Any,
    ) -> dict[str, Any]:
        assert not (afresh and prepare)
        settings = {"model": str(models / model), "block_size": 32, **llm}
        if endpoint is not None:
            settings["kv_transfer_config"] = connector_config(
                endpoint, {"lookup_timeout_s": lookup_timeout_s, **(extra or {})}, long_timeout=long_timeout
            )
        path = folder / str(time.monotonic_ns())
        path.with_suffix(".job").write_text(json.dumps({"llm": settings, "steps": steps, "prepare": prepare}))
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
            # Tests in the parent process may have turned this off. Engines need it, to step between
            # calls.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        environment.pop("PYTHONHASHSEED", None)
        files, log = [path.with_suffix(".job"), path.with_suffix(".json")], path.with_suffix(".log")
        start = _run_afresh if afresh else fork_server.run
        status = start(HERE / runner, files, log, environment, seconds)
        log_text = log.read_text(errors="replace")
        if status:
            pytest.fail(f"engine ended with {status}:\n{log_text[-8000:]}")
        results = json.loads(path.with_suffix(".json").read_text())
        return {"log": log_text} | {result["name"]: result for result in results if result.get("name")}

    return run


def _run_afresh(
    program: Path, arguments: Sequence[Path], log: Path, environment: dict[str, str], seconds: float
) -> int:
    """As `EngineForkServer.run`, but with a new Python for each process of the engine."""
    with log.open("wb") as output:
        command = [sys.executable, program, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            return process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def connector_config(endpoint: str, extra: dict[str, Any], *, long_timeout: bool) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "long_timeout_connector" if long_timeout else "kvtier.client.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }
