"""Forks engines from a process that has imported vLLM: an engine's three processes import it once.

As a program it reads jobs on its standard input, one JSON object per line, and forks for each. vLLM
forks its own processes then too, as it does for a GPU. For a CPU it would spawn them, to bind
threads that are not needed here.

All of these engines share the seed of Python's hashes. That blocks are found with any seed is
for tests whose engines are not from here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["EngineForkServer"]

_NEEDED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.distributed.kv_transfer",
)
_THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class EngineForkServer:
    """The process that engines are forked from; it starts with the first engine."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def run(
        self, program: Path, arguments: Sequence[Path], log: Path, environment: dict[str, str], seconds: float
    ) -> int:
        """Runs a program for so long at most; what it prints is in `log`.

        Returns its status, a negative one for a signal.
        """
        child = self._started(environment)
        job = {
            "program": str(program),
            "arguments": [*map(str, arguments)],
            "log": str(log),
            "environment": environment,
        }
        assert child.stdin is not None
        assert child.stdout is not None
        groups: list[int] = []
        overdue = threading.Timer(seconds, lambda: _kill_groups(groups))
        try:
            print(json.dumps(job), file=child.stdin, flush=True)
            groups.append(_number(child.stdout))
            overdue.start()
            return _number(child.stdout)
        except BaseException:  # such as a test's timeout; it must not affect the next job
            self._child = None
            child.kill()
            child.wait()
            raise
        finally:
            overdue.cancel()
            _kill_groups(groups)  # no process that it has started may outlive it

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()  # it has nothing to lose
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    def _started(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        if self._child is None:
            command, pipe = [sys.executable, __file__], subprocess.PIPE
            environment = {**environment, **_THREADS}
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        return self._child


def _number(answers: IO[str]) -> int:
    line = answers.readline()
    if not line:
        raise RuntimeError("the process that engines come out of has ended")
    return int(line)


def _kill_groups(groups: Sequence[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Forks for each job, reports the process id, waits for it, and reports its end."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name in _NEEDED:
        importlib.import_module(name)
    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context_of("fork" if method == "spawn" else method)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            answers.close()
            _live(json.loads(line))
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def _live(job: dict[str, Any]) -> NoReturn:
    """Makes this a process with its own group."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update({**job["environment"], **_THREADS})
    sys.argv = [job["program"], *job["arguments"]]
    runpy.run_path(job["program"], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
