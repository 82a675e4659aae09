"""Runs server, clients, faults, audits and final checks."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.polling import polls

from stress import final_checks
from stress.audit import Auditor
from stress.chaos import SLOTS, SURVIVORS, Fault, FaultKind, last_run_start, timeline
from stress.client_pool import ClientPool
from stress.durable_ledger import MOST_DEPOSITS, entries
from stress.final_checks import Leftovers
from stress.flatness import Trend, trend_of
from stress.server_runs import LEASE_SECONDS, ServerRun, StressServer
from stress.shape import universe_bytes
from stress.watch import MEASURES, Series, Watch, measures_of

__all__ = ["Facts", "Orchestrator"]

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_DEPOSITS_PER_SECOND = 8.0
"""Of each client at most; fewer in a long run, so that deposits continue until the last run."""


@dataclass
class Facts:
    """Everything that the verdict uses."""

    seed: int
    seconds: float
    large: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    server_runs: list[ServerRun] = field(default_factory=list)
    survivors: list[Counter[str]] = field(default_factory=list)
    """Counters of clients that were never killed."""
    audited: int = 0
    deposits: int = 0
    missing: list[str] = field(default_factory=list)
    left: Leftovers = field(default_factory=Leftovers)
    trends: dict[str, list[Trend]] = field(default_factory=dict)
    """Per watched process, a trend per measure."""
    series: list[Series] = field(default_factory=list)
    """The measured values."""
    memory_by_run: list[tuple[float, float]] = field(default_factory=list)
    """Per run of the server its seconds and its highest memory, in order."""
    logged_errors: Counter[str] = field(default_factory=Counter)
    fsck: int | None = None


class Orchestrator:
    """One stress run. It must live on the main thread: its processes end with that thread."""

    def __init__(self, directory: Path, seed: int, seconds: float, progress: Callable[[str], None]) -> None:
        """`progress` is called once a second."""
        rng = random.Random(f"{seed}:run")
        self._facts = Facts(seed, seconds, large=rng.choice(("lmdb", "disk")))
        self._watch = Watch()
        reports = directory / "reports"
        reports.mkdir()
        self._reports = reports
        self._server = StressServer(directory, self._facts.large, universe_bytes(SLOTS * MOST_DEPOSITS), self._watch)
        per_second = min(_DEPOSITS_PER_SECOND, MOST_DEPOSITS / last_run_start(seconds))
        self._pool = ClientPool(reports, self._server.server.endpoint, seed, LEASE_SECONDS, per_second)
        self._auditor = Auditor(self._server.server.endpoint, rng)
        self._progress = progress
        self._began = 0.0
        self._looked_at = 0.0

    def run(self) -> Facts:
        """Returns the facts; all started processes have ended."""
        try:
            self._server.start()
            self._baseline()
            self._pool.start()
            self._began = time.monotonic()
            self._inject_faults()
            self._end()
        except AssertionError as error:  # the server did not start, or ended by itself
            self._facts.failures.append(str(error))
        finally:
            self._pool.close()
            self._server.server.close()
        self._collect()
        return self._facts

    def _baseline(self) -> None:
        """Records the descriptors and threads of a server after one client."""
        server = self._server.server
        final_checks.fill(server, Leftovers())
        final_checks.wait_idle(server, Leftovers())
        self._facts.left.before = measures_of(server.pid) or {}

    def _inject_faults(self) -> None:
        """Injects the faults.

        The clock pauses while a server starts: seconds are seconds of load.
        """
        for fault in timeline(self._facts.seed, self._facts.seconds):
            self._idle_until(fault.at)
            started = time.monotonic()
            self._inject(fault)
            self._began += time.monotonic() - started
        self._idle_until(self._facts.seconds)

    def _idle_until(self, at: float) -> None:
        for _ in polls(self._began + at - time.monotonic(), _TICK_SECONDS):
            self._pool.wake()
            self._server.wake()
            if time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                self._look(self._looked_at - self._began)

    def _look(self, seconds: float) -> None:
        assert self._server.server.alive, f"the server ended by itself:\n{self._server.server.log[-3000:]}"
        self._pool.read_outputs()
        self._server.look()
        for slot in range(SURVIVORS):
            self._watch.sample(self._pool.processes[slot].popen.pid, f"client {slot}")
        totals, faults = self._pool.totals(), self._facts.faults
        self._progress(
            f"{seconds:.0f} of {self._facts.seconds:.0f} s, {totals['verified blocks']} blocks verified, "
            f"{len(self._pool.wrong)} wrong; {faults[FaultKind.KILL_CLIENT.value]} clients killed; "
            f"server run {len(self._server.server_runs)}, {self._auditor.audited} deposits audited, "
            f"{len(self._auditor.missing)} missing"
        )

    def _inject(self, fault: Fault) -> None:
        self._facts.faults[fault.kind.value] += 1
        match fault.kind:
            case FaultKind.KILL_CLIENT:
                self._pool.kill(fault.slot)
            case FaultKind.STOP_CLIENT:
                self._pool.stop(fault.slot, fault.seconds)
            case FaultKind.STOP_SERVER:
                self._server.stop(fault.seconds)
            case FaultKind.KILL_SERVER:
                self._restart_server(signal.SIGKILL)
            case FaultKind.END_SERVER:
                self._restart_server(signal.SIGTERM)

    def _restart_server(self, number: signal.Signals) -> None:
        """Restarts the server; all blocks recorded before must then be present."""
        while not self._auditor.wait(_TICK_SECONDS):  # it may wait for a stopped server
            self._pool.wake()
            self._server.wake()
        acknowledged = entries(self._reports)
        self._server.end(number)
        self._server.start()
        self._auditor.begin(acknowledged)

    def _end(self) -> None:
        """Ends the last client and checks what the server still has."""
        self._server.wake(at_once=True)
        self._pool.read_outputs()
        self._server.end_client_time()
        self._pool.end_all()
        self._auditor.wait()
        server, left = self._server.server, self._facts.left
        final_checks.wait_idle(server, left)
        left.after = measures_of(server.pid) or {}
        final_checks.fill(server, left)
        self._auditor.begin(entries(self._reports), all_of_them=True)
        self._auditor.wait()
        self._server.end(signal.SIGTERM)
        self._facts.fsck, _ = final_checks.fsck(server)

    def _collect(self) -> None:
        facts = self._facts
        facts.counts = self._pool.totals()
        facts.wrong = self._pool.wrong + self._auditor.wrong
        facts.failures += self._pool.failures
        facts.server_runs = self._server.server_runs
        facts.survivors = self._pool.survivors
        facts.audited, facts.missing = self._auditor.audited, self._auditor.missing
        facts.deposits = len(entries(self._reports))
        facts.logged_errors = self._server.logged_errors()
        watched = {"server": self._watch.of("server")[:1]}
        watched |= {f"client {slot}": self._watch.of(f"client {slot}")[:1] for slot in range(SURVIVORS)}
        facts.trends = {name: _trends(name, series[0]) for name, series in watched.items() if series}
        facts.series = [series[0] for series in watched.values() if series]
        facts.memory_by_run = [_highest(series) for series in self._watch.in_order("server")]


def _trends(name: str, series: Series) -> list[Trend]:
    """Judges measures that should be flat.

    Descriptors and threads of a server follow its clients.
    """
    judged = MEASURES[:2] if name == "server" else MEASURES
    return [trend_of(what, series.measures[what]) for what in judged]


def _highest(series: Series) -> tuple[float, float]:
    return series.seconds, max((figure for _, figure in series.measures["memory"]), default=0.0)
