"""The proxy of examples/disagg_proxy in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_server import EngineServer
from harness.polling import polls
from harness.ports import ReservedPort

__all__ = ["ProxyProcess"]

_PROGRAM = Path(__file__).parents[3] / "examples" / "disagg_proxy"
START_SECONDS = 240.0


class ProxyProcess:
    """In front of these engines, always at the same port.

    It probes an engine that decodes once in that one's life.
    """

    def __init__(
        self, folder: Path, prefill: Sequence[EngineServer], decode: Sequence[EngineServer], *flags: str
    ) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._prefill, self._decode = tuple(prefill), tuple(decode)
        self._log = folder / f"proxy{self.port}.log"
        self._flags = ["--port", str(self.port), "--check-interval", "0.5", "--probe-interval", "86400"]
        self._flags += ["--entry-ttl", "7000", *flags]
        self._flags += [part for engine in prefill for part in ("--prefill", engine.url)]
        self._flags += [part for engine in decode for part in ("--decode", engine.url)]
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts it; `wait_ready` waits until it can serve."""
        with self._log.open("ab") as log:
            self._child = subprocess.Popen([sys.executable, _PROGRAM, *self._flags], stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Waits until it has checked and probed all running engines; then it sends no probes."""
        up = {engine.url for engine in (*self._prefill, *self._decode) if engine.is_running}
        known = {engine.url: engine.engine_id for engine in self._decode if engine.is_running}
        for _ in polls(START_SECONDS, 0.1):
            health = self._health()
            engines = [*health.get("prefill", ()), *health.get("decode", ())]
            found = {engine["url"] for engine in engines if engine["up"]}
            names = {engine["url"]: engine.get("engine_id") for engine in engines if engine["url"] in known}
            if found == up and names.items() >= known.items():
                return
            assert self.is_running, self.log
        raise AssertionError(f"{health}\n{self.log}")

    def end(self) -> None:
        """Kills it and releases its port."""
        self.kill()
        self._reserved.close()

    def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait(START_SECONDS)

    @property
    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def _health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                health: dict[str, Any] = json.load(answer)
                return health
        except OSError:
            return {}
