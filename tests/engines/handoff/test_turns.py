"""Three turns through the proxy: a plain engine's answers, and no token computed twice."""

from __future__ import annotations

from conversation_client import ConversationClient
from conversations import TURNS, held_by_decode, local_blocks, prompt_tokens
from deployment import Deployment, Moved
from engine_server import Sources
from memory_pressure import fill_server_memory
from scenario import BLOCK

PAGE = 128 << 10
"""Bytes of a block of the dense model: 4 layers of 2 heads of 64 numbers of 4 bytes, keys and
values, of 32 tokens."""


def _taken_by_prefill(turn: int, local: int = 0) -> Sources:
    """P's work for a turn of which it has `local` tokens: it computes only what D cannot have."""
    held = held_by_decode(turn - 1) if turn > 1 else 0
    return Sources(prompt_tokens(turn) - max(held, local), local, max(0, held - local))


def _taken_by_decode(turn: int, local: int = 0) -> Sources:
    """What D does: it pulls all.

    That it computes the last token once more, for its output is in no block, is not counted.
    """
    return Sources(0, local, prompt_tokens(turn) - local)


def _assert_handed_over(moved: Moved, turn: int) -> None:
    """Asserts one hold each way: D has pulled P's, P that of D's last turn; D's next one is there.

    Also asserts that these tokens were pulled, not loaded from the cache.
    """
    taken = {"published": 1, "claimed": 1, "released": 1, "claimed_bytes": moved.to_decode["claimed_bytes"]}
    assert moved.holds("to_decode") == taken
    back = {"published": 1, "claimed": 1, "released": 1} if turn > 1 else {"open": 1, "published": 1}
    assert {what: count for what, count in moved.holds("to_prefill").items() if what != "claimed_bytes"} == back
    assert moved.pulled == (moved.p.external, moved.d.external)


def test_engines_with_caches_of_their_own(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.2, B2.3, B2.4 Each engine pulls what it lacks: first P to D, later both ways."""
    before = deployment.totals("to_prefill")["open"]
    for turn in TURNS:
        moved = talk.turn("kept caches", turn)
        local_p = local_blocks(prompt_tokens(turn - 1)) if turn > 1 else 0
        local_d = local_blocks(held_by_decode(turn - 1)) if turn > 1 else 0
        assert moved.p == _taken_by_prefill(turn, local_p), turn
        assert moved.d == _taken_by_decode(turn, local_d), turn
        _assert_handed_over(moved, turn)
    deployment.assert_idle(to_prefill=before + 1)


def test_engines_that_have_forgotten_everything(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.6, B2.18 The last block is pulled too, though it is partly filled and has no hash."""
    for turn in TURNS:
        deployment.empty()
        moved = talk.turn("emptied caches", turn)
        assert moved.p == _taken_by_prefill(turn), turn
        assert moved.d == _taken_by_decode(turn), turn
        _assert_handed_over(moved, turn)
        if turn > 1:
            assert held_by_decode(turn - 1) % BLOCK, "what is held ends within a block"
            assert moved.to_prefill["claimed_bytes"] == -(-held_by_decode(turn - 1) // BLOCK) * PAGE


def test_streamed_turns(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.22 A stream does not report the hold: the proxy named it, and finds it again."""
    talk.turn("streamed", 1)
    for turn in TURNS[1:]:
        deployment.empty()
        moved = talk.streamed("streamed", turn)
        assert moved.p == _taken_by_prefill(turn), turn
        assert moved.d == _taken_by_decode(turn), turn
        _assert_handed_over(moved, turn)


def test_chat(deployment: Deployment, talk: ConversationClient) -> None:
    """An answer that is sent back as words is found."""
    for turn in TURNS[:2]:
        deployment.empty()
        moved = talk.ask_chat("chat", turn)
        assert (moved.p, moved.d) == (_taken_by_prefill(turn), _taken_by_decode(turn)), turn
        _assert_handed_over(moved, turn)


def test_several_at_once(deployment: Deployment, talk: ConversationClient) -> None:
    """Concurrent conversations each find their own blocks."""
    names = [f"at once {number}" for number in range(4)]
    before = deployment.totals("to_prefill")["open"]
    for turn in TURNS:
        deployment.empty()
        with deployment.watch(
            p=len(names), d=len(names), published=2 * len(names), ended=(1 if turn == 1 else 2) * len(names)
        ) as moved:
            talk.at_once(names, turn)
        expected = _taken_by_prefill(turn)
        assert moved.p == Sources(*(len(names) * count for count in expected)), turn
        assert moved.to_decode["claimed"] == moved.to_decode["released"] == len(names)
    deployment.assert_idle(to_prefill=before + len(names))


def test_branches_of_a_turn(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.21 Two requests that continue a turn at once find its blocks, and so does a later one.

    When the hold has ended, an ordinary lookup finds all blocks that are full.
    """
    talk.turn("branches", 1)
    new = prompt_tokens(2) - held_by_decode(1)
    for seeds in ((2001, 2002), (2003,)):
        deployment.empty()
        count = len(seeds)
        first_claim = count - 1  # ends the hold of the first turn
        with deployment.watch(p=count, d=count, published=2 * count, ended=count + first_claim) as moved:
            talk.branches("branches", *seeds)
        assert count * new <= moved.p.computed <= count * new + BLOCK
        assert sum(moved.p) == count * prompt_tokens(2)


def test_what_is_held_is_not_evicted(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.17 Other requests fill the server's memory between two turns; P still finds D's blocks."""
    talk.turn("under pressure", 1)
    deployment.empty()
    fill_server_memory(deployment.server)
    moved = talk.turn("under pressure", 2)
    assert moved.p == _taken_by_prefill(2)
    assert moved.to_prefill["claimed_bytes"] == -(-held_by_decode(1) // BLOCK) * PAGE
