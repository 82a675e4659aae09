"""Runs server, clients, faults, audits and final checks."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from harness.polling import polls

from stress import final_checks
from stress.audit import Auditor
from stress.chaos import SLOTS, SURVIVORS, Fault, FaultKind, kill_of, timeline
from stress.client_pool import ClientPool
from stress.durable_ledger import Journal
from stress.final_checks import Leftovers
from stress.flatness import Trend, trend_of
from stress.plan import MORE_KILLS, Plan
from stress.server_runs import LEASE_SECONDS, SMALL, ServerRun, StressServer
from stress.shape import universe_bytes
from stress.watch import MEASURES, Series, Watch, measures_of

__all__ = ["Facts", "Orchestrator"]

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 1.0


@dataclass
class Facts:
    """Everything that the verdict uses."""

    plan: Plan
    seconds: float
    """Time under load."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    server_runs: list[ServerRun] = field(default_factory=list)
    survivors: list[Counter[str]] = field(default_factory=list)
    """Counters of clients that were never killed."""
    audited: int = 0
    """Acknowledged blocks that were loaded after a start, and compared bit by bit."""
    listed: int = 0
    """Acknowledged blocks that were looked for in the server's inventory after a start."""
    deposits: int = 0
    """Blocks acknowledged as durable."""
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Blocks that are present, although no client has begun to store them."""
    left: Leftovers = field(default_factory=Leftovers)
    trends: dict[str, list[Trend]] = field(default_factory=dict)
    """Per watched process, a trend per measure."""
    series: list[Series] = field(default_factory=list)
    """The measured values."""
    memory_by_run: list[tuple[float, float]] = field(default_factory=list)
    """Per run of the server its seconds and its highest memory, in order."""
    logged_errors: Counter[str] = field(default_factory=Counter)
    fsck: int | None = None
    warm_starts: int = 0
    """Starts that found blocks in the memory of the server before."""

    @property
    def kills(self) -> int:
        """SIGKILLs of the server, also while it started."""
        return self.faults[FaultKind.KILL_SERVER.value] + self.faults[FaultKind.KILL_START.value]


class Orchestrator:
    """One stress run. It must live on the main thread: its processes end with that thread."""

    def __init__(self, directory: Path, plan: Plan, progress: Callable[[str], None]) -> None:
        """`progress` is called once a second."""
        rng = random.Random(f"{plan.seed}:run")
        self._plan = plan
        self._facts = Facts(plan, plan.seconds)
        self._watch = Watch()
        reports = directory / "reports"
        reports.mkdir()
        self._journal = Journal(reports)
        everything = universe_bytes(SLOTS * plan.deposits.most)
        self._server = StressServer(directory, plan, everything, self._watch)
        server = self._server.server
        self._pool = ClientPool(reports, (server.endpoint, server.tcp), plan.seed, LEASE_SECONDS, plan.deposits)
        self._auditor = Auditor(server.endpoint, rng, reports, plan.large, SMALL[plan.large])
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
            if self._plan.kills:
                self._torture()
            else:
                self._inject_faults()
            self._end()
        except AssertionError as error:  # the server did not start, or ended by itself
            self._facts.failures.append(str(error))
        finally:
            self._pool.close()
            self._server.close()
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
        for fault in timeline(self._plan.seed, self._plan.seconds):
            self._idle_until(fault.at)
            started = time.monotonic()
            self._inject(fault)
            self._began += time.monotonic() - started
        self._idle_until(self._plan.seconds)

    def _torture(self) -> None:
        """Kills the server again and again. The clock pauses from a kill until the next start."""
        at = 0.0
        for number in count():
            if self._is_tortured():
                break
            kill = kill_of(self._plan.seed, number)
            at += kill.seconds
            self._idle_until(at)
            killed = time.monotonic()
            self._facts.faults[FaultKind.KILL_SERVER.value] += 1
            self._restart_server(signal.SIGKILL, kill.starts)
            self._began += time.monotonic() - killed
            self._facts.seconds = at

    def _is_tortured(self) -> bool:
        kills, wanted = self._facts.kills, self._plan.kills
        enough = len(self._journal.done) >= self._plan.acknowledgements or kills >= wanted * MORE_KILLS
        return kills >= wanted and enough

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
            f"{seconds:.0f}{f' of {self._plan.seconds:.0f}' if self._plan.seconds else ''} s, "
            f"{totals['verified blocks']} blocks verified, {len(self._pool.wrong)} wrong; "
            f"{self._facts.kills} kills of the server, {faults[FaultKind.KILL_CLIENT.value]} of clients; "
            f"{len(self._journal.done)} durable blocks, {self._auditor.audited} read back, "
            f"{len(self._auditor.missing)} lost, {len(self._auditor.unknown)} never stored"
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
            case FaultKind.KILL_START:
                raise AssertionError("a fault of torture runs only")

    def _restart_server(self, number: signal.Signals, killed_starts: Sequence[float] = ()) -> None:
        """Restarts the server; all blocks recorded before must then be present.

        Before that, kills it during each of `killed_starts`, after this share of a whole start.
        """
        while not self._auditor.wait(_TICK_SECONDS):  # it may wait for a stopped server
            self._pool.wake()
            self._server.wake()
        acknowledged = list(self._journal.read().done)
        self._server.end(number)
        for share in killed_starts:
            self._facts.faults[FaultKind.KILL_START.value] += 1
            self._server.kill_start(share * self._server.start_seconds)
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
        self._auditor.begin(list(self._journal.read().done), all_of_them=True)
        self._auditor.wait()
        self._server.end(signal.SIGTERM)
        self._facts.fsck, _ = final_checks.fsck(server)

    def _collect(self) -> None:
        facts = self._facts
        facts.counts = self._pool.totals()
        facts.wrong = self._pool.wrong + self._auditor.wrong
        facts.failures += self._pool.failures + self._auditor.failures
        facts.server_runs = self._server.server_runs
        facts.survivors = self._pool.survivors
        facts.audited, facts.listed = self._auditor.audited, self._auditor.listed
        facts.missing, facts.unknown = self._auditor.missing, self._auditor.unknown
        facts.deposits = len(self._journal.read().done)
        facts.logged_errors = self._server.logged_errors()
        facts.warm_starts = self._server.warm_starts
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
