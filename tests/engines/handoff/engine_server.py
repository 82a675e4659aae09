"""A real vLLM behind its own HTTP server, in its own processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from calls import post
from harness.polling import polls, wait_until
from harness.ports import ReservedPort

__all__ = ["EngineServer", "Sources"]

START_SECONDS = 300.0
"""Seconds; several engines start at once on shared cores."""

SETTLE_SECONDS = 240.0
GONE_SECONDS = 10.0
_MODULES = Path(__file__).parents[1]
_METRIC = re.compile(r"^vllm:([a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /pause and /resume
    "HF_HUB_OFFLINE": "1",
}


class Sources(NamedTuple):
    """Prompt tokens by source, as vLLM counts them."""

    computed: int
    local: int
    external: int

    def __sub__(self, other: Sources) -> Sources:
        return Sources(*(here - there for here, there in zip(self, other, strict=True)))


class EngineServer:
    """An engine named `name`, always at the same port; its logs are in `folder`.

    Each of its lives has an engine id of its own.
    """

    def __init__(self, folder: Path, name: str, model: Path, config: dict[str, Any], *flags: str) -> None:
        self.name, self._reserved = name, ReservedPort()
        self.port = self._reserved.number
        self._log = folder / f"{name}.log"
        self._flags = [
            *("--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "4096"),
            *("--num-gpu-blocks-override", "512", "--generation-config", "vllm", "--enable-log-requests"),
            *flags,
        ]
        self._config, self._lives = config, 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_id(self) -> str:
        """The engine's id in this life."""
        return f"{self.name}{self._lives}"

    @property
    def log(self) -> str:
        """Its log of all lives."""
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts it; `wait_ready` waits until it answers."""
        environment = {**os.environ, **_ENVIRONMENT}
        environment.pop("PYTHONHASHSEED", None)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_MODULES), str(_MODULES.parent), os.environ.get("PYTHONPATH")])
        )
        self._lives += 1
        config = json.dumps(self._config | {"engine_id": self.engine_id})
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags]
        command += ["--kv-transfer-config", config]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_ready(self) -> None:
        for _ in polls(START_SECONDS, 0.25):
            if self._is_healthy():
                return
            assert self.is_running, f"{self.name} ended:\n{self.log[-4000:]}"
        raise AssertionError(f"{self.name} does not start:\n{self.log[-4000:]}")

    def end(self) -> None:
        """Kills it and releases its port."""
        self.kill()
        self._reserved.close()

    def kill(self) -> None:
        """Kills all of its processes with SIGKILL and waits until they are gone."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(SETTLE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            # Its children belong to the init process, which may reap them late or never.
            for _ in polls(GONE_SECONDS, 0.05):
                os.killpg(child.pid, 0)

    def empty(self) -> None:
        """Empties its own prefix cache, which is refused while blocks are being saved."""
        wait_until(
            lambda: post(self.port, "/reset_prefix_cache")["success"],
            SETTLE_SECONDS,
            otherwise=f"{self.name} does not release its blocks",
            interval=0.1,
        )

    def pause(self) -> None:
        """Pauses scheduling; requests wait."""
        post(self.port, "/pause?mode=keep&clear_cache=false")

    def resume(self) -> None:
        post(self.port, "/resume")

    def wait_logged(self, text: str, count: int = 1) -> None:
        """Waits until it has logged this text as often."""
        wait_until(
            lambda: self.log.count(text) >= count,
            SETTLE_SECONDS,
            otherwise=lambda: f"{self.name} never says {text!r}:\n{self.log[-4000:]}",
        )

    def sources(self) -> Sources:
        """Returns the sources of all prompt tokens so far."""
        values = self.metrics("prompt_tokens_by_source_total", "source")
        return Sources(*(int(values[s]) for s in ("local_compute", "local_cache_hit", "external_kv_transfer")))

    def pulled(self) -> int:
        """Returns how many tokens it has pulled from other engines, by the connector's count."""
        return int(sum(self.metrics("kvtier_pull_tokens_total").values()))

    def ended(self) -> dict[str, float]:
        return self.metrics("request_success_total", "finished_reason")

    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not any(sum(self.metrics(f"num_requests_{state}").values()) for state in ("running", "waiting"))

    def metrics(self, name: str, label: str = "") -> dict[str, float]:
        """Returns one of vLLM's metrics by a label's value."""
        found: dict[str, float] = {}
        for metric, labels, value in _METRIC.findall(self._scrape()):
            if metric == name:
                known = dict(re.findall(r'([a-z_]+)="([^"]*)"', labels))
                found[known.get(label, "")] = found.get(known.get(label, ""), 0.0) + float(value)
        return found

    def _scrape(self) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SETTLE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def _is_healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False
