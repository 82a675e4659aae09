"""The tier's hooks in the order in which vLLM's tiering manager calls them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from harness.polling import wait_until
from tier_fixtures import KEYS, ROW, SlotClient, TierParts, keys_of, make_config, make_tier_parts, request_of
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvtier.client.engines.vllm_tier import KVTierSecondaryTier, compat, tier_lookups
from kvtier.client.engines.vllm_tier import manager as manager_module
from kvtier.client.engines.vllm_tier.config import ManagerConfig

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Manager:
    """vLLM's side: a tier over a fake client and a primary tier of four rows."""

    def __init__(self, room: TierParts) -> None:
        self.client, self.rows = room.client, room.rows
        view = memoryview(np.zeros((4, ROW), np.int8))
        self.tier = KVTierSecondaryTier(SimpleNamespace(config=make_config({})), view, "kvtier")
        self.tier._lookups, self.tier._transfers = room.lookups, room.transfers
        room.lookups.ask_policies()  # as at the start
        for record in (self.client.begun, self.client.asked, self.client.looked_up, self.client.options):
            record.clear()
        self.client.told.clear()
        self._numbers = iter(range(1, 1000))

    def step(self, *new: str) -> None:
        """Ends a step in which these requests are scheduled for the first time."""
        self.tier.on_schedule_end(ScheduleEndContext(list(new), []))

    def lookup(self, context: Any, keys: Sequence[Any] = KEYS) -> list[LookupResult]:
        return [self.tier.lookup(key, context) for key in keys]

    def answers(self, context: Any, keys: Sequence[Any] = KEYS) -> list[LookupResult]:
        """Asks in each step until all answers are known, as vLLM does."""
        found: list[LookupResult] = []

        def is_known() -> bool:
            found[:] = self.lookup(context, keys)
            self.step()
            return RETRY not in found

        wait_until(is_known)
        return found

    def submit(self, context: Any, *, load: bool, keys: Sequence[Any] = KEYS, rows: Sequence[int] = range(4)) -> int:
        job = TransferJob(next(self._numbers), keys, np.array(rows), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return job.job_id

    def results(self, count: int = 1) -> list[JobResult]:
        done: list[JobResult] = []
        wait_until(lambda: done.extend(self.tier.get_finished_jobs()) or len(done) >= count)
        return done

    def run(self, context: Any, *, load: bool, **job: Any) -> JobResult:
        """Runs one job to its report."""
        number = self.submit(context, load=load, **job)
        (result,) = self.results()
        assert result.job_id == number
        return result


@pytest.fixture
def room() -> Iterator[TierParts]:
    with make_tier_parts() as made:
        yield made


@pytest.fixture
def manager(room: TierParts) -> Manager:
    return Manager(room)


def test_the_keys_of_a_step_go_to_the_server_in_one_call_per_group(manager: Manager) -> None:
    """Nothing is asked before the end of the step, and each key is asked once."""
    other = keys_of(2, group=1)
    context = request_of("r", [*KEYS, *other])
    manager.client.keys = {*KEYS[:3], other[0]}
    assert manager.lookup(context, [*KEYS, *other]) == [RETRY] * 6
    assert manager.client.asked == []
    assert manager.answers(context, [*KEYS, *other]) == [HIT, HIT, HIT, MISS, HIT, MISS]
    assert sorted(map(len, manager.client.looked_up)) == [2, 4]
    assert list(manager.client.begun) == ["r"]


def test_a_lookup_from_the_end_of_a_window_does_not_end_at_a_miss(manager: Manager) -> None:
    """A prefix is asked for from its start, but a window or state from the end."""
    context = request_of("r", KEYS)
    manager.client.keys = {KEYS[0], KEYS[3]}
    manager.client.prefixes.clear()
    assert manager.answers(context, [KEYS[3], KEYS[2], KEYS[0]]) == [HIT, MISS, HIT]
    assert manager.answers(request_of("s", KEYS), KEYS[:2]) == [HIT, MISS]
    assert manager.client.prefixes == [False, True]


def test_a_key_of_a_load_is_a_miss_until_the_load_has_ended(manager: Manager, room: TierParts) -> None:
    """B3.18 vLLM asks again if its primary tier evicts a chunk; the load may still fail."""
    manager.client.keys = set(KEYS[:3])
    context = request_of("r", KEYS)
    assert manager.answers(context) == [HIT, HIT, HIT, MISS]
    number = manager.submit(context, load=True, keys=KEYS[:2], rows=[2, 0])
    assert manager.lookup(context) == [MISS, MISS, HIT, MISS]
    (result,) = manager.results()
    assert (result.job_id, result.success, result.successful_keys) == (number, True, None)
    assert manager.lookup(context) == [HIT, HIT, HIT, MISS]
    assert [int(row[0]) for row in room.rows] == [7, 1, 7, 1]


@pytest.mark.parametrize("load", [False, True])
def test_keys_of_a_job_are_not_marked_as_used_once_more(manager: Manager, *, load: bool) -> None:
    """B4.9 The store or load has told the server that the request uses them."""
    manager.client.keys = set(KEYS)
    context = request_of("r", KEYS)
    assert not load or manager.answers(context) == [HIT] * 4
    assert manager.run(context, load=load).success
    manager.step("r")
    manager.client.marked.clear()
    manager.tier.on_request_finished(context)
    wait_until(lambda: "finished r" in manager.client.told)
    assert manager.client.marked == []


def test_hits_are_released_when_the_request_runs(manager: Manager, room: TierParts) -> None:
    """The request loads no more. While one of its loads runs, its lease is kept."""
    manager.client.keys = set(KEYS)
    first, second = request_of("first", KEYS), request_of("second", KEYS)
    assert manager.answers(first) == manager.answers(second) == [HIT] * 4
    manager.step("first")
    wait_until(lambda: manager.client.released == [1])
    manager.submit(second, load=True)
    manager.step("second")
    said_by_now = threading.Event()
    room.lookups._control_thread.submit(said_by_now.set)
    assert said_by_now.wait(60)
    assert manager.client.released == [1]
    assert manager.results()[0].success
    wait_until(lambda: manager.client.released == [1, 2])


def test_a_hit_is_looked_up_again_before_its_lease_expires(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request can wait for minutes until it is scheduled."""
    manager.client.keys = set(KEYS)
    monkeypatch.setattr(tier_lookups, "_PIN_SECONDS", 0.0)
    context = request_of("r", KEYS)
    assert manager.lookup(context) == [RETRY] * 4
    manager.step()
    request = manager.tier._requests["r"]
    wait_until(lambda: manager.lookup(context) and len(manager.client.asked) == 1 and len(request.new) == 4)
    monkeypatch.setattr(tier_lookups, "_PIN_SECONDS", 600.0)
    assert manager.answers(context) == [HIT] * 4
    assert manager.client.asked == [4, 4]


def test_a_store_that_a_request_does_not_want_fails(manager: Manager) -> None:
    """`skip_save` prevents the store, and no load; vLLM gets a report in any case."""
    manager.client.keys = set(KEYS)
    context = request_of("r", KEYS, {"kvtier": {"skip_save": True}})
    assert not manager.run(context, load=False).success
    assert manager.client.told == []
    assert manager.answers(context) == [HIT] * 4
    assert manager.run(context, load=True).success


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("row", [-1, 4])
def test_a_job_with_a_row_that_does_not_exist_fails(manager: Manager, room: TierParts, row: int, *, load: bool) -> None:
    """Nothing is copied from or to memory outside the primary tier."""
    manager.client.keys = set(KEYS)
    context = request_of("r", KEYS)
    assert manager.answers(context) == [HIT] * 4
    assert not manager.run(context, load=load, rows=[0, 1, 2, row]).success
    assert manager.client.told == []
    assert (room.rows == 1).all()
    assert manager.run(context, load=False).success, "later jobs run"


def test_chunks_are_stored_in_the_order_of_tokens(manager: Manager, room: TierParts) -> None:
    """If the server has room for some only, the prefix is stored. Keys keep their rows."""
    context = request_of("r", KEYS)
    room.rows[:] = np.arange(10, 14, dtype=np.int8)[:, None]
    written: list[list[bytes]] = []
    write = manager.client.write
    manager.client.write = lambda keys, **named: written.append(list(keys)) or write(keys, **named)  # type: ignore[method-assign, func-returns-value]
    assert manager.run(context, load=False, keys=KEYS[::-1], rows=[2, 0, 3, 1]).success
    assert written == [KEYS]
    assert [int(slot[0]) for slot in manager.client.memory[:4]] == [11, 13, 10, 12]


def test_a_request_that_looked_up_nothing_is_registered_when_it_runs(manager: Manager) -> None:
    """B3.12 The server must know it before its stores, and its settings. It is registered once."""
    params = {"kvtier": {"retain_for_s": 60}, "other": 1}
    context = request_of("r", KEYS, params)
    assert manager.tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL, "not known yet"
    manager.step("r", "unknown")
    wait_until(lambda: not manager.tier._requests["r"].registration.voting)
    manager.step("r")
    assert manager.tier.on_new_request(request_of("next", KEYS, params)).policy is compat.BLOCK_LEVEL
    manager.tier.on_request_finished(context)
    wait_until(lambda: "finished r" in manager.client.told)
    assert manager.client.begun == {"r": (0, {"other": 1})}
    assert manager.client.options == [{"retain_for": 60.0}]
    assert list(manager.tier._requests) == ["next"]


def test_a_request_that_ends_in_the_step_of_its_lookup_is_not_looked_up(manager: Manager) -> None:
    """An aborted request may be gone before the end of the step."""
    manager.client.keys = set(KEYS)
    context = request_of("r", KEYS)
    assert manager.lookup(context) == [RETRY] * 4
    manager.tier.on_request_finished(context)
    manager.step("r")
    wait_until(lambda: manager.client.told == ["finished r"])
    assert manager.client.asked == []


class TierServer(SlotClient):
    """A client that is connected at once. `given`: what the tier passed."""

    made: ClassVar[list[TierServer]] = []
    transport = "none"

    def __init__(self, endpoint: str | None, **given: Any) -> None:
        super().__init__()
        self.endpoint, self.given = endpoint, given
        self.made.append(self)

    def wait_until_connected(self, _: float) -> None:
        pass


def test_a_tier_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves the rows of vLLM's view, under the settings of its table."""
    monkeypatch.setattr(manager_module, "Client", TierServer)
    monkeypatch.setattr(TierServer, "made", [])
    config, view = make_config({}), memoryview(np.full((4, ROW), 1, np.int8))
    settings = {"endpoint": "unix:/here", "identity": "model 1", "tenant": "t", "transport": "shm"}
    tier = KVTierSecondaryTier(SimpleNamespace(config=config), view, "kvtier", **settings)
    wait_until(lambda: tier._transfers is not None)
    (server,) = TierServer.made
    namespace, timeouts = server.given["namespace"], server.given["timeouts"]
    assert (server.endpoint, server.given["transport"], server.given["engine_id"]) == (
        "unix:/here",
        "shm",
        config.engine_id,
    )
    assert (namespace.tenant, namespace.groups[0].part_bytes, timeouts.transfer) == ("t", ROW, 10.0)
    assert len(server.begun) == len(server.told) == 4, "the policies of the usual parameters"
    server.keys = set(KEYS)
    context = request_of("r", KEYS)
    assert tier.lookup(KEYS[0], context) is RETRY
    tier.on_schedule_end(ScheduleEndContext([], []))
    wait_until(lambda: tier.lookup(KEYS[0], context) is HIT)
    tier.submit_load(TransferJob(1, KEYS[:1], np.array([2]), True, context))
    wait_until(lambda: [result.success for result in tier.get_finished_jobs()] == [True])
    assert [row[0] for row in np.asarray(view)] == [1, 1, 7, 1]
    tier.shutdown()
    assert not server.connected


def test_a_tier_whose_client_cannot_be_made_is_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts without it, and each job is reported as failed."""

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError("a file")

    monkeypatch.setattr(manager_module, "Client", fail)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    view = memoryview(np.zeros((4, ROW), np.int8))
    tier = KVTierSecondaryTier(SimpleNamespace(config=make_config({})), view, "kvtier", identity="i")
    wait_until(lambda: "the tier is disabled" in caplog.text)
    context = request_of("r", KEYS)
    assert tier.lookup(KEYS[0], context) is MISS
    tier.submit_load(TransferJob(1, KEYS[:1], np.array([0]), True, context))
    assert [result.success for result in tier.get_finished_jobs()] == [False]
    tier.shutdown()


def test_the_locality_is_that_of_the_settings() -> None:
    """Requests can exclude tiers by their locality."""
    view = memoryview(np.zeros((4, ROW), np.int8))
    spec = SimpleNamespace(config=make_config({}))
    named = [KVTierSecondaryTier(spec, view, "kvtier", locality=name).locality for name in ("LOCAL", "REMOTE")]
    assert [locality and locality.value for locality in named] == ["LOCAL", "REMOTE"]
    assert KVTierSecondaryTier(spec, view, "kvtier").locality is None
    with pytest.raises(ValueError, match="locality must be LOCAL or REMOTE"):
        ManagerConfig.parse({"locality": "HERE"}, lambda _: None)
