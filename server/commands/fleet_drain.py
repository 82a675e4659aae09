"""Rolling drain of many servers: a few at a time, until the first failure."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...client.errors import KVTierError
from ...protos.endpoint import Endpoint
from ..printable import printable
from .admin_client import ask_status
from .console import EXIT_FAILURE, print_line
from .drain import FIGURES, Drained, drain_server, mode_of, outcome

__all__ = ["drain_fleet"]

_POLL_SECONDS = 0.1


class _StepError(Exception):
    """A server was not drained as requested; the message gives the reason in one line."""


class _Rollout:
    """Drain of all servers with the same options. Thread-safe."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stopped = threading.Event()
        """Set at the first failure: no further server is drained."""
        self._interrupted = threading.Event()
        self._print = threading.Lock()

    def interrupt(self) -> None:
        self._stopped.set()
        self._interrupted.set()

    def run(self, endpoint: Endpoint) -> dict[str, Any]:
        """Drains one server; returns its row."""
        if self._stopped.is_set():
            return self._row(endpoint, "skipped", "an earlier server failed")
        try:
            drained = self._drain(endpoint)
        except (KVTierError, _StepError) as error:
            if not self._options.undo:
                self._stopped.set()
            return self._row(endpoint, "failed", f"{error}")
        return self._row(endpoint, "undone" if self._options.undo else "drained", "", drained)

    def _drain(self, endpoint: Endpoint) -> Drained:
        mode, limits = mode_of(self._options), self._options
        before = ask_status(endpoint, limits.timeout)
        if limits.wait_engines and mode != "undo":
            try:
                self._wait_for_engines(endpoint)
            except (KVTierError, _StepError) as error:
                if mode == "stay" or before.draining:
                    raise
                raise _StepError(f"{error}; {self._undo(endpoint)}") from error
        drained = self._completed(drain_server(endpoint, mode, limits.timeout, wait=True), mode)
        if limits.wait_restart and mode == "end":
            self._wait(
                limits.wait_restart,
                lambda: _is_new(endpoint, before.epoch, limits.timeout),
                "no new server answers at its address",
            )
        return drained

    def _wait_for_engines(self, endpoint: Endpoint) -> None:
        """Drains a server without ending it, until no engine is connected."""
        limits = self._options
        self._completed(drain_server(endpoint, "stay", limits.timeout, wait=True), "stay")
        self._wait(
            limits.wait_engines,
            lambda: not ask_status(endpoint, limits.timeout).sessions,
            "engines are still connected",
        )

    def _undo(self, endpoint: Endpoint) -> str:
        """Undoes a drain that has failed; returns the state of the server in words."""
        try:
            return outcome("undo", drain_server(endpoint, "undo", self._options.timeout, wait=False))
        except KVTierError as error:
            return f"the server may still refuse new work, because undoing the drain failed: {error}"

    def _completed(self, drained: Drained, mode: str) -> Drained:
        if not drained.succeeded(mode):
            raise _StepError(outcome(mode, drained))
        return drained

    def _wait(self, seconds: float, is_over: Any, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_over():
            if time.monotonic() > deadline:
                raise _StepError(f"{problem} after {seconds:g} s")
            if self._interrupted.wait(_POLL_SECONDS):
                raise _StepError("interrupted")

    def _row(self, endpoint: Endpoint, state: str, reason: str, drained: Drained | None = None) -> dict[str, Any]:
        figures = {name: None if drained is None else getattr(drained.last, name) for name in FIGURES}
        row = {"server": f"{endpoint}", "state": state, "reason": reason, **figures}
        row["ended"] = None if drained is None else drained.ended
        if not self._options.json:
            text = reason if drained is None else outcome(mode_of(self._options), drained)
            with self._print:
                print_line(printable(f"{endpoint}: {state}: {text}"))
        return row


def drain_fleet(options: argparse.Namespace, endpoints: Sequence[Endpoint]) -> int:
    """Drains the servers in their order, or undoes their drain; returns the exit code.

    Undoing does not stop at a failure.
    """
    rollout = _Rollout(options)
    with ThreadPoolExecutor(min(options.parallel, len(endpoints))) as executor:
        futures = [executor.submit(rollout.run, endpoint) for endpoint in endpoints]
        try:
            rows = [future.result() for future in futures]
        except KeyboardInterrupt:
            rollout.interrupt()
            raise
    done = sum(row["state"] in ("drained", "undone") for row in rows)
    if options.json:
        print_line(json.dumps({"mode": mode_of(options), "servers": rows, "complete": done == len(rows)}, indent=2))
    else:
        print_line(f"{done} of {len(rows)} servers {'accept new work again' if options.undo else 'are drained'}")
    return 0 if done == len(rows) else EXIT_FAILURE


def _is_new(endpoint: Endpoint, epoch: int, timeout: float) -> bool:
    """Whether another server process accepts work at the address."""
    try:
        answer = ask_status(endpoint, timeout)
    except KVTierError:
        return False
    return answer.epoch != epoch and not answer.draining
