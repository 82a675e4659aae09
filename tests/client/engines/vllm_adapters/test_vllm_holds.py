"""Calls about holds to servers that are slow, fail, or have only some of the blocks (B2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
from connector_fakes import FULL, FakeClient, make_request, make_step, scheduler_side
from harness.polling import wait_until

from kvtier.client import (
    DeadlineExceeded,
    HandoffDirection,
    HoldGone,
    HoldInfo,
    HoldName,
    InvalidRequest,
    KeyStatus,
    KVTierError,
    Namespace,
    NotClaimedReason,
    NotConnected,
    PublishStatus,
    make_key,
)
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.peers import OWN, Peers, ServerLink
from kvtier.client.engines.vllm.scheduler import hold_calls
from kvtier.client.engines.vllm.scheduler.hold_calls import HoldCalls
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.handoff import ClaimId, FinishedRequest, RemoteRequest
from kvtier.client.offload import CacheGeometry

TABLE = [[1, 2, 3, 4, 5, 6]]
KEYS = [make_key(bytes([number]) * 32) for number in range(6)]
HERE = {"remote_engine_id": "P", "remote_request_id": "p", "remote_host": "unix:/ours", "remote_port": 0}
PREFILLED = {"do_remote_prefill": True, "remote_block_ids": [[0]], **HERE}


class HoldsClient(FakeClient):
    """A server that holds six blocks of a request; `hits` says which it has."""

    def __init__(self, hits: Sequence[bool] = (True,) * 6, before_claim: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.hits, self.before_claim = hits, before_claim
        self.claimed: list[HoldName] = []
        self.wanted: list[dict[str, Any]] = []
        self.renewed: list[HoldName] = []
        self.released_holds: list[HoldName] = []
        self.published: list[str] = []
        self.late_publications = 0
        self.publish_status = PublishStatus.PUBLISHED

    def claim(self, hold: HoldName, **wanted: Any) -> Any:
        self.claimed.append(hold)
        self.wanted.append(wanted)
        self.before_claim()
        number = 1000 + len(self.claimed)
        return SimpleNamespace(
            id=number,
            keys=KEYS,
            statuses=bytes(KeyStatus.HIT if hit else KeyStatus.MISS for hit in self.hits),
            hold=HoldInfo(range(6), 24, HandoffDirection.PREFILL_TO_DECODE, 20.0),
            release=lambda: self.released.append(number),
        )

    def renew_holds(self, *holds: HoldName) -> None:
        self.renewed += holds

    def release_holds(self, *holds: HoldName) -> None:
        self.released_holds += holds

    def publish(self, request_id: str, *_: Any, **__: Any) -> Any:
        if self.late_publications:
            self.late_publications -= 1
            raise DeadlineExceeded("late")
        self.published.append(request_id)
        return SimpleNamespace(status=self.publish_status)


def test_a_part_of_a_hold_is_used_as_far_as_it_goes() -> None:
    """B2.6 A missing block ends the hit; lease and hold are released after the read."""
    client = HoldsClient(hits=[True, True, True, False, True, True])
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (12, True))
        scheduler.blocks_allocated(request, TABLE, 12)
        [load] = scheduler.build_step(make_step({})).loads
        assert [(read.lease_id, read.indices, read.block_ids) for read in load.reads] == [(1001, [0, 1, 2], [1, 2, 3])]
        assert client.released == []
        scheduler.loads_reported(["r"], [])
        wait_until(lambda: client.released == [1001] and client.released_holds == [HoldName("P", "p")])


def test_an_offer_that_was_withdrawn_is_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest match counts: the request then loads stored blocks, and not those of the hold."""
    client = HoldsClient()
    client.keys = set(KEYS)
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        monkeypatch.setattr(scheduler._handoffs._core, "match", lambda *_: 0)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        scheduler.blocks_allocated(request, TABLE, 24)
        [load] = scheduler.build_step(make_step({})).loads
        [read] = load.reads
        assert read.lease_id in range(1, len(client.asked) + 1), "leases of claims have other numbers"
        scheduler.loads_reported(["r"], [])


def hold_calls_of(
    own: HoldsClient, other: HoldsClient | None = None, timeout_s: float = 60.0
) -> tuple[HoldCalls, TransferCounters]:
    """Returns the calls of an engine with its own server, and a listed server of another host."""
    counters = TransferCounters()
    peers: Any = Peers(own, [("unix:/ours", 0)], ["10.0.0.7:7070"], lambda _: other)  # type: ignore[arg-type, return-value]
    return HoldCalls(peers, timeout_s, RateLimitedLog(), counters), counters


def handed_request() -> VllmRequest:
    return VllmRequest(
        make_request(6), RequestRegistration("r"), CacheGeometry((FULL,), 4, 4), may_load=True, may_save=True
    )


def lease_of(number: int) -> Any:
    hold = HoldInfo(range(0), 24, HandoffDirection.PREFILL_TO_DECODE, 20.0)
    return SimpleNamespace(id=number, keys=[], statuses=b"", hold=hold)


@pytest.mark.parametrize(
    ("answer", "host", "outcome"),
    [
        (lease_of(7), "unix:/ours", "granted"),
        (lease_of(0), "unix:/ours", "empty"),
        (HoldGone("gone"), "unix:/ours", "gone"),
        (NotConnected("gone"), "unix:/ours", "unavailable"),
        (None, "unix:/ours", "unavailable"),
        (lease_of(7), "10.0.0.8", "peer_not_listed"),
    ],
)
def test_each_outcome_of_a_claim_is_counted_once(answer: Any, host: str, outcome: str) -> None:
    """A claim that is sent also counts its time. `answer` is None if the server is away."""
    client = HoldsClient()
    client.connected = answer is not None
    client.claim = Mock(side_effect=[answer])  # type: ignore[method-assign]
    client.report_not_claimed = Mock()  # type: ignore[attr-defined]
    calls, counters = hold_calls_of(client)
    remote = RemoteRequest("P", "p", host, 0)
    sent = calls.start_claim(ClaimId(1), handed_request(), remote, [0], 1)
    assert sent is (answer is not None and outcome != "peer_not_listed")
    answers: list[Any] = []
    wait_until(lambda: not sent or answers.extend(calls.answers()) or len(answers) == 1)
    assert [(number, claimed is not None) for number, claimed, _ in answers] == (
        [(1, outcome in ("granted", "empty"))] if sent else []
    )
    if outcome == "peer_not_listed":
        wait_until(lambda: client.report_not_claimed.called)  # type: ignore[attr-defined]
    calls.close()
    stats = counters.take()
    assert stats is not None
    assert len(stats.data.pop("claim_seconds", [])) == int(sent)
    assert stats.data == {f"claims:{outcome}": 1}
    reported = [mock.call(HoldName("P", "p"), request_id="r", reason=NotClaimedReason.PEER_NOT_LISTED)] * (
        outcome == "peer_not_listed"
    )
    assert client.report_not_claimed.mock_calls == reported  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", PublishStatus)
def test_each_outcome_of_a_publication_is_counted(status: PublishStatus) -> None:
    """A hold that the server did not take is published again at the end of the request."""
    client = HoldsClient()
    client.publish = Mock(return_value=SimpleNamespace(status=status))  # type: ignore[method-assign]
    calls, counters = hold_calls_of(client)
    publication: Any = SimpleNamespace(
        request_id="r", keys=KEYS, positions=[1], num_tokens=24, direction="to", hold_for=9.0, refused=None
    )
    calls.publish(publication)
    wait_until(lambda: publication.refused is not None)
    calls.close()
    client.publish.assert_called_once_with("r", KEYS, [1], num_tokens=24, direction="to", hold_for=9.0)
    assert publication.refused is (status is not PublishStatus.PUBLISHED)
    stats = counters.take()
    assert stats is not None
    assert stats.data == {f"publications:{status.name.lower()}": 1}


def test_a_claim_that_was_dropped_in_the_queue_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine no longer waits for it. A claim at another server does not queue behind it."""
    monkeypatch.setattr(hold_calls, "_CLAIM_THREADS", 1)
    gate, other = threading.Event(), HoldsClient()
    own = HoldsClient(before_claim=lambda: wait_until(gate.is_set))
    other.wait_until_connected = Mock()  # type: ignore[attr-defined]
    calls, _ = hold_calls_of(own, other)
    for number, address in ((1, ("unix:/ours", 0)), (2, ("unix:/ours", 0)), (3, ("10.0.0.7", 7070))):
        assert calls.start_claim(ClaimId(number), handed_request(), RemoteRequest("P", "p", *address), [0], 1)
    calls.drop_claim(ClaimId(2))
    answers: list[Any] = []
    wait_until(lambda: answers.extend(calls.answers()) or len(answers) == 1)
    assert [number for number, *_ in answers] == [3]
    gate.set()
    wait_until(lambda: answers.extend(calls.answers()) or len(answers) == 2)
    for number in (1, 3):
        calls.drop_claim(ClaimId(number))
    calls.drop_claim(ClaimId(2))
    wait_until(lambda: (own.released, other.released) == ([1001], [1001]))
    calls.close()
    assert len(own.claimed) == len(other.claimed) == 1
    assert calls._open_claims == {}
    assert other.wait_until_connected.call_count == 1  # type: ignore[attr-defined]


def test_a_claim_whose_time_is_over_does_not_wait() -> None:
    """It still gets the blocks that are stored. The server would refuse a negative time."""
    client = HoldsClient()
    calls, _ = hold_calls_of(client, timeout_s=0.0)
    assert calls.start_claim(ClaimId(1), handed_request(), RemoteRequest("P", "p", "unix:/ours", 0), [0], 1)
    wait_until(lambda: bool(calls.answers()))
    calls.close()
    assert client.wanted[0]["wait"] == 0.0


def test_a_failure_of_an_old_client_says_nothing_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of weights the client of the old namespace is closed while claims wait."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    gate, new = threading.Event(), HoldsClient()

    def fail() -> None:
        wait_until(gate.is_set)
        raise NotConnected("closed")

    calls, _ = hold_calls_of(HoldsClient(before_claim=fail))
    here = RemoteRequest("P", "p", "unix:/ours", 0)
    assert calls.start_claim(ClaimId(1), handed_request(), here, [0], 1)
    calls.use(Peers(new, [("unix:/ours", 0)]))  # type: ignore[arg-type]
    gate.set()
    wait_until(lambda: bool(calls.answers()))
    assert calls.start_claim(ClaimId(2), handed_request(), here, [0], 1)
    wait_until(lambda: bool(new.claimed))
    calls.close()


def test_only_the_own_server_knows_the_request_of_a_claim() -> None:
    """At a peer's server the name could be that of another engine's request."""
    own, other = HoldsClient(), HoldsClient()
    other.wait_until_connected = lambda _: None  # type: ignore[attr-defined]
    calls, _ = hold_calls_of(own, other)
    request = handed_request()
    for number, address in ((1, ("unix:/ours", 0)), (2, ("10.0.0.7", 7070))):
        assert calls.start_claim(ClaimId(number), request, RemoteRequest("P", "p", *address), [3], 2)
    answers: list[Any] = []
    wait_until(lambda: answers.extend(calls.answers()) or len(answers) == 2)
    calls.close()
    names = [client.wanted[0].pop("request_id") for client in (own, other)]
    assert names == ["r", ""]
    for client in (own, other):
        assert 0 < client.wanted[0]["wait"] <= 0.8 * 60.0, "the server answers before the engine gives up"
        assert {name: client.wanted[0][name] for name in ("first_positions", "min_blocks")} == {
            "first_positions": [3],
            "min_blocks": 2,
        }


def test_what_is_about_to_be_pulled_is_kept_alive() -> None:
    """B2.1 A heartbeat with the first step, and none after the pull."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        scheduler.build_step(make_step({}))
        wait_until(lambda: client.renewed == [HoldName("P", "p")])
        scheduler.build_step(make_step({}))
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        assert len(client.renewed) == 1, "every sixth of a lease"


@pytest.mark.parametrize("answered", [True, False])
def test_a_dropped_claim_is_released(*, answered: bool) -> None:
    """B4.3 Whether it was granted before or after its request ended."""
    gate = threading.Event()
    client = HoldsClient(before_claim=lambda: None if answered else wait_until(gate.is_set))
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        if answered:
            wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        else:
            assert scheduler.matched_tokens(request, 0) == (None, False)
            wait_until(lambda: bool(client.claimed))
        scheduler.request_finished(request, [[]])
        gate.set()
        wait_until(lambda: client.released == [1001] and client.released_holds == [HoldName("P", "p")])


@pytest.mark.parametrize(
    ("error", "asks_again"), [(NotConnected("gone"), False), (HoldGone("gone"), True), (InvalidRequest("odd"), True)]
)
def test_a_server_that_fails_is_left_in_peace(monkeypatch: Any, error: KVTierError, *, asks_again: bool) -> None:
    """A failed claim is a miss and opens the circuit, but not a refusal of one request."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)

    def fail() -> None:
        raise error

    client = HoldsClient(before_claim=fail)
    with scheduler_side(client) as (scheduler, _):
        for request_id in ("first", "second"):
            request = make_request(6, request_id, kv_transfer_params=PREFILLED)
            scheduler.new_request(request)
            wait_until(lambda request=request: scheduler.matched_tokens(request, 0) == (0, False))  # type: ignore[misc]
        scheduler._handoffs._calls.renew([RemoteRequest("P", "p", "unix:/ours", 0)])
    assert len(client.claimed) == (2 if asks_again else 1)
    assert len(client.renewed) == (1 if asks_again else 0)


def test_a_publication_that_waits_while_the_weights_change_keeps_its_namespace() -> None:
    """Otherwise blocks of the old weights could be pulled as those of the new ones."""
    old, new, gate = HoldsClient(), HoldsClient(), threading.Event()
    log = RateLimitedLog()
    calls = HoldCalls(Peers(old), 60.0, log, TransferCounters())  # type: ignore[arg-type]
    calls._notify(OWN, lambda: gate.wait(60))
    publication: Any = SimpleNamespace(
        request_id="r", keys=[], positions=[], num_tokens=0, direction=None, hold_for=1.0, refused=False
    )
    calls.publish(publication)
    calls.use(Peers(new))  # type: ignore[arg-type]
    gate.set()
    wait_until(lambda: bool(old.published or new.published))
    calls.close()
    assert (old.published, new.published) == (["r"], [])


@pytest.mark.parametrize("failed", [False, True])
def test_blocks_of_a_pull_are_counted_by_its_outcome(*, failed: bool) -> None:
    counters = TransferCounters()
    with scheduler_side(HoldsClient(), counters=counters, weights_change_on_reset=False) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        scheduler.blocks_allocated(request, TABLE, 24)
        scheduler.build_step(make_step({}))
        assert not scheduler.reset(), "B4.13: workers write into the blocks"
        scheduler.loads_reported(["r"], ["r"] if failed else [])
        assert not scheduler._core._requests["r"].compute_only, "the engine's own server may have the blocks"
        assert scheduler.reset()
    counts = counters.take()
    assert counts is not None
    found = {name: count for name, count in counts.data.items() if name.startswith("pull_blocks")}
    assert found == {f"pull_blocks:{'failed' if failed else 'pulled'}": 6}


def test_after_a_change_of_weights_claims_are_made_in_the_new_namespace() -> None:
    """Holds of the old weights are in another namespace, so that none of them is claimed."""
    old, new = HoldsClient(), HoldsClient()
    new.wait_until_connected = lambda _: None  # type: ignore[attr-defined]
    peers: Any = Peers(new, [("unix:/ours", 0)])  # type: ignore[arg-type]
    namespace = Namespace("model", "float32", ())

    def connect(version: str) -> ServerLink:
        return ServerLink(version, namespace, new, peers)  # type: ignore[arg-type]

    with scheduler_side(old, connect=connect) as (scheduler, _):
        assert scheduler.reset()

        def has_ended() -> bool:
            scheduler.build_step(make_step({}))
            return not scheduler._resetting

        wait_until(has_ended)
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
    assert (old.claimed, new.claimed) == ([], [HoldName("P", "p")])


def test_no_calls_without_a_server() -> None:
    """It is a miss at once."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        client.connected = False
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        assert scheduler.matched_tokens(request, 0) == (0, False)
        client.connected = True
        assert scheduler.matched_tokens(request, 0)[0] in (0, None), "its one transfer is over, the cache is not"
    assert client.claimed == []


@pytest.mark.parametrize(
    ("status", "held"),
    [
        ("FINISHED_STOPPED", True),
        ("FINISHED_LENGTH_CAPPED", True),
        ("FINISHED_ABORTED", False),
        ("FINISHED_IGNORED", False),
        ("FINISHED_ERROR", False),
        ("FINISHED_REPETITION", False),
    ],
)
def test_normal_ends(status: str, *, held: bool) -> None:
    """B2.16 Two of vLLM's finish reasons are normal."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24)
        request.status = SimpleNamespace(name=status)
        scheduler.new_request(request)
        scheduler.blocks_allocated(request, TABLE, 0)
        assert (scheduler.request_finished(request, TABLE) is not None) is held
        saves = [key for save in scheduler.build_step(make_step({})).saves for key in save.keys]
        assert saves == (KEYS if held else []), "any other end drops what is not stored yet"
    assert client.published == (["r"] if held else [])


def test_all_held_blocks_are_offered_once_more() -> None:
    """B2.17 Blocks that the server does not have are published as pending ones."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True})
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (0, False))
        scheduler.blocks_allocated(request, TABLE, 0)
        wait_until(lambda: not scheduler._requests["r"].registration.voting)
        [first] = scheduler.build_step(make_step({"r": TABLE}, r=24)).saves
        assert first.keys == KEYS
        scheduler.saves_reported(WorkerReport({first.job_id: 1}, {first.job_id: {1, 4}}))
        request.num_computed_tokens = 24
        assert scheduler.request_finished(request, TABLE) is not None
        saves = scheduler.build_step(make_step({})).saves
        assert sorted(key for save in saves for key in save.keys) == sorted(KEYS)


@pytest.mark.parametrize("flagged", [True, False])
def test_a_hand_off_is_stored_in_every_role(*, flagged: bool) -> None:
    """B2.8 A request that is handed on is saved step by step, also by a mere consumer."""
    client = HoldsClient()
    with scheduler_side(client, may_save=False) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True} if flagged else None)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (0, False))
        scheduler.blocks_allocated(request, TABLE, 0)
        wait_until(lambda: not scheduler._requests["r"].registration.voting)
        saves = scheduler.build_step(make_step({"r": TABLE}, r=12)).saves
        assert [save.keys for save in saves] == ([KEYS[:3]] if flagged else [])


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({"num_output_placeholders": 4}, 20), ({"num_tokens": 20, "num_output_placeholders": 0}, 20), ({}, 24)],
)
def test_only_what_is_confirmed_is_held(fields: dict[str, int], tokens: int) -> None:
    """B2.18, B4.6 Tokens that are only scheduled, and drafts behind the end, are excluded."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24, **fields)
        scheduler.new_request(request)
        scheduler.blocks_allocated(request, TABLE, 0)
        params = scheduler.request_finished(request, TABLE)
        assert (params["remote_num_tokens"], params["remote_block_ids"]) == (tokens, [list(range(tokens // 4))])
        saves = [key for save in scheduler.build_step(make_step({})).saves for key in save.keys]
        assert saves == KEYS[: tokens // 4]


@pytest.mark.parametrize(("computed", "state"), [(24, 24), (25, 25), (26, None)])
def test_a_state_with_tokens_after_the_end_is_not_held(monkeypatch: Any, computed: int, state: int | None) -> None:
    """An asynchronous scheduler may have begun a step more than the request of 25 tokens needed."""
    with scheduler_side(HoldsClient()) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=computed)
        scheduler.new_request(request)
        finished = Mock(return_value=FinishedRequest())
        monkeypatch.setattr(scheduler._handoffs._core, "finished", finished)
        scheduler.request_finished(request, TABLE)
    assert finished.call_args.args[-1] == state


def test_nothing_is_pulled_or_held_that_is_about_to_be_forgotten() -> None:
    """B4.13 During a reset nothing is pulled, because held blocks may be of changed weights."""
    gate = threading.Event()
    client = HoldsClient()
    client.resets = [lambda: wait_until(gate.is_set) or 0]
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=PREFILLED)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
        assert scheduler.reset()
        assert scheduler.matched_tokens(request, 0) == (0, False)
        last = make_request(6, "last", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24)
        scheduler.new_request(last)
        scheduler.blocks_allocated(last, TABLE, 0)
        assert scheduler.request_finished(last, TABLE) is None
        gate.set()
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (24, True))
    assert client.published == []


def test_claims_behind_one_that_fails_are_not_made(monkeypatch: Any) -> None:
    """Each of them would wait as long."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    monkeypatch.setattr(hold_calls, "_CLAIM_THREADS", 1)
    gate = threading.Event()

    def fail() -> None:
        wait_until(gate.is_set)
        raise NotConnected("gone")

    client = HoldsClient(before_claim=fail)
    with scheduler_side(client) as (scheduler, _):
        requests = [make_request(6, f"r{number}", kv_transfer_params=PREFILLED) for number in range(3)]
        for request in requests:
            scheduler.new_request(request)
            assert scheduler.matched_tokens(request, 0) == (None, False)
        gate.set()
        for request in requests:
            wait_until(lambda request=request: scheduler.matched_tokens(request, 0) == (0, False))  # type: ignore[misc]
            scheduler.blocks_allocated(request, TABLE, 0)
        assert len(client.claimed) == 1
        wait_until(lambda: len(client.released_holds) == 3)  # peers are told all the same
        done = make_request(6, "done", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24)
        scheduler.new_request(done)
        scheduler.blocks_allocated(done, TABLE, 0)
        assert scheduler.request_finished(done, TABLE) is not None
        wait_until(lambda: client.published == ["done"])


def test_a_publication_that_was_late_is_made_once_more() -> None:
    """B2.17 The other engine would wait for it; a repeated publication is one hold."""
    client = HoldsClient()
    client.late_publications = 1
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24)
        scheduler.new_request(request)
        scheduler.blocks_allocated(request, TABLE, 0)
        scheduler.request_finished(request, TABLE)
        wait_until(lambda: client.published == ["r"])


@pytest.mark.parametrize("failure", [None, "no room", "no answer", "not called"])
def test_an_early_publication_that_failed_is_repeated_at_the_end(monkeypatch: Any, failure: str | None) -> None:
    """Also if the call waited too long behind others. A published hold is not published twice."""
    client = HoldsClient()
    client.publish_status = PublishStatus.NO_ROOM if failure == "no room" else PublishStatus.PUBLISHED
    client.late_publications = 2 if failure == "no answer" else 0
    with scheduler_side(client) as (scheduler, _), monkeypatch.context() as early:
        if failure == "not called":
            early.setattr(hold_calls, "_NOTIFY_WITHIN_S", -1.0)
        params = {"do_remote_decode": True, "remote_overlap": True}
        request = make_request(6, kv_transfer_params=params, num_computed_tokens=24, num_prompt_tokens=24)
        scheduler.new_request(request)
        publication = scheduler._handoffs._core._requests["r"].publication
        wait_until(lambda: publication.refused if failure else client.published == ["r"])
        early.undo()
        client.published.clear()
        client.publish_status = PublishStatus.PUBLISHED
        scheduler.blocks_allocated(request, TABLE, 0)
        assert scheduler.request_finished(request, TABLE) is not None
        wait_until(lambda: client.renewed or client.published)
        assert client.published == (["r"] if failure else [])


def test_a_defect_in_handing_over_does_not_keep_a_request_from_ending(monkeypatch: Any) -> None:
    """The hook does not raise; the server learns of the end, and the request is forgotten."""
    client = HoldsClient()
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=24)
        scheduler.new_request(request)
        scheduler.blocks_allocated(request, TABLE, 0)

        def fail(*_: object, **__: object) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(scheduler._handoffs, "finished", fail)
        with pytest.raises(KeyError):
            scheduler.request_finished(request, TABLE)
        assert not scheduler.build_step(make_step({})).saves, "workers may still write into the blocks"
        wait_until(lambda: client.finished == ["r"])
        assert scheduler._core._requests == {}


def test_only_blocks_that_the_other_engine_may_still_store_are_pending() -> None:
    """B2.17 A pull waits for them. It does not wait for blocks that the server will never have."""
    statuses = bytes([KeyStatus.HIT, KeyStatus.HIT_PENDING, KeyStatus.MISS])
    hold = HoldInfo(range(3), 12, HandoffDirection.PREFILL_TO_DECODE, 20.0)
    lease: Any = SimpleNamespace(id=7, keys=KEYS[:3], statuses=statuses, hold=hold)
    claimed = hold_calls._claimed(lease)
    assert claimed is not None
    assert [(block.item, block.is_pending) for block in claimed.blocks] == [(0, False), (None, True), (None, False)]
