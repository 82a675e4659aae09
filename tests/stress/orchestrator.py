"""Runs the whole thing: server, clients, blows, audits, and the questions at the end."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stress import final_checks
from stress.audit import Auditor
from stress.chaos import SLOTS, SURVIVORS, Blow, Kind, first_calm, timeline
from stress.client_pool import ClientPool
from stress.durable_ledger import MOST_DEPOSITS, entries
from stress.final_checks import Left
from stress.flatness import Trend, trend_of
from stress.shape import universe_bytes
from stress.site import LEASE_SECONDS, Life, Site
from stress.watch import MEASURES, Series, Watch, look_at

__all__ = ["Facts", "Orchestrator"]

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_DEPOSITS_PER_SECOND = 8.0
"""Of each client at most; fewer in a long run, so that there are new ones until the last life of the server begins."""


@dataclass
class Facts:
    """Everything that the verdict is made of."""

    seed: int
    seconds: float
    large: str
    counts: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    survivors: list[Counter[str]] = field(default_factory=list)
    """What the clients that were never killed have counted."""
    audited: int = 0
    deposits: int = 0
    missing: list[str] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    trends: dict[str, list[Trend]] = field(default_factory=dict)
    """Per process that was watched, a trend per measure."""
    series: list[Series] = field(default_factory=list)
    """What was measured, for a closer look."""
    memory_by_life: list[tuple[float, float]] = field(default_factory=list)
    """Per life of the server its seconds and its highest memory, in order."""
    complaints: Counter[str] = field(default_factory=Counter)
    fsck: int | None = None


class Orchestrator:
    """One run. Lives on the main thread: what it starts is tethered to it."""

    def __init__(self, directory: Path, seed: int, seconds: float, progress: Callable[[str], None]) -> None:
        """`progress` is told, once a second, how far it is."""
        rng = random.Random(f"{seed}:run")
        self._facts = Facts(seed, seconds, large=rng.choice(("lmdb", "disk")))
        self._watch = Watch()
        reports = directory / "reports"
        reports.mkdir()
        self._reports = reports
        self._site = Site(directory, self._facts.large, universe_bytes(SLOTS * MOST_DEPOSITS), self._watch)
        per_second = min(_DEPOSITS_PER_SECOND, MOST_DEPOSITS / first_calm(seconds))
        self._pool = ClientPool(reports, self._site.server.endpoint, seed, LEASE_SECONDS, per_second)
        self._auditor = Auditor(self._site.server.endpoint, rng)
        self._progress = progress
        self._began = 0.0
        self._looked_at = 0.0

    def run(self) -> Facts:
        """Returns what was found. What it has started has ended, whatever happens."""
        try:
            self._site.start()
            self._baseline()
            self._pool.start()
            self._began = time.monotonic()
            self._play()
            self._end()
        except AssertionError as error:  # the server did not start, or ended by itself
            self._facts.failures.append(str(error))
        finally:
            self._pool.close()
            self._site.server.close()
        self._collect()
        return self._facts

    def _baseline(self) -> None:
        """Notes what a server takes that has had a client."""
        server = self._site.server
        final_checks.fill(server, Left())
        final_checks.wait_idle(server, Left())
        self._facts.left.before = look_at(server.pid) or {}

    def _play(self) -> None:
        """Deals the blows. The clock stands still while a server starts: seconds are seconds of load."""
        for blow in timeline(self._facts.seed, self._facts.seconds):
            self._idle_until(blow.at)
            started = time.monotonic()
            self._strike(blow)
            self._began += time.monotonic() - started
        self._idle_until(self._facts.seconds)

    def _idle_until(self, at: float) -> None:
        while time.monotonic() < self._began + at:
            self._pool.wake()
            self._site.wake()
            if time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                self._look(self._looked_at - self._began)
            time.sleep(_TICK_SECONDS)

    def _look(self, seconds: float) -> None:
        assert self._site.server.alive, f"the server ended by itself:\n{self._site.server.log[-3000:]}"
        self._pool.listen()
        self._site.look()
        for slot in range(SURVIVORS):
            self._watch.sample(self._pool.members[slot].process.pid, f"client {slot}")
        totals, blows = self._pool.totals(), self._facts.blows
        self._progress(
            f"{seconds:.0f} of {self._facts.seconds:.0f} s, {totals['verified blocks']} blocks verified, "
            f"{len(self._pool.wrong)} wrong; {blows[Kind.KILL_CLIENT.value]} clients killed; server's life "
            f"{len(self._site.lives)}, {self._auditor.audited} deposits audited, {len(self._auditor.missing)} missing"
        )

    def _strike(self, blow: Blow) -> None:
        self._facts.blows[blow.kind.value] += 1
        match blow.kind:
            case Kind.KILL_CLIENT:
                self._pool.kill(blow.slot)
            case Kind.STOP_CLIENT:
                self._pool.stop(blow.slot, blow.seconds)
            case Kind.STOP_SERVER:
                self._site.stop(blow.seconds)
            case Kind.KILL_SERVER:
                self._next_life(signal.SIGKILL)
            case Kind.END_SERVER:
                self._next_life(signal.SIGTERM)

    def _next_life(self, number: signal.Signals) -> None:
        """Ends the server and starts it again; whatever was noted down before must be there then."""
        while not self._auditor.wait(_TICK_SECONDS):  # which may be for a server that was stopped
            self._pool.wake()
            self._site.wake()
        acknowledged = entries(self._reports)
        self._site.end(number)
        self._site.start()
        self._auditor.begin(acknowledged)

    def _end(self) -> None:
        """Lets the last client go, and asks the server what is left."""
        self._site.wake(at_once=True)
        self._pool.listen()
        self._site.clients_leave()
        self._pool.dismiss()
        self._auditor.wait()
        server, left = self._site.server, self._facts.left
        final_checks.wait_idle(server, left)
        left.after = look_at(server.pid) or {}
        final_checks.fill(server, left)
        self._auditor.begin(entries(self._reports), all_of_them=True)
        self._auditor.wait()
        self._site.end(signal.SIGTERM)
        self._facts.fsck, _ = final_checks.fsck(server)

    def _collect(self) -> None:
        facts = self._facts
        facts.counts = self._pool.totals()
        facts.wrong = self._pool.wrong + self._auditor.wrong
        facts.failures += self._pool.failures
        facts.lives = self._site.lives
        facts.survivors = self._pool.survivors
        facts.audited, facts.missing = self._auditor.audited, self._auditor.missing
        facts.deposits = len(entries(self._reports))
        facts.complaints = self._site.complaints()
        watched = {"server": self._watch.of("server")[:1]}
        watched |= {f"client {slot}": self._watch.of(f"client {slot}")[:1] for slot in range(SURVIVORS)}
        facts.trends = {name: _trends(name, series[0]) for name, series in watched.items() if series}
        facts.series = [series[0] for series in watched.values() if series]
        facts.memory_by_life = [_highest(series) for series in self._watch.in_order("server")]


def _trends(name: str, series: Series) -> list[Trend]:
    """Judges what should stay where it is; descriptors and threads of a server follow the number of its clients."""
    judged = MEASURES[:2] if name == "server" else MEASURES
    return [trend_of(what, series.measures[what]) for what in judged]


def _highest(series: Series) -> tuple[float, float]:
    return series.seconds, max((figure for _, figure in series.measures["memory"]), default=0.0)
