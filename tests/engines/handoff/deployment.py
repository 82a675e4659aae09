"""A kvtier server, a prefill engine, a decode engine and a proxy, with counts of what they move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from calls import Stream, ask, question
from engine_server import EngineServer, Sources
from harness.polling import polls, wait_until
from proxy_process import ProxyProcess
from scenario import BLOCK, tokens
from server_process import ServerProcess

__all__ = ["Deployment", "Moved", "connector_config", "eventually"]

SETTLE_SECONDS = 240.0
NO_CHANGE_SECONDS = 60.0
SOON_SECONDS = 3.0
LONGEST_HOLD = 7200.0
"""So long D holds what it has after a last turn: longer than all tests take on a slow machine, for
they count what is open."""

HELD_PART = 0.9
"""Many, so that the pool is not the limit."""

DIRECTIONS = {"to_decode": "prefill_to_decode", "to_prefill": "decode_to_prefill"}
_TOTALS = ("open", "published", "declined", "claimed", "released", "expired", "dropped", "claimed_bytes")
EXTRA: dict[str, Any] = {
    "bidirectional_kv_xfer": True,
    "decoder_kv_blocks_ttl": LONGEST_HOLD,
    "kv_lease_duration": 60.0,
    "lookup_timeout_s": 60.0,
    "claim_timeout_s": 20.0,
}
"""Timeouts are long: on busy cores a timeout would look like a miss."""


@dataclass
class Moved:
    """Differences of counters: prompt tokens by source, and ends of holds by direction.

    ``pending_blocks``: blocks of holds that are not stored yet.
    ``pulled``: of the external tokens of P and of D, those that came out of a hold, as the
        connector counts them.
    """

    p: Sources = field(default_factory=lambda: Sources(0, 0, 0))
    d: Sources = field(default_factory=lambda: Sources(0, 0, 0))
    pulled: tuple[int, int] = (0, 0)
    to_decode: dict[str, int] = field(default_factory=dict)
    to_prefill: dict[str, int] = field(default_factory=dict)
    pending_blocks: int = 0

    @property
    def published(self) -> int:
        """Number of published holds, both ways."""
        return self.to_decode["published"] + self.to_prefill["published"]

    @property
    def ended(self) -> int:
        return self.published - self.to_decode["open"] - self.to_prefill["open"]

    def holds(self, direction: str) -> dict[str, int]:
        """Returns how the holds of a direction ended, without zeros."""
        return {what: count for what, count in getattr(self, direction).items() if count}


class Deployment:
    """One P, one D, one server, one proxy. `restart_stopped` restarts what a test ended.

    `flags`: more flags of both engines.
    """

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self._folder, self._settings = folder, folder / "kvtier.toml"
        self.server = ServerProcess(folder, region="96MiB", flags=["--config", str(self._settings)], long_timeout=True)
        config = connector_config(self.server.endpoint, EXTRA)
        self.p, self.d = (EngineServer(folder, name, model, config, *flags) for name in ("P", "D"))
        self.proxy = ProxyProcess(folder, [self.p], [self.d])
        self._longest_hold: float | None = None
        self._unheard: set[str] = set()

    def restart_stopped(self) -> None:
        """Starts all stopped parts and waits until they answer."""
        if self._longest_hold != LONGEST_HOLD or not self.server.is_running:
            self.restart_server()
        started = [engine for engine in (self.p, self.d) if not engine.is_running]
        for engine in started:
            engine.start()
        for engine in (self.p, self.d):
            engine.wait_ready()
        self._wait_connected(started)
        if not self.proxy.is_running:
            self.proxy.start()
        self.proxy.wait_ready()

    @contextmanager
    def proxy_of(
        self, prefill: Sequence[EngineServer], decode: Sequence[EngineServer], *flags: str
    ) -> Iterator[ProxyProcess]:
        """Runs another proxy in front of these engines."""
        proxy = ProxyProcess(self._folder, prefill, decode, *flags)
        try:
            proxy.start()
            proxy.wait_ready()
            yield proxy
        finally:
            proxy.end()

    def restart_server(self, longest_hold: float = LONGEST_HOLD) -> None:
        """Kills and restarts the server; new holds last at most this many seconds."""
        self.server.kill()
        usual = min(longest_hold, 30.0)
        self._settings.write_text(f"[handoff]\npart = {HELD_PART}\nmax = {longest_hold}\ndefault = {usual}\n")
        self.server.start()
        self._longest_hold = longest_hold
        self._wait_connected([engine for engine in (self.p, self.d) if engine.is_running])

    def _wait_connected(self, engines: Sequence[EngineServer]) -> None:
        """Waits until these engines use the server, which they avoid after a failure."""
        for engine in engines:
            eventually(partial(self._server_has_blocks, engine), f"{engine.name} tells the server nothing")

    def _server_has_blocks(self, engine: EngineServer) -> bool:
        """Whether the server has, or soon gets, all blocks that an engine holds of a request."""
        name = f"{engine.name}{time.monotonic_ns()}"
        params = {"do_remote_prefill": True, "kvtier": {"hold_as": name}}
        ask(engine.port, question(tokens(time.monotonic_ns(), BLOCK + 1), 1, kv_transfer_params=params))
        for _ in polls(SOON_SECONDS, 0.2):
            holds = [hold for hold in self.open_holds() if hold["request_id"] == name]
            if holds and not holds[0]["pending_blocks"]:
                return True
        self._unheard.add(name)  # it may be held, with blocks that never arrive
        return False

    def end(self) -> None:
        for part in (self.proxy, self.p, self.d):
            part.end()
        self.server.kill()

    def empty(self) -> None:
        """Empties the prefix caches of both engines, so that all later hits come from kvtier."""
        self.p.empty()
        self.d.empty()

    @contextmanager
    def watch(self, *, p: int = 1, d: int = 1, published: int = 0, ended: int = 0) -> Iterator[Moved]:
        """Counts what moves while this many requests, publications and holds end.

        Engines tell the server, and save blocks, after they have answered. Where fewer do, it waits
        in vain, and the counts say so.
        """
        moved, before, earlier = Moved(), self._counts(), self._ended()
        yield moved
        expected = (earlier[0] + p, earlier[1] + d)
        eventually(lambda: self._ended() == expected, lambda: f"{self._ended()} requests ended, not {expected}")
        for _ in polls(NO_CHANGE_SECONDS, 0.2):
            after = self._counts()
            moved.p, moved.d = after.p - before.p, after.d - before.d
            moved.pulled = after.pulled[0] - before.pulled[0], after.pulled[1] - before.pulled[1]
            moved.to_decode = {what: after.to_decode[what] - count for what, count in before.to_decode.items()}
            moved.to_prefill = {what: after.to_prefill[what] - count for what, count in before.to_prefill.items()}
            if moved.published >= published and moved.ended >= ended and not after.pending_blocks:
                return

    def wait_for_decodes(self) -> None:
        """Waits until P holds nothing: a hold without a decode would expire while counting."""
        eventually(lambda: not self.totals("to_decode")["open"], "a prompt without decode is still held")

    def totals(self, direction: str) -> dict[str, int]:
        """Returns counts of the ends of a direction's holds since the server's start."""
        return _totals(self.server.handoffs())[direction]

    def open_holds(self) -> list[dict[str, Any]]:
        holds: list[dict[str, Any]] = self.server.handoffs()["handoffs"]
        return holds

    def leftovers(self) -> dict[str, int]:
        """Returns what an idle server does not have: each is 0, except D's holds after a turn."""
        status, totals = self.server.status(), _totals(self.server.handoffs())
        held = {direction: counts["open"] for direction, counts in totals.items()}
        return {name: int(status[name]) for name in ("leases", "stores", "quarantined_bytes")} | held

    def assert_idle(self, to_prefill: int | None = None) -> None:
        """Asserts that engines and server are idle, except for this many holds of D (None: any)."""
        expected = {"leases": 0, "stores": 0, "quarantined_bytes": 0, "to_decode": 0}
        if to_prefill is not None:
            expected["to_prefill"] = to_prefill
        eventually(
            lambda: self.leftovers().items() >= expected.items(),
            lambda: f"left: {self.leftovers()}, expected: {expected}",
        )
        for engine in (self.p, self.d):
            eventually(engine.is_idle, f"{engine.name} is busy")
            engine.empty()  # refused while one of its blocks is in use

    def abort_answer(self, body: dict[str, Any]) -> None:
        """Asks the proxy, and closes the connection in the middle of the answer.

        Asserts that P's hold has ended, and that D holds nothing of the incomplete answer.
        """
        held_before = self.totals("to_prefill")["open"]
        aborted = self.d.log.count("Aborted request")
        with self.watch(d=0, published=1, ended=1) as moved, Stream(self.proxy.port, body) as stream:
            pieces = stream.pieces()
            for _ in range(3):
                next(pieces)
            stream.disconnect()
            self.d.wait_logged("Aborted request", aborted + 1)
        assert moved.to_decode["released"] == 1
        assert moved.holds("to_prefill") == {}
        self.assert_idle(to_prefill=held_before)

    def _ended(self) -> tuple[int, int]:
        p, d = (int(sum(engine.ended().values())) if engine.is_running else 0 for engine in (self.p, self.d))
        return p, d

    def _counts(self) -> Moved:
        sources = [engine.sources() if engine.is_running else Sources(0, 0, 0) for engine in (self.p, self.d)]
        pulled = [engine.pulled() if engine.is_running else 0 for engine in (self.p, self.d)]
        handoffs = self.server.handoffs()
        holds = [hold for hold in handoffs["handoffs"] if hold["request_id"] not in self._unheard]
        totals, pending = _totals(handoffs), sum(hold["pending_blocks"] for hold in holds)
        return Moved(*sources, (pulled[0], pulled[1]), *(totals[direction] for direction in DIRECTIONS), pending)


def _totals(handoffs: dict[str, Any]) -> dict[str, dict[str, int]]:
    rows = {row["direction"]: row for row in handoffs["totals"]}
    return {name: {what: int(rows.get(row, {}).get(what, 0)) for what in _TOTALS} for name, row in DIRECTIONS.items()}


def connector_config(endpoint: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the `kv_transfer_config` of both engines: they save, load, hold and pull."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "long_timeout_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


def eventually(is_so: Callable[[], bool], otherwise: str | Callable[[], str]) -> None:
    """Waits until a condition holds; fails with `otherwise`."""
    wait_until(is_so, SETTLE_SECONDS, otherwise=otherwise, interval=0.1)
