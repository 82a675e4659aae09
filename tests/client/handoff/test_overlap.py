"""Both engines get a request at once: the decode engine pulls while the prefill engine computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from peers import BLOCK, FULL, PEER, REMOTE, STATE, US, WALL, WINDOW, Request, Rig, held, prefilled

from kvtier.client import HandoffDirection
from kvtier.client.handoff import ClaimedBlocks, FinishReason, HandoffOptions, RemoteRequest
from kvtier.client.handoff.claims import TransferState
from kvtier.client.offload import CacheGeometry, CacheGroup, LoadJob

PREFILLS = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(REMOTE), "remote_overlap": True}
DECODES = prefilled(remote_overlap=True)
OWN = RemoteRequest("us", "server's r", US.host, US.port)
LEASE_S = 30.0
WHOLE = replace(FULL, drop_last_block=True)


def computed(tokens: int, ready: int, *, geometry: CacheGeometry = FULL, lost: bool = False) -> ClaimedBlocks:
    """Returns the grant of a claim while the peer has stored ``ready`` tokens of ``tokens``.

    ``lost``: the other blocks will not come.
    """
    whole = held(geometry, list(range(400)), tokens)
    sizes = {group.index: group.block_tokens for group in geometry.groups}
    blocks = [
        block
        if min(tokens, (block.position + 1) * sizes[block.group_index]) <= ready
        else replace(block, item=None, is_pending=not lost)
        for block in whole.blocks
    ]
    settled = len(blocks) if lost else sum(block.item is not None for block in blocks)
    return replace(whole, lease_id=700 + ready if settled else 0, blocks=blocks, settled_blocks=settled)


class Decode(Rig):
    """A decode engine whose request has 100 tokens."""

    def __init__(self, geometry: CacheGeometry = FULL) -> None:
        super().__init__(DECODES, geometry=geometry)
        assert self.match() is None

    def granted(self, ready: int, now: float = 0.0, **more: bool) -> list[LoadJob]:
        """The peer has stored ``ready`` tokens. Returns the jobs that workers get then."""
        self.answer(computed(100, ready, geometry=self.geometry, **more), now)
        return [pull.job for pull in self.core.take_pulls()]

    def allocate(self, external: int = 0) -> None:
        """Leaves out blocks that a request of ``external`` tokens no longer needs."""
        tables = [list(table) for table in self.tables()]
        for group in self.geometry.groups:
            needed = group.first_needed_block(external)
            tables[group.index][:needed] = [self.geometry.null_block] * needed
        self.core.allocated("r", tables, external)

    def begun(self, ready: int = 40) -> list[LoadJob]:
        """Begins the pull with the first blocks."""
        assert self.granted(ready) == []
        assert self.match() == 100
        self.allocate(100)
        return [pull.job for pull in self.core.take_pulls()]


def filled(*jobs: LoadJob) -> list[list[tuple[int, int]]]:
    """Returns (lease id, block id) of each block of each job."""
    return [[(read.lease_id, block_id) for read in job.reads for block_id in read.block_ids] for job in jobs]


# ---- prefill engine


@pytest.mark.parametrize("geometry", [FULL, WINDOW])
def test_a_prefill_engine_publishes_a_request_that_arrives(geometry: CacheGeometry) -> None:
    """Keys depend only on the prompt. At its end blocks are stored and nothing is published."""
    rig = Rig(PREFILLS, geometry=geometry)
    (publication,) = rig.server.published
    assert (publication.request_id, publication.direction) == ("server's r", HandoffDirection.PREFILL_TO_DECODE)
    assert (publication.num_tokens, publication.hold_for) == (100, LEASE_S)
    rig.allocate()
    rig.request.tokens.append(7)
    finished = rig.finish(100)
    assert [block.key for block in finished.blocks] == list(publication.keys)
    assert finished.params["remote_num_tokens"] == 100
    assert (len(rig.server.published), rig.server.released) == (1, [])
    late = Rig({"do_remote_decode": True}, geometry=geometry)
    late.allocate()
    assert late.finish(100).params == finished.params


def test_a_refused_hold_is_published_at_the_end() -> None:
    """The server had no room when the request arrived. A decode engine may claim it later."""
    rig = Rig(PREFILLS)
    rig.server.published[0].refused = True
    rig.allocate()
    finished = rig.finish(100)
    first, last = rig.server.published
    assert replace(first, refused=False) == last
    assert [block.key for block in finished.blocks] == list(last.keys)
    assert (rig.server.renewed, rig.server.released) == ([], [])
    rig = Rig(PREFILLS)
    rig.server.published[0].refused = True
    rig.allocate()
    rig.finish(60, FinishReason.OTHER)
    assert len(rig.server.published) == 1, "an aborted prefill is not held"


def test_a_hold_with_a_state_ends_before_the_last_token() -> None:
    """The decode engine computes the last token, also of a prompt of whole blocks."""
    for tokens, expected in ((100, 96), (96, 80), (BLOCK, 0)):
        rig = Rig(PREFILLS, prompt=tokens, geometry=STATE)
        assert [publication.num_tokens for publication in rig.server.published] == ([expected] if expected else [])
        rig.allocate()
        last = expected // BLOCK - 1
        rig.cache.blocks = {(1, last): 200}
        finished = rig.finish(tokens)
        assert finished.params["remote_num_tokens"] == expected
        if expected:
            assert [block.block_id for block in finished.blocks] == [*range(1, last + 2), 200]


def test_the_prefill_engine_renews_its_hold_until_the_request_ends() -> None:
    """A queued prefill may take longer than the hold lives."""
    rig = Rig(PREFILLS)
    for now in (0.0, 5.0, 10.0):
        rig.core.heartbeat(now)
    assert rig.server.renewed == [[OWN]] * 3
    rig.allocate()
    rig.finish(100)
    assert rig.server.renewed == [[OWN]] * 4
    rig.core.heartbeat(20.0)
    assert len(rig.server.renewed) == 4


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_aborted_prefill_leaves_nothing_held(scheduled: bool) -> None:  # noqa: FBT001 - a table
    """Also if it never ran; the decode engine's claim then ends."""
    rig = Rig(PREFILLS)
    if scheduled:
        rig.allocate()
    finished = rig.finish(60, FinishReason.OTHER)
    assert (finished.params, finished.blocks) == (None, ())
    assert rig.server.released == [OWN]
    assert rig.core._requests == {}


@pytest.mark.parametrize("prompt", range(96, 113))
def test_an_early_hold_has_the_window_of_the_last_token(prompt: int) -> None:
    """The decode engine computes that token, and its window can begin a block earlier."""
    (publication,) = Rig(PREFILLS, prompt=prompt, geometry=WINDOW).server.published
    _, window = WINDOW.groups
    assert window.retained_tokens is not None
    blocks, first = -(-prompt // BLOCK), (prompt - 1 - window.retained_tokens) // BLOCK
    assert list(publication.positions) == [*range(blocks), *range(first, blocks)]


def test_a_prompt_with_a_block_without_key_is_not_published_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if the tokens of its last, partial block are not known."""
    monkeypatch.setattr(Request, "hold_key", lambda *_: None)
    assert Rig(PREFILLS).server.published == []
    (publication,) = Rig(PREFILLS, prompt=96).server.published
    assert publication.num_tokens == 96


def test_nothing_is_published_early_that_may_not_be_stored() -> None:
    """A request that skips storing; the first step of a reset."""
    rig = Rig(PREFILLS, arrives=False)
    rig.request.may_hold = False
    rig.core.arrived(rig.request)
    other = Rig(PREFILLS, arrives=False)
    other.core.arrived(other.request, may_hold=False)
    assert rig.server.published == other.server.published == []


# ---- decode engine


@pytest.mark.parametrize("geometry", [FULL, WINDOW])
def test_blocks_are_pulled_as_they_come(geometry: CacheGeometry) -> None:
    """Each claim waits for one block more; the last job ends the load, and the peer is told."""
    rig = Decode(geometry)
    jobs = rig.begun(40)
    assert rig.granted(40) == [], "nothing new"
    jobs += rig.granted(64) + rig.granted(100)
    assert [job.is_last for job in jobs] == [False, False, True]
    tables = rig.tables()
    pulled = [place for job in filled(*jobs) for place in job]
    expected = [(lease, tables[0][n]) for n, lease in enumerate([740] * 2 + [764] * 2 + [800] * 3)]
    expected += [(800, tables[1][n]) for n in (4, 5, 6)] if geometry is WINDOW else []
    assert sorted(pulled) == sorted(expected)
    assert rig.server.waits == [
        1,
        *(computed(100, ready, geometry=geometry).settled_blocks + 1 for ready in (40, 40, 64)),
    ]
    assert rig.server.released == rig.server.dropped == []
    firsts = [first for _, _, first in rig.server.claims]
    assert [first[0] for first in firsts] == [0, 2, 2, 4], "no block is leased twice"
    assert [first[1:] for first in firsts] == ([[0], [4], [4], [4]] if geometry is WINDOW else [[]] * 4)
    rig.core.pull_ended("r")
    assert rig.server.released == [PEER]
    assert rig.server.dropped == [number for number, _, _ in rig.server.claims]
    assert rig.core._claims._states == {}


@pytest.mark.parametrize(
    ("geometry", "tokens", "claims"),
    [(STATE, BLOCK, 0), (STATE, BLOCK + 1, 1), (WHOLE, BLOCK - 1, 0), (WHOLE, BLOCK, 1), (FULL, 1, 1)],
)
def test_a_prompt_of_which_nothing_is_held_is_not_claimed(geometry: CacheGeometry, tokens: int, claims: int) -> None:
    """The prefill engine publishes nothing of it, so the claim would wait in vain."""
    rig = Rig(DECODES, tokens, geometry=geometry)
    assert rig.match() == (None if claims else 0)
    assert len(rig.server.claims) == claims
    publisher = Rig(PREFILLS, tokens, geometry=geometry)
    assert len(publisher.server.published) == claims
    rig.allocate()
    assert len(rig.server.released) == claims


def test_a_part_compares_only_the_keys_of_missing_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread compares them, once per part."""
    rig = Decode()
    rig.begun(40)
    compared: list[int] = []
    key = Request.key

    def counted(request: Request, group: CacheGroup, position: int) -> bytes:
        compared.append(position)
        return key(request, group, position)

    grants = [computed(100, ready) for ready in (64, 96)]
    monkeypatch.setattr(Request, "key", counted)
    for grant in grants:
        rig.answer(grant)
    assert compared == [2, 3, 4, 5, 4, 5], "and block 6 has a key of the hold"
    assert [len(job.reads[0].block_ids) for job in (pull.job for pull in rig.core.take_pulls())] == [2, 2]


def test_a_request_waits_until_the_first_block_is_computed() -> None:
    """The peer may have to compute other requests first. No block is allocated until then."""
    rig = Decode()
    for number in range(3):
        rig.answer(computed(100, 0), 4.0 * number)
        assert rig.match(now=4.0 * number) is None
    assert rig.server.waits == [1] * 4
    rig.answer(computed(100, 16), 13.0)
    assert rig.match(now=13.0) == 100


def test_an_engine_awaits_a_peer_if_one_request_waits() -> None:
    """An idle engine then waits for answers. Other requests, and answered claims, do not count."""
    rig = Decode()
    rig.core.arrived(Request(prefilled(), list(range(50)), request_id="other"))
    assert rig.core.awaits_peer
    rig.answer(computed(100, 40))
    assert not rig.core.awaits_peer
    plain = Rig(prefilled())
    assert plain.match() is None
    assert not plain.core.awaits_peer, "the peer has stored the blocks"


def test_a_peer_that_computes_nothing_is_given_up() -> None:
    """After the time of a lease the engine computes the request, and releases the hold."""
    rig = Decode()
    rig.answer(computed(100, 0), LEASE_S)
    assert rig.match(now=LEASE_S) is None
    rig.answer(computed(100, 0), LEASE_S + 1)
    assert rig.match(now=LEASE_S + 1) == 0
    assert rig.server.released == [PEER]
    assert rig.core._claims._states == {}


def test_states_are_pulled_at_the_end_of_a_prefill() -> None:
    """Only the last state is held; the attention blocks before it are pulled before it comes."""
    rig = Decode(STATE)
    rig.answer(computed(96, 32, geometry=STATE))
    assert rig.match() == 96
    rig.allocate(96)
    (first,) = [pull.job for pull in rig.core.take_pulls()]
    assert (len(first.reads[0].block_ids), first.is_last) == (2, False)
    assert rig.server.claims[-1][2] == [2, 5]
    rig.answer(computed(96, 96, geometry=STATE))
    (last,) = [pull.job for pull in rig.core.take_pulls()]
    assert last.is_last
    assert last.reads[0].groups.count(1) == 1


@pytest.mark.parametrize("how", ["gone", "lost", "late", "unreachable"])
def test_a_pull_whose_blocks_do_not_come_fails_once(how: str) -> None:
    """The engine then computes the request, or finds the stored blocks by a lookup."""
    rig = Decode()
    assert [job.is_last for job in rig.begun(40)] == [False]
    if how == "gone":
        rig.answer(None)
        jobs = [pull.job for pull in rig.core.take_pulls()]
    elif how == "unreachable":
        rig.server.reachable = False
        jobs = rig.granted(64)
    else:
        jobs = rig.granted(64, lost=True) if how == "lost" else rig.granted(40, now=LEASE_S + 1)
    assert jobs == [LoadJob("r")]
    rig.core.pull_ended("r")
    assert (rig.transfer, rig.match()) == (TransferState.OVER, 0)
    assert rig.server.released == [PEER]
    assert rig.core._claims._states == {}
    assert not rig.core.pending


@pytest.mark.parametrize("geometry", [FULL, WINDOW])
@pytest.mark.parametrize("position", [4, 5, 6])
def test_a_pull_of_which_one_block_does_not_come_fails(geometry: CacheGeometry, position: int) -> None:
    """Also if others may still come: the engine waits for none of them."""
    for group in geometry.groups:
        rig = Decode(geometry)
        rig.begun(40)
        grant = computed(100, 64, geometry=geometry)
        rig.answer(
            replace(
                grant,
                blocks=[
                    replace(block, item=None, is_pending=False)
                    if (block.group_index, block.position) == (group.index, position)
                    else block
                    for block in grant.blocks
                ],
            )
        )
        assert [pull.job for pull in rig.core.take_pulls()] == [LoadJob("r")]
        assert len(rig.server.claims) == 2


def test_a_pull_whose_claim_is_not_answered_fails() -> None:
    """Also if the engine lost the answer of a claim. An answer that comes later is not used."""
    rig = Decode()
    rig.begun(40)
    for now in (5.0, 9.9):
        rig.core.heartbeat(now)
        assert rig.core.take_pulls() == []
    for now in (10.0, 20.0):
        rig.core.heartbeat(now)
    assert [pull.job for pull in rig.core.take_pulls()] == [LoadJob("r")], "it fails once"
    assert len(rig.server.warned) == 1
    assert rig.granted(64) == []
    rig.core.pull_ended("r")
    assert (rig.transfer, rig.core.pending) == (TransferState.OVER, False)
    assert rig.server.released == [PEER]
    assert rig.core._claims._states == {}


def test_an_answer_restarts_the_deadline_of_a_pull() -> None:
    """A prefill may take much longer than one claim."""
    rig = Decode()
    rig.begun(40)
    assert rig.granted(40, now=4.0) == []
    rig.core.heartbeat(13.9)
    assert rig.core.take_pulls() == []
    rig.core.heartbeat(13.9 + HandoffOptions().heartbeat_s)
    assert [pull.job for pull in rig.core.take_pulls()] == [LoadJob("r")]


def test_an_aborted_request_ends_its_pull() -> None:
    """Workers report the load after the jobs that they have begun; then the peer is told."""
    rig = Decode()
    rig.begun(40)
    assert rig.finish(0, FinishReason.OTHER).drop_saves
    assert [pull.job for pull in rig.core.take_pulls()] == [LoadJob("r")]
    assert rig.granted(64) == [], "an answer that comes later"
    assert rig.server.released == []
    rig.core.pull_ended("r")
    assert rig.server.released == [PEER]
    assert rig.core._requests == {}


def test_an_aborted_request_that_waits_for_the_first_block() -> None:
    """Its claim is dropped and the peer's hold is released."""
    rig = Decode()
    rig.answer(computed(100, 0))
    rig.finish(0, FinishReason.OTHER, tables=[[]])
    assert rig.server.released == [PEER]
    assert rig.core._claims._states == {}


def test_a_server_that_waits_for_all_blocks_gives_all_at_once() -> None:
    """An older server knows no ``min_blocks`` and reports no settled blocks."""
    rig = Decode()
    (job,) = rig.begun(100)
    assert (job.is_last, len(job.reads[0].block_ids)) == (True, 7)
    rig = Decode()
    rig.answer(replace(computed(100, 40), settled_blocks=0))
    assert rig.match() == 100
    rig.allocate(100)
    rig.core.take_pulls()
    assert rig.server.waits == [1, 1]


def test_tokens_of_another_prompt_are_not_awaited() -> None:
    """B2.6: a proxy that mixes up requests costs a computation, not an answer."""
    rig = Rig(DECODES, arrives=False)
    rig.request.tokens[:] = range(1000, 1100)
    rig.core.arrived(rig.request)
    assert rig.match(wall=WALL) is None
    rig.answer(computed(100, 40))
    assert rig.match() == 0
    rig.allocate(0)
    assert rig.server.released == [PEER]
