"""The verdict: one check per promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stress.flatness import SHORTEST_SECONDS, TOLERANCE, WARM_UP_SECONDS, Trend
from stress.orchestrator import Facts
from stress.shape import MIB

__all__ = ["Check", "checks_of", "passed", "to_json"]

SETTLED_SECONDS = 6.0
"""A client must have reconnected in each run of the server that was longer than this plus stops."""
LONG_RUN_SECONDS = 120.0
"""In a run longer than this every event of the load must have occurred."""
FEW = 12
"""Growth of descriptors or threads that is not a leak, but pools of gRPC and asyncio.

A leak would add one per kill.
"""


@dataclass(frozen=True)
class Check:
    """One promise: the value found and the value required; `ok` is None without a verdict."""

    name: str
    found: str
    wanted: str
    ok: bool | None
    note: str = ""


def checks_of(facts: Facts) -> list[Check]:
    return [
        *_asked(facts),
        *_bytes(facts),
        *_clients(facts),
        *_left(facts),
        *_server(facts),
        *_load(facts),
        *_memory(facts),
    ]


def passed(checks: Sequence[Check]) -> bool:
    return all(check.ok is not False for check in checks)


def to_json(facts: Facts, checks: Sequence[Check]) -> dict[str, Any]:
    """Everything for machines, including the dataclasses."""
    return {"ok": passed(checks), "checks": checks, "facts": facts}


def _asked(facts: Facts) -> Iterator[Check]:
    """Whether a torture run was long enough to show what it was asked to show."""
    asked = {
        "SIGKILLs of the server": (facts.kills, facts.plan.kills),
        "durable acknowledgements": (facts.deposits, facts.plan.acknowledgements),
    }
    for name, (number, wanted) in asked.items():
        if wanted:
            yield Check(name, str(number), f">= {wanted}", number >= wanted)

    if facts.plan.warm:
        ended = len(facts.server_runs) - 1
        yield Check("warm starts with blocks", str(facts.warm_starts), f"> 0 of {ended}", facts.warm_starts > 0)


def _none(name: str, number: float, note: str = "") -> Check:
    return Check(name, f"{number:g}", "0", number == 0, note)


def _bytes(facts: Facts) -> Iterator[Check]:
    blocks, nbytes = facts.counts["verified blocks"], facts.counts["verified bytes"]
    yield _none("wrong blocks", len(facts.wrong), f"of {blocks} loaded by clients ({nbytes >> 20} MiB)")
    yield Check("blocks verified", str(blocks), "> 0", blocks > 0)
    yield _none("blocks present that were never stored", len(facts.unknown), "in inventories and lookups after starts")
    note = f"{facts.deposits} acknowledged; after starts {facts.listed} looked for and {facts.audited} read back"
    yield _none("durable blocks lost", len(facts.missing), note)
    yield _none("damaged blocks, as servers saw them", sum(run.mismatches for run in facts.server_runs))
    yield Check("exit code of fsck", str(facts.fsck), "0", facts.fsck == 0)


def _clients(facts: Facts) -> Iterator[Check]:
    yield _none("failures", len(facts.failures), "exceptions that no client may see, hangs, ends by themselves")
    server_runs = [run for run in facts.server_runs if run.seconds > SETTLED_SECONDS]
    away = sum(not counts[f"epoch {run.epoch}"] for run in server_runs for counts in facts.survivors)
    yield _none("server runs without an answer for a survivor", away, f"of {len(server_runs) * len(facts.survivors)}")


def _left(facts: Facts) -> Iterator[Check]:
    left = facts.left
    for what in ("leases", "holds", "stores", "quarantined_bytes", "sessions"):
        yield _none(
            f"{what.replace('_', ' ')} left", getattr(left, what), f"{left.seconds:.1f} s after the last client"
        )
    slots, filled = left.slots
    yield Check("slots that can be filled at once", str(filled), str(slots), filled == slots > 0)
    wanted, used = left.used_bytes
    yield Check("bytes in use then", str(used), str(wanted), used == wanted)
    for what in ("descriptors", "threads"):
        before, after = left.before.get(what, 0), left.after.get(what, 0)
        ok = 0 < after <= before + FEW if before else False
        yield Check(f"{what} of the server left", f"{after:g}", f"<= {before:g} + {FEW}", ok)


def _server(facts: Facts) -> Iterator[Check]:
    ended = [run.exit_code for run in facts.server_runs if run.exit_code is not None]
    yield _none("exit codes of SIGTERM other than 0", sum(map(bool, ended)), f"of {len(ended)}")
    yield _none("calls answered INTERNAL", sum(run.internal for run in facts.server_runs))
    yield _none("errors in the server's log", sum(facts.logged_errors.values()))


def _load(facts: Facts) -> Iterator[Check]:
    """Whether the load was heavy enough: without evictions a run shows little."""
    lost = sum(run.tiers.get(facts.plan.large, {}).get("evictions", 0) for run in facts.server_runs)
    yield _none("evictions of the tier that holds all", lost, facts.plan.large)
    small = "disk" if facts.plan.large == "lmdb" else "lmdb"
    happened = {
        "evictions of the CPU tier": _sum(facts, "cpu", "evictions"),
        f"evictions of the small tier ({small})": _sum(facts, small, "evictions"),
        "promotions from the LMDB tier": _sum(facts, "lmdb", "hits"),
        "promotions from the disk tier": _sum(facts, "disk", "hits"),
        "most bytes in quarantine": max((run.quarantined for run in facts.server_runs), default=0),
        "deposits acknowledged": facts.deposits,
        "leases shared by two ranks": facts.counts["leases shared"],
        "hand-offs read": facts.counts["hand-offs read"],
        **{f"blocks verified over {name}": facts.counts[f"verified over {name}"] for name in ("shm", "tcp", "grpc")},
    }
    for name, number in happened.items():
        yield Check(name, str(number), "> 0", number > 0 if facts.seconds >= LONG_RUN_SECONDS else None)


def _sum(facts: Facts, tier: str, what: str) -> int:
    return sum(run.tiers.get(tier, {}).get(what, 0) for run in facts.server_runs)


def _memory(facts: Facts) -> Iterator[Check]:
    for process, trends in facts.trends.items():
        for trend in trends:
            yield _flat(process, trend)


def _flat(process: str, trend: Trend) -> Check:
    unit, name = (MIB, " MiB") if trend.what in ("memory", "shared") else (1, "")
    tolerance = TOLERANCE[trend.what].most(trend.seconds) / unit
    if trend.flat is None:
        note = f"not judged: needs {WARM_UP_SECONDS:g} s to warm up, and then {SHORTEST_SECONDS:g}"
    else:
        note = f"slope over {trend.seconds:.0f} s, at a level of {trend.level / unit:.1f}{name}"
    found = f"{trend.per_minute / unit:+.2f}{name}/min"
    return Check(f"{trend.what} of {process}", found, f"<= {tolerance:.2g}{name}/min", trend.flat, note)
