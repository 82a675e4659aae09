"""Real SGLang engines on a CPU, each in its own processes, and real servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK
from server_process import ServerProcess
from sglang_scenario import TRIGGER, RunSglang
from tiny_models import make_dense
from window_model import make_windows

HERE = Path(__file__).resolve().parent
SHIM = HERE.parent.parent / "tools" / "sglang_cpu"
ENGINE_SECONDS = 900
ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "page_size": BLOCK,
    "log_level": "info",
    "random_seed": 0,
}
HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests here, because they need the environment with SGLang."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session", autouse=True)
def use_long_timeouts() -> None:
    """Overrides the fixture of all tests, because engines have processes of their own."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `dense` and `windows`."""
    folder = tmp_path_factory.mktemp("models")
    make_dense(folder / "dense")
    make_windows(folder / "windows")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is not running yet."""
    process = ServerProcess(tmp_path_factory.mktemp("kvtier"), long_timeout=True)
    yield process
    process.kill()


@pytest.fixture(scope="session")
def run_sglang(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSglang:
    """Runs one engine over steps and returns the results of the named ones, and its log.

    `storage`: the arguments of a storage back end, see `sglang_scenario`. None: without HiCache.
    """
    folder = tmp_path_factory.mktemp("engines")

    def run(
        steps: list[dict[str, Any]],
        storage: dict[str, Any] | None = None,
        *,
        model: str = "dense",
        trigger: Path | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        settings = {**ENGINE, "model_path": str(models / model), **(HICACHE | storage if storage else {}), **engine}
        path = folder / str(time.monotonic_ns())
        job, results, log = path.with_suffix(".job"), path.with_suffix(".json"), path.with_suffix(".log")
        job.write_text(json.dumps({"engine": settings, "steps": steps}))
        paths = [SHIM, HERE, HERE.parent, HERE.parent / "engines", os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": os.pathsep.join(str(each) for each in paths if each),
            # SGLang needs a list of cores for each of several ranks.
            **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if engine.get("tp_size", 1) == 2 else {}),
            TRIGGER: str(trigger or folder / "no-trigger"),
        }
        with log.open("wb") as output:
            command = [sys.executable, HERE / "sglang_run.py", job, results]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            try:
                status = process.wait(ENGINE_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        if not results.exists():
            pytest.fail(f"the engine ended with {status}:\n{text[-8000:]}")
        return {"log": text} | {each["name"]: each for each in json.loads(results.read_text()) if each.get("name")}

    return run
