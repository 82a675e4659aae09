"""Changes per medium, computed from responses of `WatchEvents`."""

from __future__ import annotations

from typing import Any

from kvtier.client.events import BlockFollower
from kvtier.protos.v1 import common_pb2, events_pb2

STORED = events_pb2.BLOCK_EVENT_KIND_STORED
REMOVED = events_pb2.BLOCK_EVENT_KIND_REMOVED
CLEARED = events_pb2.BLOCK_EVENT_KIND_CLEARED
LIVE, BEGIN, CONTINUE, END = (
    events_pb2.REPLAY_PHASE_UNSPECIFIED,
    events_pb2.REPLAY_PHASE_BEGIN,
    events_pb2.REPLAY_PHASE_CONTINUE,
    events_pb2.REPLAY_PHASE_END,
)


def response(phase: Any, *events: tuple[Any, str, str], cursor: int | None = None) -> events_pb2.WatchEventsResponse:
    """A response; each event is kind, tier, and one letter per key."""
    made = events_pb2.WatchEventsResponse(
        phase=phase,
        events=[
            events_pb2.BlockEvent(
                kind=kind,
                tier=tier,
                medium="CPU" if tier == "cpu" else "STORAGE",
                keys=common_pb2.PackedKeys(keys=keys.encode(), key_bytes=1 if keys else 0),
            )
            for kind, tier, keys in events
        ],
    )
    if cursor is not None:
        made.cursor.sequence = cursor
    return made


def changes(follower: BlockFollower, *args: Any, cursor: int | None = None) -> list[str]:
    """Applies a response; returns texts such as `+CPU ab`."""
    return spelled(follower.apply(response(*args, cursor=cursor)))


def spelled(found: Any) -> list[str]:
    return [
        f"{'+' if change.stored else '-'}{change.medium} {''.join(sorted(key.decode() for key in change.keys))}"
        for change in found
    ]


def test_a_replay_reports_only_differences() -> None:
    """B6.7 After a restart, what was lost is removed, and what the disk kept is not repeated."""
    follower = BlockFollower()
    assert changes(follower, BEGIN) == []
    assert follower.cursor is None
    assert changes(follower, CONTINUE, (STORED, "cpu", "abc"), (STORED, "lmdb", "ab")) == ["+CPU abc", "+STORAGE ab"]
    assert changes(follower, END, cursor=3) == []
    assert follower.cursor is not None
    assert follower.cursor.sequence == 3
    assert changes(follower, LIVE, (REMOVED, "cpu", "a"), cursor=4) == ["-CPU a"]
    changes(follower, BEGIN)
    assert changes(follower, CONTINUE, (STORED, "lmdb", "bd")) == ["+STORAGE d"]
    assert changes(follower, END, cursor=9) == ["-CPU bc", "-STORAGE a"]
    assert changes(follower, LIVE, (CLEARED, "lmdb", "")) == ["-STORAGE bd"]


def test_a_replay_that_begins_again_keeps_what_is_known() -> None:
    """B6.6 A replay may be interrupted; nothing is stored twice or removed twice."""
    follower = BlockFollower()
    changes(follower, BEGIN)
    changes(follower, END, (STORED, "cpu", "ab"))
    changes(follower, BEGIN)
    assert changes(follower, CONTINUE, (STORED, "cpu", "ac")) == ["+CPU c"]
    assert changes(follower, BEGIN) == []
    assert changes(follower, CONTINUE, (STORED, "cpu", "c")) == []
    assert changes(follower, CONTINUE, (REMOVED, "cpu", "c")) == ["-CPU c"]
    assert changes(follower, END) == ["-CPU ab"]


def test_two_tiers_of_a_medium_count_as_one() -> None:
    """B6.6 A block on two disks is stored once, and removed when both have removed it."""
    follower = BlockFollower()
    assert changes(follower, BEGIN, (STORED, "lmdb", "a"), (STORED, "disk", "ab")) == ["+STORAGE a", "+STORAGE b"]
    assert changes(follower, END, (REMOVED, "lmdb", "a")) == []
    assert changes(follower, LIVE, (REMOVED, "disk", "a")) == ["-STORAGE a"]


def test_a_lost_server_holds_nothing() -> None:
    """B6.7 Everything known is removed once, also in the middle of a replay."""
    follower = BlockFollower()
    changes(follower, BEGIN)
    changes(follower, END, (STORED, "cpu", "ab"), cursor=2)
    changes(follower, BEGIN)
    changes(follower, CONTINUE, (STORED, "cpu", "a"))
    assert sorted("".join(spelled(follower.lost())).replace("-CPU ", "")) == ["a", "b"]
    assert follower.lost() == []
    assert follower.cursor is None
