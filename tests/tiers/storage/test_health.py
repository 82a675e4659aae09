"""What is wrong with a tier: what it says, and how often that is logged."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvtier.tiers.storage.health import TierHealth


def test_texts_that_differ_each_time_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per kind of work and ten seconds, and the next says how many were left out; `trouble` is always the last."""
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = SimpleNamespace(name="t", trouble=None)
    troubles = TierHealth(tier)  # type: ignore[arg-type]
    for number in range(100):
        troubles.note("store", f"cannot store block {number}")
        troubles.note("load", "cannot load")
        assert tier.trouble == f"cannot store block {number}; cannot load"
    now += 10
    troubles.note("store", None)
    assert tier.trouble == "cannot load"
    troubles.note("store", "cannot store at all")
    troubles.note("store", None)
    troubles.note("store", "cannot store again")
    assert tier.trouble == "cannot load; cannot store again"
    assert caplog.messages == [
        "tier t: cannot store block 0",
        "tier t: cannot load",
        "tier t: cannot store at all (99 more about store were not logged)",
    ]
