"""Conversation table: entries, expiry and limits."""

from __future__ import annotations

import json

from disagg_proxy.conversations import MAX_TURNS, Conversation, Conversations, FoundHold, Reuse
from hypothesis import given
from hypothesis import strategies as st

C1, C2, C3 = (Conversation("owner", "m", name) for name in ("c1", "c2", "c3"))
HOLD = {"remote_request_id": "r1", "remote_block_ids": [[0]]}
LATER = {"remote_request_id": "r2", "remote_block_ids": [[0]]}


def test_branches_of_a_turn_use_its_hold() -> None:
    """B2.21 A request gets the hold of the turn that its prompt continues, also repeatedly."""
    entries = Conversations()
    entries.put(C1, b"a", HOLD, 0.0)
    entries.put(C1, b"a, b one", LATER, 1.0)
    for _ in range(2):
        assert entries.find(C1, b"a, b two", 2.0) == FoundHold(Reuse.HIT, HOLD)
        assert entries.find(C1, b"a, b one, c", 2.0) == FoundHold(Reuse.HIT, LATER)
    assert entries.find(C1, b"a", 2.0) == FoundHold(Reuse.HIT, HOLD), "the request is repeated"


def test_a_prompt_that_continues_no_turn_uses_no_hold() -> None:
    """B2.21 Its pull would end the hold of another branch."""
    entries = Conversations()
    entries.put(C1, b"a", HOLD, 0.0)
    entries.put(C1, b"ab", LATER, 0.0)
    assert entries.find(C1, b"xyz", 1.0) == FoundHold(Reuse.MISS)
    assert entries.find(C1, b"abc", 1.0) == FoundHold(Reuse.HIT, LATER)


def test_a_conversation_has_its_latest_turns() -> None:
    """A turn that is repeated becomes the latest."""
    entries = Conversations()
    for number in range(MAX_TURNS):
        entries.put(C1, b"%d" % number, {"turn": number}, 0.0)
    entries.put(C1, b"0", {"turn": "again"}, 0.0)
    entries.put(C1, b"new", {"turn": "new"}, 0.0)
    found = [entries.find(C1, b"%d and more" % number, 0.0).hold for number in range(3)]
    assert found == [{"turn": "again"}, None, {"turn": 2}]


def test_an_entry_lives_450_seconds() -> None:
    """B2.21 Less than D's hold (480 s); an expired entry is removed and not used."""
    entries = Conversations()
    entries.put(C1, b"p", HOLD, 100.0)
    entries.put(C2, b"p", HOLD, 100.0)
    assert entries.find(C1, b"p", 549.9).reuse is Reuse.HIT
    assert entries.find(C2, b"p", 550.0) == FoundHold(Reuse.EXPIRED)
    assert entries.find(C2, b"p", 550.0) == FoundHold(Reuse.MISS)


def test_the_latest_turn_counts_and_lives_anew() -> None:
    """A turn that ends later replaces the previous one and its expiry."""
    entries = Conversations(ttl_s=10.0)
    entries.put(C1, b"p", HOLD, 0.0)
    entries.put(C1, b"p", LATER, 9.0)
    assert len(entries) == 1
    assert entries.find(C1, b"p", 18.0) == FoundHold(Reuse.HIT, LATER)


def test_stale_entries_are_evicted_and_others_stay() -> None:
    """B2.24 `/health` calls it; it returns their number."""
    entries = Conversations(ttl_s=10.0)
    entries.put(C1, b"p", HOLD, 0.0)
    entries.put(C2, b"p", HOLD, 5.0)
    assert entries.evict(9.9) == 0
    assert entries.evict(10.0) == 1
    assert entries.find(C1, b"p", 10.0).reuse is Reuse.MISS
    assert entries.find(C2, b"p", 10.0).reuse is Reuse.HIT


def test_of_too_many_the_oldest_go() -> None:
    """The number of entries is bounded. A new turn makes its conversation the newest again."""
    entries = Conversations(max_entries=2)
    entries.put(C1, b"p", HOLD, 0.0)
    entries.put(C2, b"p", HOLD, 1.0)
    assert entries.put(C1, b"p", LATER, 2.0) == 0
    assert entries.put(C3, b"p", HOLD, 3.0) == 1
    assert [entries.find(conversation, b"p", 4.0).reuse for conversation in (C1, C2, C3)] == [
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
            entries.put(conversation, b"p", large, 0.0)
        assert len(entries) == 2
        assert entries.find(C1, b"p", 1.0).reuse is Reuse.MISS
        assert entries.find(C2, b"p", 1.0).hold == large
        assert entries.evict(500.0) == 2


def test_one_that_is_too_large_is_not_kept() -> None:
    """It does not evict the others."""
    entries = Conversations(max_bytes=100)
    entries.put(C1, b"p", {"remote_block_ids": [list(range(1000))]}, 0.0)
    assert len(entries) == 0
    entries.put(C1, b"p", HOLD, 0.0)
    assert entries.find(C1, b"p", 1.0).reuse is Reuse.HIT


def test_owners_do_not_meet() -> None:
    """Two credentials with the same id have two conversations."""
    entries = Conversations()
    entries.put(Conversation("one", "m", "c"), b"p", HOLD, 0.0)
    assert entries.find(Conversation("two", "m", "c"), b"p", 0.0).reuse is Reuse.MISS


def test_what_is_found_is_a_copy() -> None:
    """Changing what was put or found does not change the table."""
    entries = Conversations()
    given_hold = {"remote_block_ids": [[0]]}
    entries.put(C1, b"p", given_hold, 0.0)
    given_hold["remote_block_ids"].append([9])
    assert entries.find(C1, b"p", 0.0).hold == {"remote_block_ids": [[0]]}


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "find", "evict"]), st.sampled_from([C1, C2, C3]), st.floats(0, 8)),
        max_size=60,
    )
)
def test_any_life_is_that_of_a_plain_dictionary(steps: list[tuple[str, Conversation, float]]) -> None:
    """B2.21 Compared with a model without order and limits."""
    entries, model, now = Conversations(ttl_s=10.0), dict[Conversation, tuple[int, float]](), 0.0
    for number, (step, conversation, passed) in enumerate(steps):
        now += passed
        if step == "put":
            entries.put(conversation, b"p", {"number": number}, now)
            model[conversation] = (number, now + 10.0)
        elif step == "evict":
            over = [conversation for conversation, (_, until) in model.items() if until <= now]
            assert entries.evict(now) == len(over)
            for conversation_over in over:
                del model[conversation_over]
        else:
            expected = model.get(conversation)
            found = entries.find(conversation, b"p", now)
            if expected is None:
                assert found == FoundHold(Reuse.MISS)
            elif expected[1] <= now:
                assert found == FoundHold(Reuse.EXPIRED)
                del model[conversation]
            else:
                assert found == FoundHold(Reuse.HIT, {"number": expected[0]})
        assert len(entries) == len(model)
