"""Parts of the stress run: choices drawn from a seed, and detection of damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from harness.payloads import filled

from stress.chaos import SLOTS, SURVIVORS, FaultKind, kill_of, timeline
from stress.durable_ledger import DepositPlan, DurableLedger, Journal
from stress.plan import Plan, rounds_of
from stress.result_log import ResultLog
from stress.server_runs import StressServer
from stress.shape import DATASETS, MIB, difference
from stress.watch import Watch


@pytest.mark.parametrize("seconds", [10, 600])
def test_the_timeline_follows_from_the_seed(seconds: float) -> None:
    """Equal seeds give equal faults, in order and before the end.

    Survivors have none, and every kind occurs.
    """
    faults = timeline(7, seconds)
    assert faults == timeline(7, seconds) != timeline(8, seconds)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert all(0 < fault.at < seconds for fault in faults)
    assert {fault.slot for fault in faults if fault.kind is FaultKind.KILL_CLIENT} <= set(range(SURVIVORS, SLOTS))
    kinds = {fault.kind for seed in range(20) for fault in timeline(seed, seconds)}
    assert kinds == set(FaultKind) - {FaultKind.KILL_START}


def test_the_kills_follow_from_the_seed() -> None:
    """Each kill of a torture run depends on seed and number only; some starts are killed."""
    kills = [kill_of(7, number) for number in range(200)]
    assert kills[150] == kill_of(7, 150) != kill_of(8, 150)
    assert len({kill.seconds for kill in kills}) == 200
    starts = [share for kill in kills for share in kill.starts]
    assert 20 < len(starts) < 200
    assert min(starts) < 0.2
    assert max(starts) > 1


def test_the_rounds_of_a_torture_run() -> None:
    """Together they have the asked kills and acknowledgements; the tiers take turns."""
    rounds = rounds_of(7, 1000, 180_000, None, warm=None)
    assert sum(plan.kills for plan in rounds) == 1000
    assert sum(plan.acknowledgements for plan in rounds) == 180_000
    assert {(plan.large, plan.warm) for plan in rounds[:4]} == {
        (large, warm) for large in ("lmdb", "disk") for warm in (False, True)
    }
    assert len({plan.seed for plan in rounds}) == len(rounds) > 1
    assert [plan.kills for plan in rounds_of(7, 30, 60, "disk", warm=False)] == [30]


def test_the_last_server_lives_long() -> None:
    """Long enough for a verdict on its memory."""
    ends = [fault.at for fault in timeline(7, 600) if fault.kind in (FaultKind.KILL_SERVER, FaultKind.END_SERVER)]
    assert len(ends) > 10
    assert 600 - ends[-1] == 360


def test_damage_is_seen(tmp_path: Path) -> None:
    """One bit, one byte, and the bytes of another block, namespace or rank are detected."""
    field, other = DATASETS["mixed"], DATASETS["twin"]
    key, neighbour = field.keys(1, 0, 3)[::2]
    right = field.payload(key, 0)
    flipped = right.copy()
    flipped[-1] ^= 1
    found = [right, flipped, filled(1, right.nbytes)[0], field.payload(neighbour, 0), other.payload(key, 0)]
    result_log = ResultLog(tmp_path / "lines")
    result_log.check(field, [key] * 6, [*found, field.payload(key, 1)], 0, how="test")
    result_log.close()
    assert (tmp_path / "lines").read_text().count('"kind": "wrong"') == 5
    assert [bool(difference(right, part)) for part in found] == [False, True, True, True, True]
    assert difference(right, filled(1, right.nbytes)[0])["untouched"]
    assert np.array_equal(right, field.payload(key, 0))


PLAN = DepositPlan(per_second=1e9, most=100, batch=1)


def test_deposits_outlive_their_process(tmp_path: Path) -> None:
    """Other processes read the records; a line truncated by SIGKILL is ignored."""
    durable_ledger = DurableLedger(tmp_path, "3-4", PLAN)
    durable_ledger.acknowledged([0, 2])
    durable_ledger.close()
    with (tmp_path / "3-4.durable_ledger").open("a") as file:
        file.write("7")
    assert Journal(tmp_path).read().done == [("3", 0), ("3", 2)]
    heir = DurableLedger(tmp_path, "3-5", PLAN)
    assert sorted(heir.some(random.Random(1), 9)) == [0, 2]
    with heir.deposit(random.Random(1)) as numbers:
        assert list(numbers) == [3]
    heir.close()


def test_a_deposit_is_recorded_before_it_is_stored(tmp_path: Path) -> None:
    """A reader of the journal sees what is begun, then what is acknowledged, and each line once."""
    journal, rng = Journal(tmp_path), random.Random(1)
    durable_ledger = DurableLedger(tmp_path, "2-2", PLAN)
    for number in range(3):
        with durable_ledger.deposit(rng) as numbers:
            assert journal.read().intended == {"2": number + 1}
            durable_ledger.acknowledged(numbers)
        assert journal.read().done == [("2", done) for done in range(number + 1)]
    durable_ledger.close()


def test_a_deposit_without_acknowledgement_is_repeated(tmp_path: Path) -> None:
    """So a server that cannot be reached uses up no numbers."""
    durable_ledger, rng = DurableLedger(tmp_path, "2-2", PLAN), random.Random(1)
    with pytest.raises(ConnectionError), durable_ledger.deposit(rng):
        raise ConnectionError
    with durable_ledger.deposit(rng) as numbers:
        assert list(numbers) == [0]
        durable_ledger.acknowledged(numbers)
    with durable_ledger.deposit(rng) as numbers:
        assert list(numbers) == [1]
    durable_ledger.close()


def test_only_the_small_tier_may_have_no_room(tmp_path: Path) -> None:
    """The log of the server may say so. The same error of the large tier is one."""
    errors = ["tier disk: cannot store: the index is full", "tier lmdb: cannot store: MDB_MAP_FULL"]
    (tmp_path / "log").write_text("".join(f'{{"level": "error", "event": "{error}"}}\n' for error in errors))
    for large, expected in (("lmdb", errors[1]), ("disk", errors[0])):
        server = StressServer(tmp_path, Plan(1, large, kills=1), MIB, Watch())
        assert list(server.logged_errors()) == [f"{expected}: "]
        server.server.close()
