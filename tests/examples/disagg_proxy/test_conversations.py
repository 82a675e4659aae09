"""Conversation table: entries, expiry and limits."""

from __future__ import annotations

import json

from disagg_proxy.conversations import Conversation, Conversations, Reuse, TakeResult
from hypothesis import given
from hypothesis import strategies as st

C1, C2, C3 = (Conversation("owner", "m", name) for name in ("c1", "c2", "c3"))
HOLD = {"remote_request_id": "r1", "remote_block_ids": [[0]]}
LATER = {"remote_request_id": "r2", "remote_block_ids": [[0]]}


def test_an_entry_is_for_one_turn() -> None:
    """B2.21 Taking it removes it."""
    entries = Conversations()
    entries.put(C1, HOLD, 0.0)
    assert entries.take(C1, 1.0) == TakeResult(Reuse.HIT, HOLD)
    assert entries.take(C1, 1.0) == TakeResult(Reuse.MISS)


def test_an_entry_lives_450_seconds() -> None:
    """B2.21 Less than D's hold (480 s); an expired entry is removed and not used."""
    entries = Conversations()
    entries.put(C1, HOLD, 100.0)
    entries.put(C2, HOLD, 100.0)
    assert entries.take(C1, 549.9).reuse is Reuse.HIT
    assert entries.take(C2, 550.0) == TakeResult(Reuse.EXPIRED)
    assert entries.take(C2, 550.0) == TakeResult(Reuse.MISS)


def test_the_latest_turn_counts_and_lives_anew() -> None:
    """A turn that ends later replaces the previous one and its expiry."""
    entries = Conversations(ttl_s=10.0)
    entries.put(C1, HOLD, 0.0)
    entries.put(C1, LATER, 9.0)
    assert len(entries) == 1
    assert entries.take(C1, 18.0) == TakeResult(Reuse.HIT, LATER)


def test_stale_entries_are_evicted_and_others_stay() -> None:
    """B2.24 `/health` calls it; it returns their number."""
    entries = Conversations(ttl_s=10.0)
    entries.put(C1, HOLD, 0.0)
    entries.put(C2, HOLD, 5.0)
    assert entries.evict(9.9) == 0
    assert entries.evict(10.0) == 1
    assert entries.take(C1, 10.0).reuse is Reuse.MISS
    assert entries.take(C2, 10.0).reuse is Reuse.HIT


def test_of_too_many_the_oldest_go() -> None:
    """The number of entries is bounded. A new turn makes its conversation the newest again."""
    entries = Conversations(max_entries=2)
    entries.put(C1, HOLD, 0.0)
    entries.put(C2, HOLD, 1.0)
    assert entries.put(C1, LATER, 2.0) == 0
    assert entries.put(C3, HOLD, 3.0) == 1
    assert [entries.take(conversation, 4.0).reuse for conversation in (C1, C2, C3)] == [
        Reuse.HIT,
        Reuse.MISS,
        Reuse.HIT,
    ]


def test_of_too_large_ones_the_oldest_go() -> None:
    """The block ids of long conversations count, until they are removed."""
    large = {"remote_block_ids": [list(range(1000))]}
    room = 2 * len(json.dumps(large)) + 1
    entries = Conversations(max_bytes=room)
    for _ in range(5):
        for conversation in (C1, C2, C3):
            entries.put(conversation, large, 0.0)
        assert len(entries) == 2
        assert entries.take(C1, 1.0).reuse is Reuse.MISS
        assert entries.take(C2, 1.0).hold == large
        assert entries.evict(500.0) == 1


def test_one_that_is_too_large_is_not_kept() -> None:
    """It does not evict the others."""
    entries = Conversations(max_bytes=100)
    entries.put(C1, {"remote_block_ids": [list(range(1000))]}, 0.0)
    assert len(entries) == 0
    entries.put(C1, HOLD, 0.0)
    assert entries.take(C1, 1.0).reuse is Reuse.HIT


def test_owners_do_not_meet() -> None:
    """Two credentials with the same id have two conversations."""
    entries = Conversations()
    entries.put(Conversation("one", "m", "c"), HOLD, 0.0)
    assert entries.take(Conversation("two", "m", "c"), 0.0).reuse is Reuse.MISS


def test_what_is_taken_is_the_takers() -> None:
    """Changing what was put or taken does not change the table."""
    entries = Conversations()
    given_hold = {"remote_block_ids": [[0]]}
    entries.put(C1, given_hold, 0.0)
    given_hold["remote_block_ids"].append([9])
    assert entries.take(C1, 0.0).hold == {"remote_block_ids": [[0]]}


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "take", "evict"]), st.sampled_from([C1, C2, C3]), st.floats(0, 8)),
        max_size=60,
    )
)
def test_any_life_is_that_of_a_plain_dictionary(steps: list[tuple[str, Conversation, float]]) -> None:
    """B2.21 Compared with a model without order and limits."""
    entries, model, now = Conversations(ttl_s=10.0), dict[Conversation, tuple[int, float]](), 0.0
    for number, (step, conversation, passed) in enumerate(steps):
        now += passed
        if step == "put":
            entries.put(conversation, {"number": number}, now)
            model[conversation] = (number, now + 10.0)
        elif step == "evict":
            over = [conversation for conversation, (_, until) in model.items() if until <= now]
            assert entries.evict(now) == len(over)
            for conversation_over in over:
                del model[conversation_over]
        else:
            expected = model.pop(conversation, None)
            taken = entries.take(conversation, now)
            if expected is None:
                assert taken == TakeResult(Reuse.MISS)
            elif expected[1] <= now:
                assert taken == TakeResult(Reuse.EXPIRED)
            else:
                assert taken == TakeResult(Reuse.HIT, {"number": expected[0]})
        assert len(entries) == len(model)
