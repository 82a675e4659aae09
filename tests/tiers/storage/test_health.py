"""Trouble of a tier: its text, and how often it is logged."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvtier.tiers.storage.health import TierHealth


def test_texts_that_differ_each_time_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per kind of work and ten seconds; the next has the number left out.

    `trouble` is the last text.
    """
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = SimpleNamespace(name="t", last_error=None)
    health = TierHealth(tier)  # type: ignore[arg-type]
    for number in range(100):
        health.report("store", f"cannot store block {number}")
        health.report("load", "cannot load")
        assert tier.last_error == f"cannot store block {number}; cannot load"
    now += 10
    health.report("store", None)
    assert tier.last_error == "cannot load"
    health.report("store", "cannot store at all")
    health.report("store", None)
    health.report("store", "cannot store again")
    assert tier.last_error == "cannot load; cannot store again"
    assert caplog.messages == [
        "tier t: cannot store block 0",
        "tier t: cannot load",
        "tier t: cannot store at all (99 more about store were not logged)",
    ]
