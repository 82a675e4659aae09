"""End of a request: which blocks are held, and the parameters that are returned."""

from __future__ import annotations

import pytest
from peers import BLOCK, FULL, PEER, STATE, US, WALL, WINDOW, Rig, answered, prefilled

from kvtier.client import HandoffDirection
from kvtier.client.handoff import FinishedRequest, FinishReason, TransferParams
from kvtier.client.offload import CacheGeometry, CacheGroup, FreeBlock

BOTH = {"bidirectional_kv_xfer": True}
TO_DECODE = {"do_remote_decode": True}
NOTHING = FinishedRequest()


@pytest.mark.parametrize("params", [None, {}, "no mapping", 5])
@pytest.mark.parametrize("both", [True, False])
def test_without_parameters_nothing_is_held(params: object, both: bool) -> None:  # noqa: FBT001 - a table
    """B1.2 B2.13: its blocks are freed, nothing is returned, and there is no error."""
    assert TransferParams.parse(params) is None
    rig = Rig(params, bidirectional_kv_xfer=both)
    assert rig.match() == 0
    rig.allocate()
    assert rig.finish() == NOTHING
    assert rig.server.published == []


@pytest.mark.parametrize("reason", FinishReason)
def test_aborted_before_it_was_ever_scheduled(reason: FinishReason) -> None:
    """B2.14: the peer's hold is released, a claim is dropped, and nothing is returned."""
    rig = Rig(prefilled(), **BOTH)
    assert rig.finish(0, reason, tables=[[]]) == NOTHING
    assert rig.server.released == [PEER]
    rig = Rig(prefilled(), **BOTH)
    rig.match()
    assert rig.finish(0, reason, tables=[[]]) == NOTHING
    assert (rig.server.released, rig.server.dropped) == ([PEER], [1])
    assert rig.server.published == []


def test_a_prefill_request_that_never_ran_frees_what_the_decode_engine_holds() -> None:
    """B2.14: in both directions."""
    rig = Rig(answered(80), **BOTH)
    assert rig.finish(0, FinishReason.OTHER, tables=[[]]) == NOTHING
    assert rig.server.released == [PEER]


def test_a_decode_engine_with_the_feature_off_holds_nothing() -> None:
    """B2.15: its blocks are freed, and nothing is returned."""
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.allocate(100)
    rig.core.pull_ended("r")
    assert rig.finish(120) == NOTHING
    assert rig.server.published == []


@pytest.mark.parametrize("params", [TO_DECODE, prefilled()])
def test_only_normal_ends_are_held(params: dict[str, object]) -> None:
    """B2.16: stopped or length-capped; any other end frees the blocks and returns nothing."""
    for reason in FinishReason:
        rig = Rig(params, **BOTH)
        rig.allocate()
        finished = rig.finish(100, reason)
        assert (finished == FinishedRequest(drop_saves=True)) is (reason is FinishReason.OTHER)
        assert len(rig.server.published) == (reason is not FinishReason.OTHER)
        assert bool(finished.blocks) is (reason is not FinishReason.OTHER)


@pytest.mark.parametrize("reason", FinishReason)
def test_ended_while_workers_pull(reason: FinishReason) -> None:
    """B2.16: the peer is told after workers have written to its blocks; nothing is held."""
    rig = Rig(prefilled(), **BOTH)
    rig.pulled(100)
    rig.allocate(100)
    rig.core.take_pulls()
    assert rig.finish(100, reason) == FinishedRequest(drop_saves=True)
    assert rig.server.released == []
    assert rig.core.pending
    rig.core.pull_ended("r")
    assert rig.server.released == [PEER]
    assert not rig.core.pending
    assert rig.core._requests == {}
    assert rig.server.published == []


def test_a_prefill_engine_holds_for_a_lease() -> None:
    """B2.17: the decode engine that will pull it renews the lease."""
    rig = Rig(TO_DECODE)
    rig.allocate()
    rig.finish(100)
    (publication,) = rig.server.published
    assert (publication.request_id, publication.direction) == ("server's r", HandoffDirection.PREFILL_TO_DECODE)
    assert (publication.num_tokens, publication.positions, publication.hold_for) == (100, list(range(7)), 30.0)
    group = FULL.groups[0]
    names = [rig.request.key(group, position) for position in range(6)]
    assert publication.keys == [*names, rig.request.hold_key("us", "server's r", group, 6, 100)]


def test_a_decode_engine_holds_for_its_ttl() -> None:
    """B2.17: the user's next turn may come minutes later."""
    rig = Rig(prefilled(), **BOTH)
    rig.allocate()
    rig.request.tokens += range(100, 140)
    rig.finish(139)
    (publication,) = rig.server.published
    assert (publication.direction, publication.hold_for) == (HandoffDirection.DECODE_TO_PREFILL, 480.0)
    assert (publication.num_tokens, len(publication.keys)) == (139, 9)


def test_a_request_without_blocks_is_not_held() -> None:
    """B2.17: the returned parameters list no blocks."""
    rig = Rig(TO_DECODE)
    rig.allocate()
    finished = rig.finish(0, tables=[[]])
    assert (finished.params["remote_num_tokens"], finished.params["remote_block_ids"]) == (0, [[]])
    assert finished.params["remote_blocks_expiry_time"] is None
    assert (rig.server.published, finished.blocks) == ([], [])


@pytest.mark.parametrize(("params", "prefilled_here"), [(TO_DECODE, True), (prefilled(), False)])
def test_the_returned_parameters(params: dict[str, object], prefilled_here: bool) -> None:  # noqa: FBT001 - a table
    """B2.18: vLLM's key names, reversed flags, and the expiry time of a decode engine's blocks."""
    rig = Rig(params, **BOTH)
    rig.allocate()
    assert rig.finish(100).params == {
        "do_remote_prefill": prefilled_here,
        "do_remote_decode": not prefilled_here,
        "remote_block_ids": [[0, 1, 2, 3, 4, 5, 6]],
        "remote_engine_id": "us",
        "remote_request_id": "server's r",
        "remote_host": US.host,
        "remote_port": US.port,
        "tp_size": 2,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": None if prefilled_here else WALL + 480,
    }


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(100, [4, 5, 6]), (96, [4, 5]), (24, [0, 1]), (41, [1, 2]), (104, [4, 5, 6]), (40, [0, 1, 2])],
)
def test_windows_are_clipped_to_their_tail(tokens: int, expected: list[int]) -> None:
    """B2.18: only the blocks that a 24-token window reaches from the end or from the last token."""
    rig = Rig(TO_DECODE, prompt=104, geometry=WINDOW)
    rig.allocate()
    finished = rig.finish(tokens)
    assert finished.params["remote_block_ids"] == [list(range(-(-tokens // BLOCK))), expected]


def test_only_tokens_with_all_their_blocks_are_promised() -> None:
    """B2.18: in whole steps if the engine recomputes the last block of a hit."""
    geometry = CacheGeometry(FULL.groups, step_tokens=BLOCK, hash_tokens=BLOCK, drop_last_block=True)
    rig = Rig(TO_DECODE, geometry=geometry)
    rig.allocate()
    finished = rig.finish(100)
    assert finished.params["remote_num_tokens"] == 96
    full = geometry.groups[0]
    assert finished.blocks == [FreeBlock(n + 1, 0, rig.request.key(full, n)) for n in range(6)]
    assert len(rig.server.published[0].keys) == 6


def _states(*positions: int) -> dict[tuple[int, int], int]:
    """Returns a prefix cache that has the states at the ends of these blocks."""
    return {(1, position): 200 + position for position in positions}


@pytest.mark.parametrize(
    ("params", "tokens", "cached", "expected"),
    [
        (TO_DECODE, 100, (3, 5), 96),
        (TO_DECODE, 112, (5, 6), 96),  # the decode engine computes token 112 of the same prompt
        (prefilled(), 112, (5, 6), 112),  # the next prompt is longer
        (prefilled(), 120, (5, 6), 112),  # the running state has an unknown token
        (TO_DECODE, 100, (0, 3), 64),  # a later state has left the cache
    ],
)
def test_a_hold_ends_with_a_state_of_the_cache(
    params: dict[str, object], tokens: int, cached: tuple[int, ...], expected: int
) -> None:
    """B2.17: P's request has dropped the state before its last token."""
    rig = Rig(params, prompt=min(tokens, 112), geometry=STATE, **BOTH)
    rig.allocate()
    rig.request.tokens += range(1000, 1000 + tokens - len(rig.request.tokens) + 1)
    rig.cache.blocks = _states(*cached)
    finished = rig.finish(tokens)
    full, state = STATE.groups
    last = expected // BLOCK - 1
    assert finished.params["remote_num_tokens"] == expected
    assert finished.params["remote_block_ids"] == [list(range(last + 1)), [last]]
    assert finished.blocks == [
        *(FreeBlock(n + 1, 0, rig.request.key(full, n)) for n in range(last + 1)),
        FreeBlock(200 + last, 1, rig.request.key(state, last)),
    ]
    assert rig.server.published[0].num_tokens == expected


@pytest.mark.parametrize("tokens", [100, 112])
def test_a_prefill_engine_does_not_hold_its_running_state(tokens: int) -> None:
    """B2.17: the state contains the prompt's last token, which the decode engine computes again."""
    rig = Rig(TO_DECODE, prompt=tokens, geometry=STATE)
    rig.allocate()
    rig.request.tokens += [1000]
    rig.cache.blocks = _states(5, 6)
    finished = rig.core.finished("r", rig.tables(), tokens, FinishReason.LENGTH, WALL, tokens)
    assert finished.params["remote_num_tokens"] == 96
    assert finished.blocks[-1] == FreeBlock(205, 1, rig.request.key(STATE.groups[1], 5))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [99, 111, 112, 113])
def test_a_decode_engine_holds_its_running_state(tokens: int, ahead: int) -> None:
    """B2.17: it contains all tokens of the request, maybe one more than confirmed."""
    rig = Rig(prefilled(), prompt=90, geometry=STATE, **BOTH)
    rig.allocate()
    rig.request.tokens += range(1000, 1000 + tokens - 90 + 1)
    end, tables = tokens + ahead, rig.tables()
    finished = rig.core.finished("r", tables, tokens, FinishReason.STOPPED, WALL, end)
    full, state = STATE.groups
    last = (end - 1) // BLOCK
    assert finished.params["remote_num_tokens"] == end
    assert finished.params["remote_block_ids"] == [list(range(last + 1)), [last]]
    key = rig.request.hold_key("us", "server's r", state, last, end) if end % BLOCK else rig.request.key(state, last)
    assert finished.blocks[-1] == FreeBlock(tables[1][last], 1, key)
    assert [block.key for block in finished.blocks[:last]] == [rig.request.key(full, n) for n in range(last)]


@pytest.mark.parametrize(("tokens", "cached"), [(100, ()), (BLOCK, (0,)), (5, ())])
def test_nothing_is_held_without_a_state(tokens: int, cached: tuple[int, ...]) -> None:
    """B2.17: no state is left, or a prompt of one block has none; no block is named."""
    rig = Rig(TO_DECODE, prompt=tokens, geometry=STATE)
    rig.allocate()
    rig.cache.blocks = _states(*cached)
    finished = rig.finish(tokens)
    assert (rig.server.published, finished.blocks, finished.drop_saves) == ([], [], False)
    assert (finished.params["remote_num_tokens"], finished.params["remote_block_ids"]) == (0, [[], []])
    assert finished.params["remote_blocks_expiry_time"] is None
    reader = Rig(finished.params, tokens, geometry=STATE, **BOTH)
    assert (reader.match(), reader.server.claims) == (0, [])
    assert bool(reader.server.not_claims) is (tokens > BLOCK), "a prompt of one block is no failure"


def test_a_window_block_that_the_request_dropped_comes_from_the_cache() -> None:
    """B2.18: a hold that ends before the request's last token needs earlier window blocks."""
    window = CacheGroup(2, BLOCK, 24)
    geometry = CacheGeometry((*STATE.groups, window), step_tokens=BLOCK, hash_tokens=BLOCK)
    for has_window in (True, False):
        rig = Rig(TO_DECODE, prompt=112, geometry=geometry)
        rig.allocate()
        tables = [list(table) for table in rig.tables()]
        tables[2][:5] = [geometry.null_block] * 5
        rig.cache.blocks = _states(5) | ({(2, 4): 304} if has_window else {})
        finished = rig.finish(112, tables=tables)
        assert finished.params["remote_num_tokens"] == (96 if has_window else 0)
        if has_window:
            assert finished.blocks[-2:] == [
                FreeBlock(304, 2, rig.request.key(window, 4)),
                FreeBlock(tables[2][5], 2, rig.request.key(window, 5)),
            ]


def test_all_held_blocks_are_returned_for_storing() -> None:
    """B2.17: even those offered before, which may have been evicted: the peer waits for all."""
    rig = Rig(TO_DECODE, geometry=WINDOW)
    rig.allocate()
    full, window = WINDOW.groups
    first = [FreeBlock(n + 1, 0, rig.request.key(full, n)) for n in range(6)]
    last = [FreeBlock(100 + n + 1, 1, rig.request.key(window, n)) for n in (4, 5)]
    names = [rig.request.hold_key("us", "server's r", group, 6, 100) for group in WINDOW.groups]
    finished = rig.finish(100)
    assert finished.blocks == [*first, FreeBlock(7, 0, names[0]), *last, FreeBlock(107, 1, names[1])], (
        "B2.6: its end, too"
    )
    assert [block.key for block in finished.blocks] == list(rig.server.published[0].keys)


def test_a_block_that_only_the_last_token_needs_may_be_missing() -> None:
    """B2.18: the same prompt pulls less by a partial block; a longer one pulls all."""
    rig = Rig(TO_DECODE, prompt=104, geometry=WINDOW)
    rig.allocate()
    tables = [list(table) for table in rig.tables()]
    tables[1][4] = WINDOW.null_block
    finished = rig.finish(104, tables=tables)
    assert finished.params["remote_block_ids"] == [list(range(7)), [5, 6]]


def test_nothing_is_held_without_a_needed_block() -> None:
    """B2.18: there are no partial holds."""
    rig = Rig(TO_DECODE, geometry=WINDOW)
    rig.allocate()
    tables = [list(table) for table in rig.tables()]
    tables[1][5] = WINDOW.null_block
    finished = rig.finish(100, tables=tables)
    assert (finished.params["remote_num_tokens"], finished.params["remote_block_ids"]) == (0, [[], []])
    assert rig.server.published == []


@pytest.mark.parametrize("params", [TO_DECODE, prefilled()])
def test_blocks_without_key_or_table_entry_are_not_held(params: dict[str, object]) -> None:
    """B2.17 B2.18: too many tokens or too few blocks; no expiry time is returned."""
    for tokens, tables in ((130, None), (100, [[1, 2, 3]])):
        rig = Rig(params, **BOTH)
        rig.allocate()
        finished = rig.finish(tokens, tables=tables)
        assert (finished.params["remote_num_tokens"], finished.params["remote_block_ids"]) == (0, [[]])
        assert finished.params["remote_blocks_expiry_time"] is None
        assert rig.server.published == []


def test_a_block_with_unconfirmed_tokens_has_the_key_of_the_hold() -> None:
    """B2.6: its content does not match its content key."""
    rig = Rig(TO_DECODE)
    rig.allocate()
    rig.request.tokens += range(100, 120)
    rig.finish(100)
    (publication,) = rig.server.published
    assert publication.keys[6] == rig.request.hold_key("us", publication.request_id, FULL.groups[0], 6, 100)


@pytest.mark.parametrize("drafts", [1, 12, 40])
def test_unconfirmed_tokens_are_not_held(drafts: int) -> None:
    """B2.18: tokens of a step ahead and drafts do not count; a window may have moved on."""
    rig = Rig(TO_DECODE, geometry=WINDOW)
    rig.allocate()
    rig.request.tokens += range(100, 100 + drafts)
    finished = rig.finish(100)
    assert finished.params["remote_block_ids"] == [list(range(7)), [4, 5, 6]]
    names = [rig.request.hold_key("us", "server's r", group, 6, 100) for group in WINDOW.groups]
    assert [block.key for block in finished.blocks if block.block_id in (7, 107)] == names
    rig = Rig(TO_DECODE, geometry=WINDOW)
    rig.allocate()
    tables = [list(table) for table in rig.tables()]
    tables[1][:5] = [WINDOW.null_block] * 5
    assert rig.finish(100, tables=tables).blocks == []


@pytest.mark.parametrize("confirmed", [101, 112, 128])
def test_tokens_of_an_unprocessed_step_are_not_held(confirmed: int) -> None:
    """B2.17: they have KV but no key, and would be held as another request's tokens."""
    rig = Rig(TO_DECODE)
    rig.allocate()
    assert rig.finish(confirmed).blocks == []
    assert rig.server.published == []


def test_a_request_ends_once() -> None:
    """A second call has no effect."""
    rig = Rig(TO_DECODE)
    rig.allocate()
    assert rig.finish() != NOTHING
    assert rig.finish() == NOTHING
    assert len(rig.server.published) == 1


def test_returned_parameters_work_for_the_next_engine() -> None:
    """B2.18: three turns, prefill to decode and back."""
    decode = prefill = None
    for _ in range(3):
        prefill = Rig(decode.params if decode else TO_DECODE, 200, **BOTH)
        prefill.match()
        prefill.allocate()
        decode_params = prefill.finish(200)
        assert decode_params.params is not None
        rig = Rig(decode_params.params, 200, **BOTH)
        assert rig.match() is None, "it claims the hold"
        rig.allocate()
        rig.request.tokens += range(200, 221)
        decode = rig.finish(220)
        assert decode.params is not None
        assert Rig(decode.params, 300, **BOTH).match() is None
