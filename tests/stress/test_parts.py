"""Parts of the stress run: choices drawn from a seed, and detection of damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from harness.payloads import filled

from stress.chaos import SLOTS, SURVIVORS, FaultKind, timeline
from stress.durable_ledger import DurableLedger, entries
from stress.result_log import ResultLog
from stress.shape import DATASETS, difference


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
    assert kinds == set(FaultKind)


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


def test_deposits_outlive_their_process(tmp_path: Path) -> None:
    """Other processes read the records; a line truncated by SIGKILL is ignored."""
    durable_ledger = DurableLedger(tmp_path, "3-4")
    durable_ledger.acknowledged([0, 2])
    durable_ledger.close()
    with (tmp_path / "3-4.durable_ledger").open("a") as file:
        file.write("7")
    assert list(entries(tmp_path)) == [("3", 0), ("3", 2)]
    heir = DurableLedger(tmp_path, "3-5")
    assert sorted(heir.some(random.Random(1), 9)) == [0, 2]
    assert heir.fresh(2) == range(3, 5)
    heir.close()
