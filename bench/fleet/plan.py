"""The fleets that one run of the simulation compares, and the figures of each fleet."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from ..policies import read_times, read_trace
from .router import ROUTINGS
from .simulation import BLOCK_TOKENS, DESIGNS, Fleet, Settings
from .workload import SessionTrace, arrivals_of

__all__ = ["Case", "cases_of", "figures_of", "trace_of"]

SWEEP_HOSTS = 100
"""Hosts of a fleet of which one setting changes. Figures per host do not depend on it."""
CORE_HOSTS = 10
"""Hosts of a fleet whose CPU tiers are cores of kvtier, which are much slower to simulate."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet with its load."""

    part: str
    """The setting that changes, or `designs`."""
    settings: Settings
    load: float
    """Tokens of all requests per second, as a fraction of what the engines can compute."""
    seconds: float


def cases_of(base: Settings, load: float, seconds: float) -> Iterator[Case]:
    for design in DESIGNS:
        for routing in ROUTINGS:
            yield Case("designs", replace(base, design=design, routing=routing), load, seconds)
    small = replace(base, hosts=min(SWEEP_HOSTS, base.hosts))
    # The same failures per host as in the large fleet.
    small = replace(small, minutes_per_failure=base.minutes_per_failure * base.hosts / small.hosts)
    spread, sticky = replace(small, routing="round-robin"), replace(small, routing="sticky")
    routed = replace(small, routing="events")
    changes: dict[str, list[Settings]] = {
        "network": [
            replace(spread, design="peer", nic_bytes_per_second=gigabytes * 1e9)
            for gigabytes in (1.25, 3.125, 6.25, 12.5, 25)
        ],
        "store": [
            replace(spread, design="shared", store_bytes_per_second=gigabytes * 1e9)
            for gigabytes in (0.25, 0.5, 1, 2, 4)
        ],
        "store capacity": [
            replace(spread, design="shared", store_bytes_per_second=4e9, store_blocks=blocks)
            for blocks in (500, 1500, 5000)
        ],
        "admission": [
            replace(fleet, design="shared", admission=admission)
            for fleet in (spread, sticky)
            for admission in ("all", "second_use")
        ],
        "penalty": [replace(routed, penalty=penalty) for penalty in (0.05, 0.1, 0.25, 0.5, 1, 2)],
        "event delay": [replace(routed, event_delay_seconds=delay) for delay in (0, 1, 10, 60)],
        "CPU tier": [replace(sticky, cpu_blocks=blocks) for blocks in (300, 1000, 3000, 10_000)],
        "failures": [
            replace(fleet, minutes_per_failure=minutes)
            for fleet in (sticky, routed, replace(sticky, design="shared"), replace(sticky, design="peer"))
            for minutes in (0, seconds / 60 / small.hosts)  # none, or a restart of each host
        ],
        "hosts": [
            replace(routed, hosts=count, minutes_per_failure=base.minutes_per_failure * base.hosts / count)
            for count in (10, 30, 100, 300)
            if count < base.hosts
        ],
    }
    for part, fleets in changes.items():
        for fleet in fleets:
            yield Case(part, fleet, load, seconds)
    for factor in (2, 4, 8):
        for fleet in (sticky, routed, replace(routed, design="peer")):
            yield Case("load", fleet, load * factor, seconds)
    cores = replace(sticky, hosts=min(CORE_HOSTS, base.hosts), minutes_per_failure=0)
    for policy in ("lru", "forecast"):
        for blocks in (300, 1000, 3000):
            yield Case("policy", replace(cores, policy=policy, cpu_blocks=blocks), load, seconds)


@cache
def trace_of(path: Path) -> SessionTrace:
    times = read_times(path)
    if not times:
        raise ValueError(f"{path} has no timestamps")
    return SessionTrace(read_trace(path), times)


def figures_of(path: Path, case: Case) -> dict[str, object]:
    """Simulates one fleet with a trace; returns its settings and figures."""
    trace = trace_of(path)
    settings = replace(case.settings, warm_up_seconds=case.seconds / 2)
    tokens_per_request = trace.blocks / len(trace.paths) * BLOCK_TOKENS
    rate = case.load * settings.hosts * settings.prefill_tokens_per_second / tokens_per_request
    fleet = Fleet(settings)
    gc.disable()  # there are millions of tuples and no cycles
    try:
        fleet.run(arrivals_of(trace, rate, case.seconds, settings.seed))
    finally:
        gc.enable()
    counters, index = fleet.counters, fleet.index
    asked, loads = max(1, counters.asked), max(1, counters.loads)
    seconds, hosts = case.seconds - settings.warm_up_seconds, settings.hosts
    first = sorted(counters.first_token_seconds) or [0.0]
    computed, received = fleet.computed_blocks, fleet.received_bytes
    figures = {
        "requests": counters.requests,
        "hits": 1 - counters.computed / asked,
        "cpu": counters.cpu / asked,
        "shared": counters.shared / asked,
        "peer": counters.peer / asked,
        "network_bytes_per_s": counters.moved_bytes / seconds,
        "network_bytes_per_s_per_host": counters.moved_bytes / seconds / hosts,
        "most_received_bytes_per_s": max(received) / seconds,
        "written_bytes_per_s_per_host": counters.written_bytes / seconds / hosts,
        "writes_left_out": counters.writes_left_out / max(1, counters.computed),
        "slow_loads": counters.slow_loads / loads,
        "late_loads": counters.late_loads / loads,
        "events_per_s": counters.events / seconds,
        "event_keys_per_s": counters.keys / seconds,
        "index_placements": index.most_placements,
        "index_keys": index.distinct_keys(),
        "store_blocks_used": fleet.store.used,
        "busy": counters.computed * BLOCK_TOKENS / settings.prefill_tokens_per_second / seconds / hosts,
        "imbalance": max(computed) * hosts / max(1, sum(computed)),
        "first_token_p50_s": _quantile(first, 0.5),
        "first_token_p99_s": _quantile(first, 0.99),
        "failures": fleet.failures,
    }
    return {
        "trace": path.name,
        "part": case.part,
        "load": case.load,
        **_changed(settings),
        **{name: _rounded(value) for name, value in figures.items()},
    }


def _rounded(value: float) -> float:
    """Four digits, without a decimal point if there is no fraction."""
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def _changed(settings: Settings) -> dict[str, object]:
    """The settings that are not the defaults, and those that tell the designs apart."""
    default = asdict(Settings())
    named, left_out = ("hosts", "design", "routing"), ("seed", "warm_up_seconds")
    return {
        name: value
        for name, value in asdict(settings).items()
        if name in named or (value != default[name] and name not in left_out)
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
