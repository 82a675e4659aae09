"""Transfer of a request: when it is queued, when the peer is told, and never a second one."""

from __future__ import annotations

import pytest
from peers import PEER, REMOTE, US, Rig, answered, prefilled

from kvtier.client.handoff import FinishReason, RemoteRequest
from kvtier.client.handoff.claims import TransferState

BOTH = {"bidirectional_kv_xfer": True}


@pytest.mark.parametrize(
    ("params", "both", "expected"),
    [
        ({"do_remote_decode": True}, False, True),
        ({"do_remote_decode": True}, True, True),
        (prefilled(), False, False),
        (prefilled(), True, True),
        ({"something": "else"}, True, False),
        ({}, True, False),
        (None, True, False),
    ],
)
def test_who_joins_the_batch(params: object, both: bool, expected: bool) -> None:  # noqa: FBT001 - a table
    """B2.8: iff do_remote_decode, or do_remote_prefill and bidirectional; after scheduling."""
    rig = Rig(params, bidirectional_kv_xfer=both)
    assert rig.finish().params is None
    rig = Rig(params, bidirectional_kv_xfer=both)
    rig.allocate()
    assert (rig.finish().params is not None) is expected


@pytest.mark.parametrize(
    ("params", "both", "queued"),
    [
        (prefilled(), False, True),
        (prefilled(), True, True),
        (answered(80), True, True),
        (answered(80), False, False),
        ({"do_remote_decode": True}, True, False),
    ],
)
def test_what_is_pulled(params: dict[str, object], both: bool, queued: bool) -> None:  # noqa: FBT001 - a table
    """B2.9: iff do_remote_prefill, or do_remote_decode and bidirectional."""
    rig = Rig(params, bidirectional_kv_xfer=both)
    if queued:
        tokens = 100 if params["do_remote_prefill"] else 80
        assert rig.pulled(tokens) == tokens
        rig.allocate(tokens)
        (pull,) = rig.core.take_pulls()
        assert (pull.remote, len(pull.job.reads)) == (PEER, 1)
    else:
        assert rig.match() == 0
        rig.allocate()
        assert rig.core.take_pulls() == []
        assert rig.server.released == []


@pytest.mark.parametrize("params", [prefilled(), answered(100)])
def test_exactly_one_transfer_per_request(params: dict[str, object]) -> None:
    """B2.10: after its load or a preemption it is computed, without another claim."""
    rig = Rig(params, **BOTH)
    rig.pulled(100)
    rig.allocate(100)
    assert rig.transfer is TransferState.PULLING
    assert rig.match() == 0, "while workers copy"
    rig.core.pull_ended("r")
    rig.allocate(0)
    for _ in range(3):
        assert rig.match() == 0
        rig.allocate(0)
    assert len(rig.core.take_pulls()) == 1
    assert len(rig.server.claims) == 1
    assert (rig.server.released, rig.server.dropped) == ([PEER], [1])


def test_a_full_local_hit_frees_the_peers_blocks() -> None:
    """B2.11: nothing is transferred, and the peer is told once."""
    rig = Rig(prefilled())
    assert rig.match(100) == 0
    rig.allocate(0)
    rig.allocate(0)
    assert rig.core.take_pulls() == []
    assert rig.server.released == [PEER]


def test_too_few_tokens_free_the_peers_blocks() -> None:
    """B2.4 B2.11: they are computed; the decode engine does not hold them for eight minutes."""
    rig = Rig(answered(48), **BOTH)
    assert rig.match() == 0
    rig.allocate(0)
    assert rig.server.released == [PEER]
    assert rig.match() == 0


def test_an_offer_that_the_engine_does_not_take_is_released() -> None:
    """B2.11: it has found the tokens itself meanwhile."""
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.allocate(0)
    assert (rig.server.released, rig.server.dropped) == ([PEER], [1])


@pytest.mark.parametrize("params", [prefilled(), answered(80)])
@pytest.mark.parametrize("key", REMOTE)
def test_missing_keys_are_a_warning(params: dict[str, object], key: str) -> None:
    """B2.12: no transfer, no exception, and one warning."""
    rig = Rig({name: value for name, value in params.items() if name != key}, **BOTH)
    rig.match()
    rig.allocate(0)
    rig.allocate(0)
    assert rig.core.take_pulls() == []
    assert len(rig.server.warned) == 1
    assert rig.server.released == []


def test_parameters_may_state_that_there_is_no_peer() -> None:
    """B2.8: all four keys are None (no prefill engine). No warning; the request is held."""
    rig = Rig(prefilled(**dict.fromkeys(REMOTE)), **BOTH)
    assert rig.match() == 0
    rig.allocate(0)
    assert (rig.server.warned, rig.server.released) == ([], [])
    assert rig.finish(100).params is not None


def test_tokens_that_were_never_offered_fail_their_load() -> None:
    """B2.12: the engine waits for a load, so a pull without reads is reported as failed."""
    rig = Rig(prefilled())
    rig.core.allocated("r", rig.tables(), 48)
    rig.core.allocated("unknown", rig.tables(), 48)
    assert [(pull.job.request_id, pull.job.reads) for pull in rig.core.take_pulls()] == [
        ("r", []),
        ("unknown", []),
    ]
    assert rig.transfer is TransferState.PULLING
    rig.core.pull_ended("r")
    assert rig.server.released == [PEER]
    assert rig.match() == 0


def test_a_pull_that_cannot_be_planned_fails_its_load() -> None:
    """B2.10 B2.12: it costs one recomputation: the load ends, and the peer is told."""
    rig = Rig(prefilled())
    rig.pulled(100)
    with pytest.raises(IndexError):
        rig.core.allocated("r", [], 100)
    assert (rig.transfer, rig.core.pending) == (TransferState.PULLING, True)
    assert [(pull.remote, pull.job.reads) for pull in rig.core.take_pulls()] == [(PEER, [])]
    rig.core.pull_ended("r")
    assert (rig.transfer, rig.server.released, rig.core.pending) == (TransferState.OVER, [PEER], False)


def test_a_failed_pull_is_not_repeated() -> None:
    """B2.10: its blocks are computed, and the peer is told."""
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.allocate(100)
    rig.core.take_pulls()
    assert rig.core.pending
    rig.core.pull_ended("r")
    assert rig.server.released == [PEER]
    assert not rig.core.pending
    assert rig.match() == 0


def test_other_loads_do_not_end_the_transfer() -> None:
    """Engines report loads of the offload core the same way; the pull stays planned."""
    rig = Rig(prefilled())
    rig.core.pull_ended("r")
    assert (rig.transfer, rig.server.released) == (TransferState.WANTED, [])
    assert rig.pulled(100) == 100
    rig.core.pull_ended("r")
    assert (rig.transfer, rig.server.released) == (TransferState.CLAIMED, [])


def test_nothing_is_read_after_the_transfer() -> None:
    """B2.10: if the engine still expects a load, the plan has one that fails."""
    rig = Rig(prefilled())
    rig.pulled(100)
    rig.allocate(100)
    rig.core.take_pulls()
    rig.core.pull_ended("r")
    assert not rig.core.pending
    rig.allocate(100)
    assert rig.core.pending
    assert [(pull.remote, pull.job.reads) for pull in rig.core.take_pulls()] == [(None, [])]
    assert (rig.transfer, rig.server.released) == (TransferState.OVER, [PEER])


def test_the_engine_may_take_less_than_was_offered() -> None:
    """Only the blocks allocated for these tokens are filled."""
    rig = Rig(prefilled())
    rig.pulled(100, 16)
    rig.core.allocated("r", rig.tables(), 32)
    (pull,) = rig.core.take_pulls()
    assert [read.block_ids for read in pull.job.reads] == [[2, 3]]


def test_a_request_renews_the_hold_until_its_pull_ends() -> None:
    """B2.1: a heartbeat at its arrival and every sixth of a lease; one call for all requests."""
    rig = Rig(prefilled())
    rig.core.heartbeat(0.0)
    rig.core.heartbeat(4.9)
    assert rig.server.renewed == [[PEER]]
    rig.core.heartbeat(5.0)
    assert rig.server.renewed == [[PEER]] * 2
    other = Rig(prefilled(remote_request_id="another"), arrives=False).request
    other.request_id = "r2"
    rig.core.arrived(other)
    both = [PEER, RemoteRequest(PEER.engine_id, "another", PEER.host, PEER.port)]
    rig.core.heartbeat(5.1)
    assert rig.server.renewed[2:] == [both[1:]], "the older request already had its heartbeat"
    rig.pulled(100)
    rig.allocate(100)
    rig.core.heartbeat(9.9)
    assert len(rig.server.renewed) == 3
    rig.core.heartbeat(10.1)
    assert rig.server.renewed[-1] == both
    rig.core.pull_ended("r")
    rig.core.heartbeat(15.1)
    assert rig.server.renewed[-1] == both[1:]


def test_each_step_renews_only_the_holds_of_new_requests() -> None:
    """B2.1: a busy engine has an arrival in every step, and hundreds of waiting requests."""
    rig = Rig(prefilled())
    for step in range(40):
        other = Rig(prefilled(remote_request_id=f"{step}"), arrives=False).request
        other.request_id = f"r{step}"
        rig.core.arrived(other)
        rig.core.heartbeat(step / 10)
    assert [len(renewed) for renewed in rig.server.renewed] == [2, *[1] * 39]
    rig.core.heartbeat(5.0)
    assert len(rig.server.renewed[-1]) == 41


def test_one_heartbeat_for_a_hold_of_several_requests() -> None:
    """B2.1: samples of one prompt name the same remote request."""
    rig = Rig(prefilled())
    other = Rig(prefilled(), arrives=False).request
    other.request_id = "r2"
    rig.core.arrived(other)
    rig.core.heartbeat(0.0)
    assert rig.server.renewed == [[PEER]]


def test_requests_without_a_pull_send_no_heartbeat() -> None:
    """Neither a request that is only held, nor one that has ended."""
    rig = Rig({"do_remote_decode": True})
    rig.core.heartbeat(0.0)
    rig = Rig(prefilled())
    rig.finish(0, FinishReason.OTHER, tables=[[]])
    rig.core.heartbeat(0.0)
    rig.core.arrived(rig.request)
    rig.finish(0, FinishReason.OTHER, tables=[[]])
    rig.core.heartbeat(0.1)
    assert rig.server.renewed == []


def test_an_early_hold_that_was_released_is_not_renewed() -> None:
    """B2.16: its request ended while workers pulled. The peer's hold is renewed until they end."""
    rig = Rig(answered(80, remote_overlap=True), bidirectional_kv_xfer=True)
    assert rig.pulled(80) == 80
    rig.allocate(80)
    rig.core.heartbeat(0.0)
    own = RemoteRequest(US.engine_id, rig.request.hold_name, US.host, US.port)
    assert rig.server.renewed == [[PEER, own]]
    rig.finish()
    assert rig.server.released == [own]
    rig.core.heartbeat(1000.0)
    assert rig.server.renewed[1:] == [[PEER]]
