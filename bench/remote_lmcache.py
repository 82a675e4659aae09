"""LMCache's adapters of the same stores, for the benchmarks of the shared tiers.

kvtier's tiers are compared with the L2 adapters of LMCache's server, or with a remote connector of
LMCache in the engine (`bench.peers.lmcache_adapter`). Both move the same number of blocks of the
same size between memory and the same store, in turns. Only kvtier computes and verifies checksums.
Each adapter has its default number of workers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .peers.base import PeerFailed, PeerMissing
from .peers.entries import ROOT, Entry
from .peers.process import PeerProcess
from .report import Report

__all__ = ["LMCacheAdapters", "add_ratios"]

ADAPTER = "KVTIER_BENCH_ADAPTER"
"""Environment variable that `bench.peers.lmcache_adapter` reads."""
Action = Callable[[int], float]


class LMCacheAdapters:
    """Adapters with these settings, as for `lmcache server --l2-adapter`, each in its own process.

    A remote connector has the settings `url` and `extra_config`.
    """

    def __init__(self, directory: Path, settings: Sequence[Mapping[str, Any]]) -> None:
        """The processes write to `directory`."""
        self.version = "LMCache is not measured"
        self._missing: dict[str, str] = {}
        self._directory = directory
        self._settings = settings

    @contextmanager
    def running(
        self, block_bytes: int, count: int, before: Callable[[], object] = lambda: None
    ) -> Iterator[dict[str, Action]]:
        """Yields the actions "store: NAME" and "load: NAME" of each adapter, which return seconds.

        `before` runs before each store.
        """
        with ExitStack() as running:
            actions: dict[str, Action] = {}
            for settings in self._settings:
                name, entry = _entry(settings)
                before()
                try:
                    process = running.enter_context(PeerProcess(entry, self._directory))
                    self.version = f"LMCache {self._open(process, block_bytes, count)}"
                except (PeerMissing, PeerFailed) as error:
                    self._missing.setdefault(name, f"{error}")
                else:
                    actions |= _actions(name, process, before)
            yield actions

    def show_missing(self) -> None:
        """Prints why adapters could not run."""
        for name, reason in self._missing.items():
            print(f"{name} is not measured: {reason}", flush=True)

    def _open(self, process: PeerProcess, block_bytes: int, count: int) -> str:
        """Stores and loads one batch. Returns the version of LMCache."""
        pool_bytes = 2 * block_bytes * count
        answer = process.ask(
            "start", directory=str(self._directory), capacity_bytes=0, pool_bytes=pool_bytes, apart_bytes=0
        )
        process.ask("open", block_bytes=block_bytes, fill_bytes=0, count=count)
        process.ask("round")
        return str(answer["version"])


def _entry(settings: Mapping[str, Any]) -> tuple[str, Entry]:
    kind, driver = ("adapter", "LMCacheAdapter") if "type" in settings else ("connector", "LMCacheConnector")
    name = f"LMCache, {kind} {settings.get('type') or settings['url'].partition(':')[0]}"
    python = ROOT / "build" / "lmcache" / "bin" / "python"
    variables = {ADAPTER: json.dumps(settings)}
    peer = f"bench.peers.lmcache_adapter:{driver}"
    return name, Entry(name, peer, python, "lmcache", "lmcache", variables=variables)


def _actions(name: str, process: PeerProcess, before: Callable[[], object]) -> dict[str, Action]:
    answer: dict[str, Any] = {}

    def store(_: int) -> float:
        before()
        answer.update(process.ask("round"))  # also loads the batch, and compares the bytes
        return float(answer["store"])

    return {f"store: {name}": store, f"load: {name}": lambda _: float(answer["load"])}


def add_ratios(report: Report, seconds: Mapping[str, Sequence[float]], tier: str, size: str) -> None:
    """Adds how many times faster a tier is than each of LMCache's adapters in the same rounds."""
    for name, times in seconds.items():
        action, _, adapter = name.partition(": ")
        if adapter.startswith("LMCache"):
            own = statistics.median(seconds[f"{action}: {tier}"])
            report.add(f"{action}: {tier} / {adapter}, {size}", statistics.median(times) / own, "times")
