"""Each check of the verdict fails if its promise is broken, and sets the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from stress.chaos import FaultKind
from stress.final_checks import Leftovers
from stress.flatness import Trend, trend_of
from stress.orchestrator import Facts
from stress.plan import Plan
from stress.server_runs import ServerRun
from stress.verdict import checks_of, passed

MIB = 1 << 20


def good() -> Facts:
    """Facts of a run without failures."""
    tiers = {name: {"evictions": 9, "hits": 9, "blocks": 9} for name in ("cpu", "disk")}
    tiers["lmdb"] = {"evictions": 0, "hits": 9, "blocks": 9}
    plan = Plan(1, "lmdb", kills=10, acknowledgements=30)
    facts = Facts(plan, 600.0, fsck=0, audited=90, listed=300, deposits=30)
    facts.counts = Counter({"verified blocks": 100, "leases shared": 5, "hand-offs read": 5})
    facts.counts.update({f"verified over {transport}": 9 for transport in ("shm", "tcp", "grpc")})
    facts.faults = Counter({FaultKind.KILL_SERVER.value: 8, FaultKind.KILL_START.value: 2})
    facts.server_runs = [
        ServerRun("a", 0.0, 20.0, None, tiers, quarantined=4096),
        ServerRun("b", 21.0, 150.0, 0, tiers),
    ]
    facts.survivors = [Counter({"epoch a": 1, "epoch b": 2}), Counter({"epoch a": 1, "epoch b": 2})]
    figures = {"descriptors": 20.0, "threads": 14.0}
    facts.left = Leftovers(slots=(512, 512), used_bytes=(32 * MIB, 32 * MIB), before=figures, after=dict(figures))
    facts.trends = {"server": [trend_of("memory", [(at, 60.0 * MIB) for at in range(400)])]}
    return facts


def test_a_good_run_passes() -> None:
    """No check fails, and each reports something."""
    checks = checks_of(good())
    assert [check for check in checks if not check.ok] == []
    assert passed(checks)


BROKEN: dict[str, tuple[str, Callable[[Facts], object]]] = {
    "wrong bytes": ("wrong blocks", lambda facts: facts.wrong.append({"key": "00"})),
    "nothing was verified": ("blocks verified", lambda facts: facts.counts.update({"verified blocks": -100})),
    "a durable block is gone": ("durable blocks lost", lambda facts: facts.missing.append("1-2 3")),
    "a block was never stored": ("never stored", lambda facts: facts.unknown.append("lmdb lists 00")),
    "there were too few kills": ("SIGKILLs", lambda facts: facts.faults.update({FaultKind.KILL_START.value: -1})),
    "there were too few deposits": ("durable acknowledgements", lambda facts: setattr(facts, "deposits", 29)),
    "a transport was not used": ("verified over tcp", lambda facts: facts.counts.pop("verified over tcp")),
    "nothing was handed over": ("hand-offs read", lambda facts: facts.counts.pop("hand-offs read")),
    "a hold is left": ("holds left", lambda facts: setattr(facts.left, "holds", 1)),
    "fsck finds damage": ("exit code of fsck", lambda facts: setattr(facts, "fsck", 1)),
    "fsck never ran": ("exit code of fsck", lambda facts: setattr(facts, "fsck", None)),
    "a tier read damage": ("damaged blocks", lambda facts: setattr(facts.server_runs[0], "mismatches", 1.0)),
    "a client raised": ("failures", lambda facts: facts.failures.append("Traceback …")),
    "a client stayed away": ("server runs without", lambda facts: facts.survivors[1].pop("epoch b")),
    "a lease is left": ("leases left", lambda facts: setattr(facts.left, "leases", 1)),
    "a store is left": ("stores left", lambda facts: setattr(facts.left, "stores", 1)),
    "bytes stay in quarantine": ("quarantined", lambda facts: setattr(facts.left, "quarantined_bytes", 1)),
    "a session is left": ("sessions left", lambda facts: setattr(facts.left, "sessions", 1)),
    "a slot is lost": ("slots", lambda facts: setattr(facts.left, "slots", (512, 511))),
    "used bytes are wrong": ("bytes in use", lambda facts: setattr(facts.left, "used_bytes", (1, 2))),
    "descriptors are left": ("descriptors of the server left", lambda facts: facts.left.after.update(descriptors=90)),
    "threads are left": ("threads of the server left", lambda facts: facts.left.after.update(threads=90)),
    "a server ended badly": ("exit codes", lambda facts: setattr(facts.server_runs[1], "exit_code", 1)),
    "a call ended INTERNAL": ("INTERNAL", lambda facts: setattr(facts.server_runs[1], "internal", 1.0)),
    "a server complained": ("server's log", lambda facts: facts.logged_errors.update(["tick failed"])),
    "the large tier evicted": (
        "tier that holds all",
        lambda facts: facts.server_runs[0].tiers["lmdb"].update(evictions=1),
    ),
    "nothing was in quarantine": ("in quarantine", lambda facts: setattr(facts.server_runs[0], "quarantined", 0)),
    "memory grew": ("memory of server", lambda facts: facts.trends.update(server=[leaking()])),
}


def leaking() -> Trend:
    """The trend of a server that leaks a page for each of a thousand calls a minute."""
    return trend_of("memory", [(at, 60.0 * MIB + at * 4096 * 1000 / 60) for at in range(400)])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_fails(name: str) -> None:
    """The matching check fails, and no other."""
    check, breaks = BROKEN[name]
    facts = good()
    breaks(facts)
    checks = checks_of(facts)
    failed = [found.name for found in checks if found.ok is False]
    assert len(failed) == 1
    assert check in failed[0]
    assert not passed(checks)
