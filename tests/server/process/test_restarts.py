"""Restarts of child processes: growing delays, causes, and the downgrades until the next start."""

from __future__ import annotations

import socket

import pytest

from kvtier.server.process import child as child_module
from kvtier.server.process.child import Restarts
from kvtier.server.process.child_main import Channel
from kvtier.server.telemetry.downgrades import Downgrades

REMEDIES = {"": "see the log", "accept": "more open files"}


async def test_a_child_is_restarted_after_each_end_and_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The downgrade names the cause of the last end, until the next child serves."""
    slept: list[float] = []
    shown: list[list[tuple[str, str]]] = []
    lives = iter([None, OSError("no memory"), RuntimeError("no thread"), ValueError("invalid"), KeyError("a defect")])
    downgrades = Downgrades()
    restarts = Restarts("a child", "events", REMEDIES, downgrades)

    async def live() -> None:
        shown.append([(each.cause, each.remedy) for each in downgrades.all()])
        restarts.serves()
        assert not downgrades.all()
        if (error := next(lives)) is not None:
            raise error

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(child_module.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="a defect"):
        await restarts.run(live, lambda seconds: f"absent for {seconds > 0}", most=200.0, good=60.0)
    assert [cause for [(cause, _)] in shown[1:]] == [
        "absent for True: it ended",
        "absent for True: no memory",
        "absent for True: no thread",
        "absent for True: invalid",
    ]
    assert {remedy for [(_, remedy)] in shown[1:]} == {"see the log"}
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=1e-6)


def test_a_child_reports_a_cause_once_until_it_changes_or_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Each report reaches the downgrades of the server; a message of another kind does not."""
    ours, theirs = socket.socketpair()
    downgrades = Downgrades()
    restarts = Restarts("a child", "events", REMEDIES, downgrades)
    child, server = Channel(theirs), Channel(ours)
    for cause in ("", "full", "full", "fuller", "", ""):
        child.slower("accept", cause)
    theirs.close()
    child.slower("accept", "the server has ended, so this raises nothing")
    causes = []
    with ours:
        for header, _ in server:
            assert restarts.take(header)
            causes.append([(each.cause, each.remedy) for each in downgrades.all()])
    assert causes == [[("full", "more open files")], [("fuller", "more open files")], []]
    assert caplog.messages[:2] == ["full", "fuller"]
    assert not restarts.take({"op": "done"})


@pytest.mark.parametrize("subject", [None, "unknown", ["accept"], {}])
def test_a_report_about_an_unknown_subject_is_an_invalid_message(subject: object) -> None:
    """Then the child is killed, as after any other invalid message."""
    downgrades = Downgrades()
    with pytest.raises(ValueError, match="not a subject"):
        Restarts("a child", "events", REMEDIES, downgrades).take({"slower": "why", "subject": subject})
    assert not downgrades.all()
