"""The client processes: who they are, how they are killed, and what they have told."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stress import die_with_parent
from stress.chaos import SLOTS, SURVIVORS
from stress.shape import FIELDS, LEDGER, PAIR
from stress.worker import Task

__all__ = ["ClientPool", "Member", "tethered"]

START_SECONDS = 30.0
END_SECONDS = 30.0
PAIR_SLOTS = (4, 5)


def tethered() -> list[str]:
    """Returns what makes a command die with this process."""
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]


@dataclass
class Member:
    """One client process."""

    slot: int
    task: Task
    process: subprocess.Popen[bytes]
    path: Path
    wakes_at: float | None = None
    """When it is to go on, if it is stopped."""
    counts: Counter[str] = field(default_factory=Counter)
    _read: int = 0

    @property
    def at_work(self) -> bool:
        """Whether a server has answered it."""
        return any(name.startswith("epoch ") for name in self.counts)

    @property
    def log(self) -> Path:
        """What it wrote to standard error."""
        return self.path.with_suffix(".stderr")

    def news(self) -> Iterator[dict[str, Any]]:
        """Takes in its counters and yields the other lines that it has written since the last call."""
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
    """Eight client processes, and those that were in their places before."""

    def __init__(self, directory: Path, endpoint: str, seed: int, lease: float, deposits: float) -> None:
        """`lease` is how long the server's leases hold; each client makes so many `deposits` a second."""
        self._directory = directory
        self._since = time.monotonic()
        self._deposits = deposits
        self._endpoint = endpoint
        self._seed = seed
        self._lease = lease
        self._born = 0
        self.counts: Counter[str] = Counter()
        """Of those that are gone."""
        self.wrong: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.members: list[Member] = []
        self.survivors: list[Counter[str]] = []
        """What those that were never killed had counted at their end."""

    def start(self) -> None:
        """Starts all of them, and waits until each has had an answer."""
        self.members = [self._spawn(slot) for slot in range(SLOTS)]
        deadline = time.monotonic() + START_SECONDS
        while not all(member.at_work for member in self.members):
            assert time.monotonic() < deadline, "clients do not begin to work"
            self.listen()
            time.sleep(0.05)

    def totals(self) -> Counter[str]:
        """Returns what all of them, living or not, have counted; of a killed one what it had told."""
        return sum((member.counts for member in self.members), self.counts)

    def listen(self) -> None:
        """Takes in what the processes have written. One that ended by itself has failed, and gets a successor."""
        for slot, member in enumerate(self.members):
            self._hear(member)
            code = member.process.poll()
            if code is not None:
                tail = member.log.read_text()[-3000:]
                self.failures.append(f"client {member.task.name} ended by itself with {code}:\n{tail}")
                self._replace(slot)

    def kill(self, slot: int) -> None:
        """SIGKILLs a process, stopped or not, and starts another one in its place."""
        self.members[slot].process.kill()
        self._replace(slot)

    def stop(self, slot: int, seconds: float) -> None:
        """SIGSTOPs a process for so many seconds."""
        member = self.members[slot]
        member.process.send_signal(signal.SIGSTOP)
        member.wakes_at = time.monotonic() + seconds

    def wake(self, *, all_of_them: bool = False) -> None:
        """SIGCONTs those whose time has come."""
        for member in self.members:
            if member.wakes_at is not None and (all_of_them or time.monotonic() >= member.wakes_at):
                member.process.send_signal(signal.SIGCONT)
                member.wakes_at = None

    def dismiss(self) -> None:
        """Ends half of them by SIGKILL and the others in order; these must end by themselves."""
        self.wake(all_of_them=True)
        for member in self.members:
            member.process.send_signal(signal.SIGKILL if member.slot % 2 else signal.SIGTERM)
        for member in self.members:
            self._await_end(member)
            self._hear(member)
        self.survivors = [member.counts for member in self.members[:SURVIVORS]]

    def close(self) -> None:
        """Kills whoever is left."""
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()
                member.process.wait()

    def _await_end(self, member: Member) -> None:
        try:
            code = member.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.failures.append(f"client {member.task.name} hangs: it does not end")
            member.process.kill()
            member.process.wait()
            return
        # One that was started a moment ago may not have got as far as to listen to SIGTERM.
        if member.slot % 2 == 0 and code not in (0, -signal.SIGTERM):
            self.failures.append(f"client {member.task.name} ended with {code}:\n{member.log.read_text()[-3000:]}")

    def _replace(self, slot: int) -> None:
        self.members[slot].process.wait()
        self._retire(self.members[slot])
        self.members[slot] = self._spawn(slot)

    def _retire(self, member: Member) -> None:
        self._hear(member)
        self.counts += member.counts
        member.counts = Counter()

    def _hear(self, member: Member) -> None:
        for item in member.news():
            if item["kind"] == "wrong":
                self.wrong.append({"client": member.task.name} | item)
            else:
                self.failures.append(f"client {member.task.name}: {item['text']}")

    def _spawn(self, slot: int) -> Member:
        task = self._task(slot, f"{slot}-{self._born}")
        self._born += 1
        path = self._directory / f"{task.name}.jsonl"
        command = [*tethered(), sys.executable, "-m", "stress.worker", msgspec.json.encode(task).decode()]
        with path.with_suffix(".stderr").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return Member(slot, task, process, path)

    def _task(self, slot: int, name: str) -> Task:
        rng = random.Random(f"{self._seed}:{name}")
        style = "sync" if slot % 2 == 0 else "aio"
        transport = rng.choice(("shm", "grpc", "auto")) if slot >= SURVIVORS else ("auto", "grpc")[slot]
        names = (PAIR.name,) if slot in PAIR_SLOTS else (*rng.sample(sorted(FIELDS), 2), LEDGER.name)
        return Task(
            name=name,
            seed=f"{self._seed}:{name}",
            endpoint=self._endpoint,
            directory=str(self._directory),
            style=style,
            transport=transport,
            fields=names,
            hands=rng.randint(2, 4),
            lease=self._lease,
            since=self._since,
            deposits=self._deposits,
            rank=PAIR_SLOTS.index(slot) if slot in PAIR_SLOTS else None,
        )
