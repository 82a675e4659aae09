"""Which of a request's blocks the vLLM connector offers, depending on the tiers' votes (B1)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import (
    FULL,
    PAGE,
    FakeClient,
    FakeTransfers,
    close_when_idle,
    make_request,
    make_step,
    reset_pending,
    scheduler_side,
)
from harness.polling import wait_until
from server_process import ServerProcess

from kvtier.client import Client, Group, InvalidRequest, Namespace, NotConnected, OffloadPolicy, Timeouts, make_key
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.reports import WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import SaveJob

FLAG = {"do_remote_decode": True}
TABLE = [[1, 2, 3, 4, 5, 6]]
BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


def _keys(count: int) -> list[bytes]:
    return [make_key(bytes([number]) * 32, 0) for number in range(count)]


def _offered(scheduler: SchedulerSide, output: Any) -> list[bytes]:
    """Builds a step. Returns the keys of its saves, without saves of held blocks; all succeed."""
    saves = scheduler.build_step(output).saves
    for save in saves:
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))
    return [key for save in saves if save.request_id for key in save.keys]


def _prefill(scheduler: SchedulerSide, request: Any, hit: int, *, ahead: int = 0) -> list[bytes]:
    """Runs a request as vLLM does: lookup, load, compute in one step. Returns the offered keys.

    `ahead` tokens are scheduled before those of the step are known, as with async scheduling: their
    hashes come later.
    """
    scheduler.new_request(request)
    prompt, hashes = 4 * len(request.block_hashes), request.block_hashes
    wait_until(lambda: scheduler.matched_tokens(request, 0) == (hit, hit > 0))
    scheduler.blocks_allocated(request, TABLE, hit)
    assert not _offered(scheduler, make_step({})), "nothing is offered while it is loaded"
    if hit:
        scheduler.loads_reported([request.request_id], [])
    wait_until(lambda: not scheduler._requests[request.request_id].registration.voting)
    request.num_computed_tokens = hit
    tables = {request.request_id: TABLE}
    offered = _offered(scheduler, make_step(tables, **{request.request_id: prompt - hit}))
    request.num_computed_tokens = prompt + ahead
    request.num_output_placeholders = ahead
    if ahead:
        offered += _offered(scheduler, make_step(tables, **{request.request_id: ahead}))
    assert hashes == request.block_hashes
    scheduler.request_finished(request, TABLE)
    return offered + _offered(scheduler, make_step({}))


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize(("policy", "first"), [(REQUEST, 0), (BLOCK, 3)])
def test_a_flagged_request_offers_all_its_blocks_and_an_ordinary_one_what_is_new(
    policy: OffloadPolicy, first: int, ahead: int
) -> None:
    """B1.1, B1.3, B1.4 With and without async scheduling; loaded blocks only at request level."""
    client = FakeClient()
    with scheduler_side(client) as (scheduler, _):
        assert _prefill(scheduler, make_request(3, "first"), 0, ahead=ahead) == _keys(3)
        client.keys, client.policy = set(_keys(3)), policy
        request = make_request(6, "second", kv_transfer_params=FLAG if policy is REQUEST else None)
        assert _prefill(scheduler, request, 12, ahead=ahead) == _keys(6)[first:]


@pytest.mark.parametrize(("params", "policy"), [(None, REQUEST), (FLAG, BLOCK)])
def test_the_cursor_follows_the_policy_and_not_the_flag(params: Any, policy: OffloadPolicy) -> None:
    """B1.6 Tiers may ask for all blocks of any request, and may ignore the flag."""
    client = FakeClient(set(_keys(3)))
    client.policy = policy
    with scheduler_side(client) as (scheduler, _):
        request = make_request(6, kv_transfer_params=params)
        assert _prefill(scheduler, request, 12) == _keys(6)[0 if policy is REQUEST else 3 :]
    assert client.begun == {"r": (25, params)}


def test_a_request_that_the_engine_has_itself_is_voted_on_all_the_same() -> None:
    """B1.1 Hits in the engine's own cache are offered, after the tiers have voted."""
    client = FakeClient()
    with scheduler_side(client) as (scheduler, pool):
        request = make_request(6, kv_transfer_params=FLAG)
        pool.cached = set(request.block_hashes)
        gate, prefix_lookups = SimpleNamespace(open=False), []

        def ask() -> None:
            prefix_lookups.append("begin")
            wait_until(lambda: gate.open)

        client.before = ask
        scheduler.new_request(request)
        assert scheduler.matched_tokens(request, 24) == (0, False), "nothing to load, nothing to wait for"
        wait_until(lambda: prefix_lookups == ["begin"])
        request.num_computed_tokens = 24
        output = make_step({"r": TABLE}, r=1)
        assert not _offered(scheduler, output), "not before the tiers have voted"
        gate.open = True
        wait_until(lambda: not scheduler._requests["r"].registration.voting)
        assert _offered(scheduler, output) == _keys(6)
        assert client.begun == {"r": (25, FLAG)}
        assert client.asked == [0]


@pytest.mark.parametrize("may_load", [True, False])
def test_a_request_that_may_not_be_loaded_is_voted_on_all_the_same(*, may_load: bool) -> None:
    """B1.1 Also on an engine that only stores, and if the prefix cache must not be read."""
    client = FakeClient(set(_keys(6)))
    with scheduler_side(client, may_load=may_load) as (scheduler, _):
        request = make_request(6, kv_transfer_params=FLAG, skip_reading_prefix_cache=may_load)
        assert _prefill(scheduler, request, 0) == _keys(6)
        wait_until(lambda: client.finished == ["r"])
    assert client.begun == {"r": (25, FLAG)}


def test_failed_votes_do_not_delay_requests() -> None:
    """B1.1 If the vote fails, the blocks are offered, and the request ends."""
    client = FakeClient()

    def fail() -> None:
        raise NotConnected("gone")

    client.before = fail
    with scheduler_side(client, may_load=False) as (scheduler, _):
        assert _prefill(scheduler, make_request(2), 0) == _keys(2)


@pytest.mark.parametrize("may_load", [True, False])
def test_a_refusal_is_no_reason_to_leave_the_server_in_peace(monkeypatch: Any, *, may_load: bool) -> None:
    """A refusal of one request does not affect the next, which is looked up and voted on."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    client = FakeClient(set(_keys(2)))

    def refuse() -> None:
        raise InvalidRequest("odd")

    with scheduler_side(client, may_load=may_load) as (scheduler, _):
        client.before = refuse
        assert _prefill(scheduler, make_request(2, "odd"), 0) == _keys(2)
        wait_until(lambda: client.finished == ["odd"])
        client.before = lambda: None
        assert _prefill(scheduler, make_request(2, "sound"), 8 if may_load else 0) == ([] if may_load else _keys(2))
        wait_until(lambda: client.finished == ["odd", "sound"])
    assert client.asked == [2 if may_load else 0]


def test_a_long_id_of_a_request_is_shortened() -> None:
    """A user may choose the id (X-Request-Id); its length is limited, and ids stay distinct."""
    client = FakeClient()
    with scheduler_side(client) as (scheduler, _):
        ids = ["r" * 256, *("r" * 9999 + end for end in "ab")]
        names: list[str] = []
        for request_id in ids:
            request = make_request(2, request_id)
            scheduler.new_request(request)
            wait_until(lambda request=request: scheduler.matched_tokens(request, 0) == (0, False))  # type: ignore[misc]
            [job] = scheduler.build_step(make_step({request_id: TABLE}, **{request_id: 8})).saves
            scheduler.saves_reported(WorkerReport({job.job_id: 1}))
            scheduler.request_finished(request, TABLE)
            names.append(job.request_id)
        wait_until(lambda: len(client.finished) == len(ids))
    assert names == list(client.begun)
    assert sorted(names) == sorted(client.finished)
    assert names[0] == ids[0]
    assert [len(name) for name in names] == [256, 256, 256]


def test_a_load_goes_by_the_whole_id() -> None:
    """The engine knows the request by its own id independently of its id at the server."""
    request_id = "r" * 9999
    with scheduler_side(FakeClient(set(_keys(2)))) as (scheduler, _):
        request = make_request(2, request_id)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (8, True))
        scheduler.blocks_allocated(request, TABLE, 8)
        [load] = scheduler.build_step(make_step({})).loads
        assert load.request_id == request_id
        assert load.reads
        scheduler.loads_reported([request_id], [])
        assert not scheduler.has_pending_work()


def test_a_block_that_the_server_holds_is_not_copied_a_second_time() -> None:
    """B1.5 Of the offered blocks, only those that the server lacks are written."""
    client, reports, copied = FakeTransfers(), WorkerReports(), []
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    torch = pytest.importorskip("torch")
    worker.register({name: torch.zeros(8, PAGE, dtype=torch.uint8) for name in ("a", "b")})
    worker._copiers = (
        SimpleNamespace(  # type: ignore[assignment]
            mark=lambda: None, copy_out=lambda _group, ids, _memory, _offsets, _after: copied.extend(ids)
        ),
    )
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", _keys(2), [0, 0], [4, 5])], "ns"))
    close_when_idle(worker)
    assert client.written == [_keys(2)]
    assert copied == [5], "block 4 is PRESENT"
    assert reports.take_report() == WorkerReport({1: 1}), "and both are stored"


def test_votes_and_resets_of_a_real_server(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """B1.1, B1.3, B4.13 The shipped rule decides, with and without a lookup; a reset clears."""
    server = ServerProcess(tmp_path, long_timeout=True)
    server.start()
    request.addfinalizer(server.kill)
    namespace = Namespace("policy", "uint8", (Group(PAGE, 4),))

    def connect(engine: str) -> Any:
        client = Client(server.endpoint, namespace=namespace, engine_id=engine, timeouts=Timeouts(call=60))
        client.wait_until_connected(60)
        return client

    with connect("writer") as writer:
        writer.store(_keys(3), [bytes(PAGE)] * 3)
    with scheduler_side(connect("decides")) as (scheduler, _):
        assert _prefill(scheduler, make_request(6, "ordinary"), 12) == _keys(6)[3:]
        assert _prefill(scheduler, make_request(6, "flagged", kv_transfer_params=FLAG), 12) == _keys(6)
    with scheduler_side(connect("stores"), may_load=False) as (scheduler, _):
        for params, policy in ((FLAG, REQUEST), (None, BLOCK)):
            scheduler.new_request(make_request(6, str(policy), kv_transfer_params=params))
            registration = scheduler._requests[str(policy)].registration
            wait_until(lambda registration=registration: not registration.voting)  # type: ignore[misc]
            assert registration.policy is policy
        assert [tier["blocks"] for tier in server.status()["tiers"] if tier["name"] == "cpu"] == [3]
        assert scheduler.reset()
        wait_until(lambda: not reset_pending(scheduler))
        assert [tier["blocks"] for tier in server.status()["tiers"] if tier["name"] == "cpu"] == [0]
