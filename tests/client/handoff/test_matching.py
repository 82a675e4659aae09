"""Number of tokens that can be pulled."""

from __future__ import annotations

import pytest
from peers import BLOCK, FULL, PEER, REMOTE, STATE, WALL, WINDOW, Request, Rig, answered, held, prefilled

from kvtier.client.handoff import ClaimedBlocks, HandoffOptions, HeldBlock, NotClaimedReason, TransferParams
from kvtier.client.handoff.claims import TransferState, apply_threshold, offered_tokens
from kvtier.client.offload import CacheGeometry, CacheGroup

BOTH = {"bidirectional_kv_xfer": True}
# A window whose needed blocks change at the end of a block.
BY_EIGHT = CacheGeometry((FULL.groups[0], CacheGroup(1, BLOCK, 2 * BLOCK)), step_tokens=BLOCK, hash_tokens=BLOCK)


def test_defaults_are_those_of_vllm() -> None:
    """B2.1: threshold 64 tokens, one direction, 30 s (heartbeat every 5 s) and 480 s."""
    options = HandoffOptions()
    assert (options.kv_recompute_threshold, options.bidirectional_kv_xfer) == (64, False)
    assert (options.kv_lease_duration, options.heartbeat_s, options.decoder_kv_blocks_ttl) == (30, 5, 480)


@pytest.mark.parametrize(("computed", "expected"), [(0, 100), (16, 84), (96, 4)])
def test_a_decode_engine_pulls_what_it_lacks_of_the_prompt(computed: int, expected: int) -> None:
    """B2.2: prompt tokens - computed tokens, without a threshold, after the server's answer."""
    rig = Rig(prefilled())
    assert rig.pulled(100, computed) == expected
    assert rig.server.claims == [(1, PEER, [computed // 16])]


def test_a_complete_local_hit_claims_nothing() -> None:
    """B2.2: a count of 0 pulls nothing, also at the end of a block."""
    for prompt in (96, 100):
        rig = Rig(prefilled(), prompt)
        assert rig.match(prompt) == 0
        assert rig.server.claims == []


def test_a_peer_that_holds_nothing_is_reported() -> None:
    """B2.18: nothing is claimed, and operators can see that the two engines hand nothing over."""
    rig = Rig(prefilled(remote_block_ids=[[], []]))
    assert rig.match(0) == 0
    assert rig.server.claims == []
    assert rig.server.not_claims == [(PEER, NotClaimedReason.NOTHING_HELD)]


@pytest.mark.parametrize(("sizes", "most"), [((), 0), ((BLOCK,), BLOCK), ((2 * BLOCK, BLOCK), 2 * BLOCK)])
def test_a_prompt_of_one_state_is_never_held(sizes: tuple[int, ...], most: int) -> None:
    """B2.18: so it is no surprise that the peer holds nothing of it."""
    states = (CacheGroup(number, size, None, is_state=True) for number, size in enumerate(sizes, start=1))
    geometry = CacheGeometry((FULL.groups[0], *states), step_tokens=2 * BLOCK, hash_tokens=BLOCK)
    for prompt in (most, most + 1):
        rig = Rig(prefilled(remote_block_ids=[[], []]), prompt, geometry=geometry)
        assert len(rig.server.not_claims) == (prompt > most)


@pytest.mark.parametrize(
    ("remote", "prompt", "computed", "expected"), [(80, 100, 0, 80), (80, 100, 16, 64), (100, 100, 32, 68)]
)
def test_a_prefill_engine_pulls_what_the_decode_engine_has(
    remote: int, prompt: int, computed: int, expected: int
) -> None:
    """B2.3: min(remote_num_tokens, prompt tokens) - computed tokens."""
    rig = Rig(answered(remote), prompt, **BOTH)
    assert rig.pulled(remote, computed) == expected


@pytest.mark.parametrize("tokens", [None, 0, "many", -5, float("nan"), True])
def test_a_missing_number_of_tokens_counts_as_0(tokens: object) -> None:
    """B2.3: also an invalid remote_num_tokens, because it comes from another machine."""
    assert Rig(answered(80, remote_num_tokens=tokens), **BOTH).match() == 0


def test_below_the_threshold_is_computed() -> None:
    """B2.4: no pull, both numbers in the debug log; own tokens are subtracted first."""
    rig = Rig(answered(80), **BOTH)
    assert rig.match(32) == 0
    assert rig.server.claims == []
    (text,) = rig.server.debugged
    assert "48 tokens are below the threshold 64" in text


def test_at_the_threshold_is_pulled() -> None:
    """B2.4: a count equal to the threshold."""
    assert Rig(answered(80), **BOTH).pulled(80, 16) == 64


def test_a_threshold_of_0_never_skips() -> None:
    """B2.4: a single token is pulled."""
    assert Rig(answered(33), kv_recompute_threshold=0, **BOTH).pulled(33, 32) == 1


def test_the_threshold_applies_to_the_held_tokens_too() -> None:
    """B2.4: the parameters promise 96 tokens, but only three blocks exist: too few."""
    rig = Rig(answered(96), **BOTH)
    assert rig.pulled(96, missing=[(0, 3)]) == 0
    assert Rig(answered(96), kv_recompute_threshold=48, **BOTH).pulled(96, missing=[(0, 3)]) == 48


@pytest.mark.parametrize("key", REMOTE)
@pytest.mark.parametrize("params", [prefilled(), answered(80)])
@pytest.mark.parametrize("how", ["missing", "None", "wrong"])
def test_a_missing_key_means_no_pull(params: dict[str, object], key: str, how: str) -> None:
    """B2.5: for each of the four keys, the request is computed at once."""
    params = dict(params)
    if how == "missing":
        del params[key]
    else:
        params[key] = None if how == "None" else [1]
    rig = Rig(params, **BOTH)
    assert rig.match() == 0
    assert rig.server.claims == []


@pytest.mark.parametrize("blocks", [None, [], [[]], (), [[], []], 5, "text", ["text"]])
def test_a_first_turn_pulls_nothing(blocks: object) -> None:
    """B2.5: there are no remote blocks."""
    rig = Rig(answered(80, remote_block_ids=blocks), **BOTH)
    assert rig.match() == 0
    assert rig.transfer is TransferState.NONE
    params = TransferParams.parse(answered(80, remote_block_ids=blocks))
    assert params is not None
    assert offered_tokens(params, 100, 0, HandoffOptions(**BOTH)) == 0


def test_the_first_turn_of_a_proxy() -> None:
    """B2.24: do_remote_decode with all remote fields None."""
    rig = Rig({"do_remote_decode": True, "remote_block_ids": None, "remote_num_tokens": None, **dict.fromkeys(REMOTE)})
    assert rig.match() == 0


def test_a_remote_that_claims_more_than_the_prompt_is_capped() -> None:
    """B2.6: to the 100 tokens of the prompt."""
    params = TransferParams.parse(answered(300))
    assert params is not None
    assert offered_tokens(params, 100, 16, HandoffOptions(**BOTH)) == 84
    rig = Rig(answered(300), **BOTH)
    assert rig.pulled(300) == 96, "the last block may contain other tokens of the peer"


def test_no_more_than_the_prompt_is_pulled() -> None:
    """B2.6: even if the request has generated tokens that the peer has too."""
    rig = Rig(answered(130), arrives=False, **BOTH)
    rig.request.tokens += range(100, 140)
    rig.core.arrived(rig.request)
    assert rig.pulled(130) == 100


def test_a_partial_last_block_is_pulled() -> None:
    """B2.6: 70 tokens are four blocks and a partial one."""
    rig = Rig(answered(70), **BOTH)
    assert rig.pulled(70) == 70
    rig.allocate(70)
    (pull,) = rig.core.take_pulls()
    assert [(read.lease_id, read.indices, read.block_ids) for read in pull.job.reads] == [
        (77, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    ]


def test_with_partial_coverage_the_rest_is_computed() -> None:
    """B2.6: a hold shorter than promised is used in whole steps."""
    assert Rig(answered(96), **BOTH).pulled(96, missing=[(0, 5)]) == 80
    assert Rig(prefilled()).pulled(100, missing=[(0, 6)]) == 96
    assert Rig(prefilled()).pulled(100, missing=[(0, 0)]) == 0


@pytest.mark.parametrize("params", [prefilled(), answered(80)])
@pytest.mark.parametrize("key", REMOTE)
def test_without_a_peer_no_tokens_are_offered(params: dict[str, object], key: str) -> None:
    """B2.3 B2.5 B2.7: a key is missing, or the feature of a prefill engine is off."""
    some = TransferParams.parse({name: value for name, value in params.items() if name != key})
    assert some is not None
    assert offered_tokens(some, 100, 0, HandoffOptions(**BOTH)) == 0
    known = TransferParams.parse(params)
    assert known is not None
    assert offered_tokens(known, 100, 0, HandoffOptions()) == (100 if params["do_remote_prefill"] else 0)


@pytest.mark.parametrize("params", [answered(80), answered(80, remote_block_ids=None)])
def test_a_prefill_engine_with_the_feature_off_pulls_nothing(params: dict[str, object]) -> None:
    """B2.7: matching respects bidirectional_kv_xfer, as the pull does."""
    rig = Rig(params)
    assert rig.match() == 0
    assert rig.server.claims == []
    assert Rig(prefilled()).pulled(100) == 100, "prefill to decode does not depend on it"


def test_a_hold_that_expires_soon_is_not_claimed() -> None:
    """B2.19: 5 s before the expiry time of the parameters; without one the server decides."""
    rig = Rig(answered(80, remote_blocks_expiry_time=WALL + 5.1), **BOTH)
    assert rig.match() is None
    for expiry in (WALL + 5.0, WALL - 100):
        rig = Rig(answered(80, remote_blocks_expiry_time=expiry), **BOTH)
        assert rig.match() == 0
        assert rig.server.claims == []


def test_an_expired_hold_is_computed() -> None:
    """B2.19: the server reports a miss, and the request does not claim again."""
    rig = Rig(prefilled())
    assert rig.match() is None
    rig.answer(None)
    assert rig.match() == 0
    assert rig.match(now=1000.0) == 0
    assert len(rig.server.claims) == 1


def test_a_server_that_does_not_answer_costs_one_timeout() -> None:
    """Then the request is computed, the hold is released, and a late answer changes nothing."""
    rig = Rig(prefilled(), claim_timeout_s=3)
    assert rig.match(now=0.0) is None
    assert rig.match(now=2.9) is None
    assert rig.match(now=3.0) == 0
    assert (rig.server.dropped, rig.server.released, len(rig.server.warned)) == ([1], [PEER], 1)
    rig.answer(held(FULL, list(range(100)), 100), now=3.1)
    assert rig.match(now=3.2) == 0


def test_a_server_that_is_not_there_costs_nothing() -> None:
    """The match is a miss at once."""
    rig = Rig(prefilled())
    rig.server.reachable = False
    assert rig.match() == 0


def test_a_claim_that_waits_for_room_is_repeated() -> None:
    """Its lease may end soon. So is a claim that starts after tokens that the engine lost."""
    rig = Rig(prefilled(), claim_lifetime_s=10)
    assert rig.pulled(100, 32) == 68
    assert rig.match(32, now=10.0) == 68
    assert rig.match(32, now=10.1) is None
    assert rig.server.dropped == [1]
    rig.answer(held(FULL, list(range(100)), 100), now=10.2)
    assert rig.match(48, now=10.3) == 52
    assert rig.match(0, now=10.4) is None
    assert [first for _, _, first in rig.server.claims] == [[2], [2], [0]]


def test_blocks_of_other_tokens_are_not_used() -> None:
    """The engine compares keys: a hold of the same name may have other tokens."""
    rig = Rig(answered(80), **BOTH)
    rig.match()
    rig.answer(held(FULL, [*range(64), *[7] * 36], 80))
    assert rig.match() == 64
    rig = Rig(answered(72), **BOTH)
    rig.match()
    rig.answer(held(FULL, [*range(70), *[7] * 36], 72))
    assert rig.match() == 64, "the last block, without a hash, has other tokens"


def test_only_what_the_engine_lacks_is_needed() -> None:
    """B2.2: earlier blocks are not leased; a partial block is pulled too."""
    assert Rig(prefilled()).pulled(70, 32, missing=[(0, 0), (0, 1)]) == 38
    assert Rig(prefilled()).pulled(70, 32, missing=[(0, 2)]) == 0


class DraftRequest(Request):
    """A request whose last full block has no key yet."""

    def final_blocks(self, group: CacheGroup) -> int:
        return super().final_blocks(group) - 1

    def key(self, group: CacheGroup, position: int) -> bytes:
        assert position < self.final_blocks(group)
        return super().key(group, position)


def test_a_block_without_a_content_key_has_the_key_of_the_hold() -> None:
    """A full block whose tokens are not final: its content key is not read."""
    rig = Rig(prefilled(), arrives=False)
    rig.request = DraftRequest(prefilled(), list(range(96)))
    rig.core.arrived(rig.request)
    assert rig.pulled(96) == 80, "the peer's block has a content key"
    rig = Rig({"do_remote_decode": True}, arrives=False)
    rig.request = DraftRequest({"do_remote_decode": True}, list(range(96)))
    rig.core.arrived(rig.request)
    rig.allocate()
    rig.finish(96)
    (publication,) = rig.server.published
    assert publication.keys[5] == rig.request.hold_key("us", publication.request_id, FULL.groups[0], 5, 96)


def test_unknown_groups_are_ignored() -> None:
    """Blocks of other groups cannot be used."""
    rig = Rig(prefilled())
    rig.match()
    claimed = held(FULL, list(range(100)), 100)
    rig.answer(ClaimedBlocks(77, 100, [HeldBlock(5, 0, b"key", 0), *claimed.blocks]))
    assert rig.match() == 100


def test_an_answer_to_a_dropped_claim_is_ignored() -> None:
    """Its items belong to other blocks than those of the next claim."""
    rig = Rig(prefilled())
    rig.match(32)
    rig.match(0)
    first, second = (number for number, _, _ in rig.server.claims)
    rig.core.claim_ended(first, held(FULL, list(range(100)), 100), 0.0)
    assert rig.match(0) is None
    rig.core.claim_ended(second, held(FULL, list(range(100)), 70), 0.0)
    assert rig.match(0) == 70


def test_a_reset_drops_claims() -> None:
    """B4.13: waiting requests claim again; running pulls and ended transfers do not change."""
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.core.reset()
    assert (rig.server.dropped, rig.server.released) == ([1], [])
    assert rig.match() is None
    rig.answer(None)
    assert rig.match() == 0, "the reset ended the hold"
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.allocate(100)
    rig.core.reset()
    assert (rig.transfer, rig.server.dropped) == (TransferState.PULLING, [])
    rig.core.pull_ended("r")
    rig.core.reset()
    assert (rig.transfer, rig.server.dropped, len(rig.server.claims)) == (TransferState.OVER, [1], 1)


def test_only_the_tail_of_a_window_is_needed() -> None:
    """Blocks before a window of 24 tokens are not claimed; without its tail the hit is shorter."""
    rig = Rig(prefilled(), geometry=WINDOW)
    assert rig.pulled(100) == 100
    rig = Rig(prefilled(), geometry=WINDOW)
    assert rig.pulled(100, missing=[(1, 6)]) == 96
    rig = Rig(prefilled(), geometry=WINDOW)
    assert rig.pulled(100, missing=[(1, 5)]) == 0, "the window of a shorter hit starts before the held blocks"


def test_a_state_is_needed_at_the_end() -> None:
    """Only the block that ends with the hit."""
    rig = Rig(prefilled(), geometry=STATE)
    assert rig.pulled(96) == 96
    rig = Rig(prefilled(), geometry=STATE)
    assert rig.pulled(96, missing=[(1, 5)]) == 0


def all_of(geometry: CacheGeometry, num_tokens: int) -> ClaimedBlocks:
    """Returns a claim of every full block of ``tokens`` tokens, windows and states included."""
    theirs = Request(None, list(range(num_tokens)))
    places = [(group, position) for group in geometry.groups for position in range(num_tokens // BLOCK)]
    blocks = [HeldBlock(group.index, n, theirs.key(group, n), item) for item, (group, n) in enumerate(places)]
    return ClaimedBlocks(77, num_tokens, blocks)


@pytest.mark.parametrize(
    ("geometry", "prompt", "expected"),
    [(FULL, 112, 112), (STATE, 112, 96), (WINDOW, 112, 112), (STATE, 113, 112), (STATE, 16, 0), (BY_EIGHT, 112, 96)],
)
def test_the_last_token_of_a_prompt_is_computed_in_any_case(
    geometry: CacheGeometry, prompt: int, expected: int
) -> None:
    """B2.2 B4.2: it needs the state before it and its whole window; else less is pulled."""
    rig = Rig(prefilled(), prompt, geometry=geometry)
    rig.match()
    rig.answer(all_of(geometry, prompt // BLOCK * BLOCK))
    assert rig.match() == expected


@pytest.mark.parametrize(("geometry", "prompt"), [(STATE, 96), (STATE, 100), (WINDOW, 104)])
def test_a_whole_prompt_without_the_last_tokens_context_is_computed(geometry: CacheGeometry, prompt: int) -> None:
    """B2.2: the peer has only the state and the window after the prompt's end."""
    assert Rig(prefilled(), prompt, geometry=geometry).pulled(prompt) == 0


def test_a_window_that_reaches_no_further_back_needs_nothing_more() -> None:
    """B2.2: only one prompt length per block is shorter by a step; the others are pulled whole."""
    whole = [prompt for prompt in range(97, 113) if Rig(prefilled(), prompt, geometry=WINDOW).pulled(prompt) == prompt]
    assert whole == [prompt for prompt in range(97, 113) if prompt != 104]


def test_a_longer_hold_is_checked_at_the_prompts_end() -> None:
    """B2.6: it has only the windows' tails at its own end; a load that must fail is not offered."""
    rig = Rig(prefilled(), geometry=WINDOW, arrives=False)
    rig.request.tokens += range(100, 140)
    rig.core.arrived(rig.request)
    assert rig.pulled(140) == 0


MIXED = CacheGeometry((*WINDOW.groups, CacheGroup(2, BLOCK, None, is_state=True)), step_tokens=BLOCK, hash_tokens=BLOCK)


@pytest.mark.parametrize(("geometry", "expected"), [(WINDOW, 16), (STATE, 16), (MIXED, 0)])
def test_windows_that_the_engine_may_have_lost_are_not_used(geometry: CacheGeometry, expected: int) -> None:
    """B4.10: an engine with state groups may lack the window blocks of its tokens."""
    assert Rig(prefilled(), 97, geometry=geometry).pulled(96, 80) == expected
    assert Rig(prefilled(), 97, geometry=geometry).pulled(96, 64) == 32, "the whole window comes with the pull"
    assert Rig(prefilled(), 97, geometry=geometry).pulled(96, 0) == 96


def test_no_pull_starts_inside_a_block() -> None:
    """A partial block of the engine cannot be filled, and a load that must fail is not offered."""
    rig = Rig(prefilled())
    assert rig.match(8) == 0
    assert rig.server.claims == []
    assert rig.pulled(100, 16) == 84
    assert rig.match(24) == 0


def test_the_threshold_depends_on_the_direction() -> None:
    """B2.4: it applies to prefill engines only; a decode engine pulls any number of tokens."""
    forth, back = TransferParams(do_remote_prefill=True), TransferParams(do_remote_decode=True)
    options = HandoffOptions()
    assert [apply_threshold(count, forth, options) for count in (-1, 0, 1, 63)] == [0, 0, 1, 63]
    assert [apply_threshold(count, back, options) for count in (-1, 0, 1, 63, 64)] == [0, 0, 0, 0, 64]


def test_the_callers_parameters_are_not_changed() -> None:
    """B2.10: the core keeps no state in them."""
    params = answered(80)
    before = dict(params)
    rig = Rig(params, **BOTH)
    rig.pulled(80)
    rig.allocate(80)
    rig.core.pull_ended("r")
    rig.finish()
    assert params == before
    assert isinstance(rig.request, Request)
