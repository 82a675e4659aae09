"""The client processes: starting, killing, and their counters."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from harness.polling import polls

from stress import die_with_parent
from stress.chaos import SLOTS, SURVIVORS
from stress.durable_ledger import DepositPlan
from stress.shape import DATASETS, LEDGER, PAIR
from stress.worker import Task

__all__ = ["ClientPool", "ClientProcess", "die_with_parent_prefix"]

START_SECONDS = 30.0
END_SECONDS = 30.0
PAIR_SLOTS = (4, 5)
CONNECTIONS = (
    *(("auto", 0), ("grpc", 0), ("shm", 0), ("tcp", 1)),
    *(("shm", 0), ("grpc", 1), ("tcp", 0), ("auto", 1)),
)
"""Transport and endpoint of the first process of each slot; the others draw one of them."""


def die_with_parent_prefix() -> list[str]:
    """A command prefix that makes a command end with this process."""
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]


@dataclass
class ClientProcess:
    slot: int
    task: Task
    popen: subprocess.Popen[bytes]
    path: Path
    wakes_at: float | None = None
    """When to continue it, if it is stopped."""
    counts: Counter[str] = field(default_factory=Counter)
    _read: int = 0

    @property
    def is_connected(self) -> bool:
        """Whether a server has answered it."""
        return any(name.startswith("epoch ") for name in self.counts)

    @property
    def log(self) -> Path:
        """File of its standard error."""
        return self.path.with_suffix(".stderr")

    def read_output(self) -> Iterator[dict[str, Any]]:
        """Reads its new counters; yields its other new lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            item = json.loads(line)
            if "counts" in item:
                self.counts = Counter(item["counts"])
            else:
                yield item


class ClientPool:
    """Eight client processes and their predecessors."""

    def __init__(
        self, directory: Path, endpoints: Sequence[str], seed: int, lease: float, deposits: DepositPlan
    ) -> None:
        """`lease` is the server's lease duration.

        `endpoints` are a Unix socket and a TCP address of the server.
        """
        self._directory = directory
        self._since = time.monotonic()
        self._deposits = deposits
        self._endpoints = endpoints
        self._seed = seed
        self._lease = lease
        self._born = 0
        self.counts: Counter[str] = Counter()
        """Counters of processes that have ended."""
        self.wrong: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.processes: list[ClientProcess] = []
        self.survivors: list[Counter[str]] = []
        """Final counters of clients that were never killed."""

    def start(self) -> None:
        """Starts all clients and waits until each has had an answer."""
        self.processes = [self._spawn(slot) for slot in range(SLOTS)]
        for _ in polls(START_SECONDS, 0.05):
            self.read_outputs()
            if all(process.is_connected for process in self.processes):
                return
        raise AssertionError("clients do not begin to work")

    def totals(self) -> Counter[str]:
        """Counters of all processes; of a killed one its last published counters."""
        return sum((process.counts for process in self.processes), self.counts)

    def read_outputs(self) -> None:
        """Reads the output of all processes.

        A process that ended by itself is a failure and is replaced.
        """
        for slot, process in enumerate(self.processes):
            self._read_output(process)
            code = process.popen.poll()
            if code is not None:
                tail = process.log.read_text()[-3000:]
                self.failures.append(f"client {process.task.name} ended by itself with {code}:\n{tail}")
                self._replace(slot)

    def kill(self, slot: int) -> None:
        """SIGKILLs a process, stopped or not, and starts its successor."""
        self.processes[slot].popen.kill()
        self._replace(slot)

    def stop(self, slot: int, seconds: float) -> None:
        """SIGSTOPs a process for this many seconds."""
        process = self.processes[slot]
        process.popen.send_signal(signal.SIGSTOP)
        process.wakes_at = time.monotonic() + seconds

    def wake(self, *, all_of_them: bool = False) -> None:
        """SIGCONTs processes whose time has come."""
        for process in self.processes:
            if process.wakes_at is not None and (all_of_them or time.monotonic() >= process.wakes_at):
                process.popen.send_signal(signal.SIGCONT)
                process.wakes_at = None

    def end_all(self) -> None:
        """Ends half of the processes by SIGKILL and the others by SIGTERM."""
        self.wake(all_of_them=True)
        for process in self.processes:
            process.popen.send_signal(signal.SIGKILL if process.slot % 2 else signal.SIGTERM)
        for process in self.processes:
            self._await_end(process)
            self._read_output(process)
        self.survivors = [process.counts for process in self.processes[:SURVIVORS]]

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()

    def _await_end(self, process: ClientProcess) -> None:
        try:
            code = process.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.failures.append(f"client {process.task.name} hangs: it does not end")
            process.popen.kill()
            process.popen.wait()
            return
        # a process that was just started may not handle SIGTERM yet
        if process.slot % 2 == 0 and code not in (0, -signal.SIGTERM):
            self.failures.append(f"client {process.task.name} ended with {code}:\n{process.log.read_text()[-3000:]}")

    def _replace(self, slot: int) -> None:
        self.processes[slot].popen.wait()
        self._retire(self.processes[slot])
        self.processes[slot] = self._spawn(slot)

    def _retire(self, process: ClientProcess) -> None:
        self._read_output(process)
        self.counts += process.counts
        process.counts = Counter()

    def _read_output(self, process: ClientProcess) -> None:
        for item in process.read_output():
            if item["kind"] == "wrong":
                self.wrong.append({"client": process.task.name} | item)
            else:
                self.failures.append(f"client {process.task.name}: {item['text']}")

    def _spawn(self, slot: int) -> ClientProcess:
        task = self._task(slot, f"{slot}-{self._born}")
        self._born += 1
        path = self._directory / f"{task.name}.jsonl"
        command = [*die_with_parent_prefix(), sys.executable, "-m", "stress.worker", msgspec.json.encode(task).decode()]
        with path.with_suffix(".stderr").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return ClientProcess(slot, task, process, path)

    def _task(self, slot: int, name: str) -> Task:
        rng = random.Random(f"{self._seed}:{name}")
        style = "sync" if slot % 2 == 0 else "aio"
        is_first = slot < SURVIVORS or name == f"{slot}-{slot}"
        transport, endpoint = CONNECTIONS[slot] if is_first else rng.choice(CONNECTIONS)
        names = (PAIR.name,) if slot in PAIR_SLOTS else (*rng.sample(sorted(DATASETS), 2), LEDGER.name)
        return Task(
            name=name,
            seed=f"{self._seed}:{name}",
            endpoint=self._endpoints[endpoint],
            directory=str(self._directory),
            style=style,
            transport=transport,
            fields=names,
            workers=rng.randint(2, 4),
            lease=self._lease,
            since=self._since,
            deposits=self._deposits,
            rank=PAIR_SLOTS.index(slot) if slot in PAIR_SLOTS else None,
        )
