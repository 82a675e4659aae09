"""Negotiation of a request's policy, its cascades, and the calls of tiers at its end."""

from typing import Any

import pytest
from core_rig import GRANTED, PRESENT, Rig, keys
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.errors import LimitExceeded
from kvtier.tiers.negotiation import DEFAULT_RULES, Rule, vote
from kvtier.tiers.secondary_tier import NamespaceId, OffloadPolicy, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.stats import request_log
from kvtier.tiers.stats.request_log import MAX_OUTCOME_RUNS

BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


class RequestLevelTier(ModelTier):
    """Votes for every block of every request."""

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.begun.append(request.request_id)
        return Vote(REQUEST, "always")


def begin(rig: Rig, request_id: str = "r", **params: Any) -> OffloadPolicy:
    info = RequestInfo(request_id, rig.session.namespace.id, kv_transfer_params=params)
    return rig.core.begin_request(rig.session, info).policy


def stores(rig: Rig) -> list[StoreInTier]:
    return [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]


def done(rig: Rig, job: StoreInTier, outcome: Outcome = Outcome.DONE) -> None:
    rig.core.job_finished(job.job_id, [outcome] * len(job.blocks))


def settle(rig: Rig) -> None:
    """Ends jobs until none is left."""
    while jobs := stores(rig):
        for job in jobs:
            done(rig, job)


def prepare(rig: Rig, names: list[bytes], request_id: str = "r") -> Any:
    return run_to_end(
        rig.core.prepare_store(rig.session, names, StoreSpec(request_id=request_id, lease_seconds=60), now=0)
    )


@pytest.mark.parametrize(
    ("params", "policy"),
    [
        ({}, BLOCK),
        ({"do_remote_decode": False}, BLOCK),
        ({"do_remote_prefill": True}, BLOCK),
        ({"do_remote_decode": True}, REQUEST),
        ({"do_remote_decode": 1, "remote_host": "p"}, REQUEST),
        ({"do_remote_decode": "yes"}, REQUEST),
        ({"do_remote_decode": ""}, BLOCK),
        ({"offload_policy": "request_level"}, REQUEST),
        ({"offload_policy": "block_level"}, BLOCK),
        ({"offload_policy": True}, BLOCK),
    ],
)
def test_do_remote_decode_is_one_cause_of_request_level(params: dict[str, object], policy: OffloadPolicy) -> None:
    """B1.2, B1.6, B3.1: if absent, empty or falsy the request is ordinary.

    Truthy means every block.
    """
    rig = Rig(ModelTier("near", 1 << 20))
    assert begin(rig, **params) is policy


def test_rules_vote_by_tenant_length_and_priority() -> None:
    """The first rule whose conditions all match decides, and gives the reason."""
    rules = (
        Rule(BLOCK, "short", tenant="a", min_priority=5),
        Rule(REQUEST, "long prompts", min_prompt_tokens=100, tenant="a"),
        *DEFAULT_RULES,
    )

    def of(**fields: Any) -> Vote:
        return vote(rules, RequestInfo("r", Rig().session.namespace.id, **fields))

    assert of(tenant="a", prompt_tokens=100) == Vote(REQUEST, "long prompts")
    assert of(tenant="a", prompt_tokens=100, priority=5) == Vote(BLOCK, "short")
    assert of(tenant="b", prompt_tokens=100) == Vote(BLOCK, "the default")
    assert of(tenant="a", prompt_tokens=99, kv_transfer_params={"do_remote_decode": True}).policy is REQUEST


class MinimalTier(ModelTier):
    """Implements only the abstract methods."""

    on_request_finished = SecondaryTier.on_request_finished


def test_every_tier_must_vote() -> None:
    """B3.2: a tier class without `on_new_request` cannot be instantiated.

    `on_request_finished` is optional.
    """
    assert "on_new_request" in SecondaryTier.__abstractmethods__
    voiceless = type("Voiceless", (ModelTier,), {"on_new_request": SecondaryTier.on_new_request})
    with pytest.raises(TypeError, match="on_new_request"):
        voiceless("near", 1 << 20)
    assert "on_request_finished" not in SecondaryTier.__abstractmethods__
    rig = Rig(MinimalTier("near", 1 << 20))
    begin(rig)
    assert rig.core.finish_request(rig.session, "r").settled


def test_a_block_level_request_is_not_tracked() -> None:
    """B3.3: it waits for no block and ends when it is finished."""
    calm = ModelTier("calm", 1 << 20)
    rig = Rig(calm)
    rig.store(keys(0))
    prepare(rig, keys(1), request_id="")
    begin(rig)
    prepare(rig, keys(0, 1))
    request = rig.core._requests.get(rig.session.engine, "r")
    assert (request.request_level_tiers, request.waiting, request.pending_stores) == (frozenset(), set(), 0)
    rig.core.finish_request(rig.session, "r")
    assert calm.finished == ["r"]


def test_one_vote_makes_a_request_request_level() -> None:
    """B3.3: only the tiers with that vote are tracked."""
    rig = Rig(ModelTier("calm", 1 << 20), RequestLevelTier("eager", 1 << 20))
    assert begin(rig) is REQUEST
    request = rig.core._requests.get(rig.session.engine, "r")
    assert request.request_level_tiers == {2}
    assert begin(Rig(ModelTier("calm", 1 << 20))) is BLOCK


def test_present_blocks_cascade_to_request_level_tiers_only() -> None:
    """B3.6: at once; the CPU tier is not written again."""
    calm, eager = ModelTier("calm", 1 << 20), RequestLevelTier("eager", 1 << 20)
    rig = Rig(calm, eager, queue=4096)
    rig.store(keys(0, 1))
    for job in stores(rig):
        done(rig, job, Outcome.FAILED)
    settle(rig)
    begin(rig)
    assert prepare(rig, keys(0, 1)).statuses == PRESENT * 2
    (job,) = stores(rig)
    assert job.tier == 2
    assert [block.key for block in job.blocks] == keys(0, 1)


def test_a_block_level_request_cascades_new_blocks_only() -> None:
    """B1.4: present blocks stay where they are."""
    rig = Rig(ModelTier("calm", 1 << 20))
    rig.store(keys(0, 1))
    for job in stores(rig):
        done(rig, job, Outcome.FAILED)
    rig.core.take_commands()
    begin(rig)
    prepare(rig, keys(0, 1))
    assert stores(rig) == []


def test_new_blocks_go_to_all_tiers_when_the_store_completes() -> None:
    """B3.7: a request-level vote of one tier does not affect the others."""
    rig = Rig(ModelTier("calm", 1 << 20), RequestLevelTier("eager", 1 << 20))
    begin(rig)
    answer = prepare(rig, keys(0))
    assert stores(rig) == []
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    assert sorted(job.tier for job in stores(rig)) == [1, 2]


def test_a_block_that_another_request_stores_is_awaited() -> None:
    """B3.9: it is parked until that store ends, and then cascades for this request as well."""
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    other = prepare(rig, keys(0), request_id="")
    begin(rig)
    prepare(rig, keys(0))
    rig.core.finish_request(rig.session, "r")
    assert eager.finished == [], "something is parked"
    run_to_end(rig.core.complete_store(rig.session, other.store_id))
    assert eager.finished == [], "the block is being stored"
    settle(rig)
    assert eager.finished == ["r"]


def test_an_awaited_block_whose_store_fails_is_dropped() -> None:
    """B3.9: the request ends as incomplete."""
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    other = prepare(rig, keys(0), request_id="")
    begin(rig)
    prepare(rig, keys(0))
    request = rig.core.finish_request(rig.session, "r")
    run_to_end(rig.core.complete_store(rig.session, other.store_id, failed=[0]))
    assert eager.finished == ["r"]
    assert (request.settled, request.incomplete) == (True, 1)


def test_backpressure_makes_a_request_level_request_incomplete() -> None:
    """B3.10: a request-level tier has a longer queue.

    Blocks beyond it make the request incomplete.
    """
    rig = Rig(RequestLevelTier("eager", 1 << 20), queue=4 * 4096)
    begin(rig)
    answer = prepare(rig, keys(*range(10)))
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    request = rig.core.finish_request(rig.session, "r")
    assert (request.pending_stores, request.incomplete) == (8, 2)
    assert rig.core.stats().tiers[1].dropped >= 2
    settle(rig)
    assert request.settled


def test_a_failed_cascade_makes_the_request_incomplete() -> None:
    """B3.10: the engine can learn it."""
    rig = Rig(RequestLevelTier("eager", 1 << 20))
    begin(rig)
    answer = prepare(rig, keys(0, 1))
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    request = rig.core.finish_request(rig.session, "r")
    (job,) = stores(rig)
    rig.core.job_finished(job.job_id, [Outcome.DONE, Outcome.NO_SPACE])
    assert (request.settled, request.incomplete) == (True, 1)


def test_tiers_see_the_end_once_and_last() -> None:
    """B3.11, B3.12: after all stores and cascades of the request, with no submit afterwards."""
    known: list[bool] = []

    class CheckingTier(RequestLevelTier):
        def on_request_finished(self, request_id: str) -> None:
            super().on_request_finished(request_id)
            known.append(rig.core._requests.get(rig.session.engine, "r") is not None)

    eager = CheckingTier("eager", 1 << 20)
    rig = Rig(eager)
    begin(rig)
    answer = prepare(rig, keys(0, 1))
    rig.core.finish_request(rig.session, "r")
    assert eager.finished == [], "a store is in flight"
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    assert eager.finished == [], "blocks are on their way"
    settle(rig)
    assert eager.finished == ["r"]
    assert known == [True], "its state is dropped afterwards"
    assert not rig.core._requests._requests
    rig.core.close_session(rig.session.id)
    assert eager.finished == ["r"]
    assert stores(rig) == []


def test_a_failed_store_completes_its_request() -> None:
    """B3.7, B3.12: the request ends, and no block of the store exists."""
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    begin(rig)
    answer = prepare(rig, keys(0, 1))
    rig.core.finish_request(rig.session, "r")
    run_to_end(rig.core.complete_store(rig.session, answer.store_id, failed=[0, 1]))
    assert eager.finished == ["r"]
    assert stores(rig) == []


def test_an_unannounced_request_gets_both_calls_in_order() -> None:
    """B3.13: its tiers see the begin and the end."""
    order: list[str] = []

    class RecordingTier(ModelTier):
        def on_new_request(self, request: RequestInfo) -> Vote:
            order.append(f"new {request.request_id}")
            return Vote(BLOCK, "")

        def on_request_finished(self, request_id: str) -> None:
            order.append(f"finished {request_id}")

    rig = Rig(RecordingTier("near", 1 << 20))
    rig.core.finish_request(rig.session, "r")
    assert order == ["new r", "finished r"]


def test_requests_of_an_ended_session_end() -> None:
    """Its stores are aborted, its awaited blocks dropped, and its tiers told once.

    The request log counts the awaited blocks as incomplete.
    """
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    other = rig.open("other")
    answer = run_to_end(rig.core.prepare_store(other, keys(0), StoreSpec(lease_seconds=60), now=0))
    begin(rig)
    prepare(rig, keys(0, 1))
    rig.core.close_session(rig.session.id)
    assert eager.finished == ["r"]
    [record] = rig.core._request_log.find("r")
    assert record.incomplete == 1, "the block that the other client still writes"
    run_to_end(rig.core.complete_store(other, answer.store_id))
    assert not rig.core._requests._requests


def test_a_request_id_may_be_reused_before_it_has_settled() -> None:
    """Each of the two ends once, with its own stores."""
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    begin(rig)
    first = prepare(rig, keys(0))
    rig.core.finish_request(rig.session, "r")
    begin(rig)
    run_to_end(rig.core.complete_store(rig.session, first.store_id))
    settle(rig)
    assert eager.finished == ["r"]
    rig.core.finish_request(rig.session, "r")
    assert eager.finished == ["r", "r"] == eager.begun


def test_a_queued_cascade_pins_its_block() -> None:
    """B3.8: from the queue until the end of its job."""
    rig = Rig(RequestLevelTier("eager", 1 << 20), queue=EXTENT)
    begin(rig)
    answer = prepare(rig, keys(*range(16)))
    assert answer.statuses == GRANTED * 16
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    assert all(block.pins for block in rig.core._cpu_tier.blocks_of(rig.session.namespace.id).values())
    settle(rig)
    assert not any(block.pins for block in rig.core._cpu_tier.blocks_of(rig.session.namespace.id).values())


def requests_open_in_policies(rig: Rig) -> int:
    """Returns how many requests the eviction policies of all tiers take for unfinished."""
    tiers = [rig.core._cpu_tier, *(secondary.catalog for secondary in rig.core._tier_jobs.secondaries)]
    queues = [queue for tier in tiers for queue in tier.queues._queues.values()]  # type: ignore[attr-defined]
    return sum(len(queue.policy._requests._open) for queue in queues)


def test_policies_forget_the_requests_of_an_ended_session() -> None:
    """An engine that was killed does not finish its requests."""
    rig = Rig(ModelTier("near", 1 << 20))
    begin(rig)
    assert prepare(rig, keys(1, 2)).statuses == GRANTED * 2
    run_to_end(rig.core.complete_store(rig.session, prepare(rig, keys(3)).store_id))
    settle(rig)
    assert requests_open_in_policies(rig) > 0
    rig.core.close_session(rig.session.id)
    settle(rig)
    assert requests_open_in_policies(rig) == 0


def test_policies_forget_a_request_whose_stores_end_after_it() -> None:
    """The cascade at the end of a store is a use by the request."""
    rig = Rig(ModelTier("near", 1 << 20))
    begin(rig)
    store = prepare(rig, keys(1, 2)).store_id
    rig.core.finish_request(rig.session, "r")
    run_to_end(rig.core.complete_store(rig.session, store))
    settle(rig)
    assert requests_open_in_policies(rig) == 0


def test_a_tenant_with_many_requests_keeps_those_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator can still explain them."""
    monkeypatch.setattr(request_log, "MAX_REQUESTS", 8)
    log = request_log.RequestLog()
    zeta, acme = (NamespaceId(tag * 32) for tag in (b"z", b"a"))
    for number in range(3):
        log.open((zeta, "e"), f"z{number}", number)
    for number in range(50):
        log.open((acme, "e"), f"a{number}", 10 + number)
    assert [bool(log.find(f"z{number}")) for number in range(3)] == [True] * 3
    assert [number for number in range(50) if log.find(f"a{number}")] == [45, 46, 47, 48, 49]
    log.open((acme, "other"), "z0", 100)
    assert [record.engine for record in log.find("z0")] == [(acme, "other"), (zeta, "e")]
    log.tick(2000)
    assert (log.find("z0"), len(log._records)) == ([], 0)


def test_a_refused_request_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """B3.12: no tier sees its begin; the end of an unannounced request is always accepted."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 1)
    near = ModelTier("near", 1 << 20)
    rig = Rig(near)
    begin(rig, "a")
    with pytest.raises(LimitExceeded):
        begin(rig, "b")
    assert near.begun == ["a"]
    rig.core.finish_request(rig.session, "c")
    assert (near.begun, near.finished) == (["a", "c"], ["c"])


def test_finishing_twice_keeps_the_explanation() -> None:
    """The client repeats the call because the first answer was lost."""
    rig = Rig()
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0))
    for _ in range(2):
        rig.core.finish_request(rig.session, "r")
    [record] = rig.core.explain("r")
    assert len(record.lookups) == 1


def test_the_record_of_a_lookup_is_bounded() -> None:
    """Also for mixed answers; the counts are exact."""
    rig = Rig(extents=64)
    rig.store(keys(*range(0, 1000, 2)))
    run_to_end(
        rig.core.lookup(
            rig.session, keys(*range(1000)), LookupSpec(prefix=False, request_id="mixed", lease_seconds=60), now=0
        )
    )
    [record] = rig.core.explain("mixed")
    spans = record.lookups[-1].outcomes()
    assert len(spans) <= MAX_OUTCOME_RUNS + 2
    assert sum(span.count for span in spans) == 1000
    assert sum(span.count for span in spans if span.outcome == 0) == 500


def test_an_awaited_block_that_its_tiers_have_already_ends_the_request() -> None:
    """The tier has kept the block from an earlier store, so nothing is stored for this request."""
    eager = RequestLevelTier("eager", 1 << 20)
    rig = Rig(eager)
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    other = prepare(rig, keys(0), request_id="")
    begin(rig)
    prepare(rig, keys(0))
    request = rig.core.finish_request(rig.session, "r")
    assert not request.settled, "the block is parked"
    run_to_end(rig.core.complete_store(rig.session, other.store_id))
    assert eager.finished == ["r"]
    assert (request.settled, request.incomplete) == (True, 0)
