"""Runner of an engine in its own process. If the engine fails, the runner finds the cause."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .configurations import Configuration

__all__ = ["Ask", "EngineFailed", "asked_engine", "find_reason", "run_engine"]

Ask: TypeAlias = Callable[[Sequence[int]], dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
ENGINE_SECONDS = 600
GRACE_SECONDS = 10
ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*(?:\w*Error|\w*Exception|SystemExit): .+)")
ECHOES = ("See root cause above", "root cause")
"""Phrases with which a vLLM process refers to an error of another process."""


class EngineFailed(Exception):
    """An engine ended without a result; the message is the engine's error."""


def run_engine(
    configuration: Configuration, job: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Runs a job (see child.py) with the connector of a configuration. Raises EngineFailed."""
    llm = dict(job["llm"])
    python = configuration.python or Path(sys.executable)
    if not python.exists():
        raise EngineFailed(f"there is no {python}; `make bench-engine` installs it")
    try:
        with configuration.serve(folder) as setting:
            if setting is not None:
                llm["kv_transfer_config"] = dict(setting)
            return _run(python, {**job, "llm": llm}, folder, {**configuration.environment, **environment})
    except RuntimeError as error:
        raise EngineFailed(find_reason(str(error))) from error


def _run(python: Path, job: dict[str, Any], folder: Path, extra: Mapping[str, str]) -> dict[str, Any]:
    target, log_path = folder / "out.json", folder / "engine.log"
    with _process(python, job, folder, extra) as process:
        try:
            process.wait(ENGINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"no result in {ENGINE_SECONDS} s") from None
    if process.returncode or not target.exists():
        raise EngineFailed(find_reason(log_path.read_text(errors="replace")))
    result: dict[str, Any] = json.loads(target.read_text())
    return result


@contextlib.contextmanager
def asked_engine(configuration: Configuration, llm: Mapping[str, Any], folder: Path) -> Iterator[Ask]:
    """Runs an engine that answers one prompt at a time (see asked.py). Raises EngineFailed.

    Yields a function that sends a prompt and returns the answer.
    """
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with configuration.serve(folder) as setting, ours, ours.makefile("rw") as lines:
        # A worker in a process of its own would poll, also while other engines have their turn.
        settings = {**llm, "kv_transfer_config": setting, "distributed_executor_backend": "uni"}
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        job = {"operation": "answer", "llm": settings, "socket": theirs.fileno()}
        with _process(Path(sys.executable), job, folder, environment, pass_fds=[theirs.fileno()]):
            theirs.close()

            def ask(prompt: Sequence[int]) -> dict[str, Any]:
                lines.write(json.dumps(list(prompt)) + "\n")
                lines.flush()
                if not (line := lines.readline()):
                    raise EngineFailed(find_reason((folder / "engine.log").read_text(errors="replace")))
                answer: dict[str, Any] = json.loads(line)
                return answer

            yield ask


@contextlib.contextmanager
def _process(
    python: Path, job: Mapping[str, Any], folder: Path, extra: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an engine's process, and ends it."""
    source = folder / "job.json"
    source.write_text(json.dumps(job))
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get(
            "VLLM_CPU_OMP_THREADS_BIND", "0"
        ),  # one core computes, the others are for the servers
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
    environment.pop("PYTHONHASHSEED", None)
    command = [str(python), "-m", "bench.engine.child", str(source), str(folder / "out.json")]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True, pass_fds=pass_fds
        )
        try:
            yield process
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group, because an engine's processes may outlive their parent."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_reason(log: str) -> str:
    """Returns the last error of a log that does not refer to another process's error."""
    errors = [match.group(1) for line in log.splitlines() if (match := ERROR.search(line))]
    causes = [error for error in errors if not any(echo in error for echo in ECHOES)]
    return (causes or errors or [log.strip()[-200:] or "no output"])[-1]
