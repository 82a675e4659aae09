"""What the stress run is made of: choices that follow from a seed, and eyes that see damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from harness.payloads import filled

from stress.chaos import SLOTS, SURVIVORS, Kind, timeline
from stress.durable_ledger import DurableLedger, entries
from stress.shape import FIELDS, difference
from stress.tally import Tally


@pytest.mark.parametrize("seconds", [10, 600])
def test_the_timeline_follows_from_the_seed(seconds: float) -> None:
    """The same blows from the same seed, in order; none falls on a survivor or after the end, and each kind falls some time."""
    blows = timeline(7, seconds)
    assert blows == timeline(7, seconds) != timeline(8, seconds)
    assert [blow.at for blow in blows] == sorted(blow.at for blow in blows)
    assert all(0 < blow.at < seconds for blow in blows)
    assert {blow.slot for blow in blows if blow.kind is Kind.KILL_CLIENT} <= set(range(SURVIVORS, SLOTS))
    kinds = {blow.kind for seed in range(20) for blow in timeline(seed, seconds)}
    assert kinds == set(Kind)


def test_the_last_server_lives_long() -> None:
    """Long enough for its memory to be judged."""
    ends = [blow.at for blow in timeline(7, 600) if blow.kind in (Kind.KILL_SERVER, Kind.END_SERVER)]
    assert len(ends) > 10
    assert 600 - ends[-1] == 360


def test_damage_is_seen(tmp_path: Path) -> None:
    """One bit, one byte that was left alone, and the bytes of another block, namespace or rank are wrong; its own are not."""
    field, other = FIELDS["mixed"], FIELDS["twin"]
    key, neighbour = field.keys(1, 0, 3)[::2]
    right = field.payload(key, 0)
    flipped = right.copy()
    flipped[-1] ^= 1
    found = [right, flipped, filled(1, right.nbytes)[0], field.payload(neighbour, 0), other.payload(key, 0)]
    tally = Tally(tmp_path / "lines")
    tally.check(field, [key] * 6, [*found, field.payload(key, 1)], 0, how="test")
    tally.close()
    assert (tmp_path / "lines").read_text().count('"kind": "wrong"') == 5
    assert [bool(difference(right, part)) for part in found] == [False, True, True, True, True]
    assert difference(right, filled(1, right.nbytes)[0])["untouched"]
    assert np.array_equal(right, field.payload(key, 0))


def test_deposits_outlive_their_process(tmp_path: Path) -> None:
    """What was noted down is found by whoever looks; a line that was cut short by a SIGKILL is none."""
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
