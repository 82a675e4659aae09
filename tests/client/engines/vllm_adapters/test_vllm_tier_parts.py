"""Parts of the tier: abandoned jobs, lost leases, policies, settings, namespaces."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness.polling import wait_until
from tier_fixtures import KEYS, ROW, TierParts, make_config, make_tier_parts, request_of
from vllm.config import VllmConfig
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.client import Group, LeaseLost, Namespace, NotConnected, StoreStatus, TierFilter
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.identity import SCHEME, WEIGHTS, namespace_digest
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm_tier import KVTierSecondaryTier, compat, transfers
from kvtier.client.engines.vllm_tier.config import ManagerConfig
from kvtier.client.engines.vllm_tier.namespace import prepare_tier_namespace
from kvtier.client.engines.vllm_tier.tier_lookups import Answer


def _lose_lease_1(lease: int) -> None:
    if lease == 1:
        raise LeaseLost("gone")


@pytest.fixture
def room() -> Iterator[TierParts]:
    """Transfers and lookups over a fake client."""
    with make_tier_parts() as made:
        yield made


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_job_that_was_given_up_never_touches_the_rows_again(room: TierParts, leases: list[int] | None) -> None:
    """B3.19 A call hangs during a reset: the job is reported as failed, once."""
    handed_out = threading.Event()
    room.client.hand_out = lambda: (handed_out.wait(60), None)[1]
    request = room.lookups.begin("r", None)
    room.transfers.submit(room.job(1, request, leases))
    room.transfers.drain(0.05)
    assert room.finished() == {1: frozenset()}
    room.rows[:] = 3
    handed_out.set()
    room.lookups.end(request, {})
    wait_until(lambda: any(said == "finished r" for said in room.client.told))
    assert (room.rows == 3).all()
    assert (room.client.memory == 7).all()
    assert room.transfers.take_finished() == []


def test_a_job_that_takes_too_long_is_reported_without_a_drain(
    room: TierParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5.6 A job whose call never returns frees its rows in bounded time."""
    handed_out = threading.Event()
    room.client.hand_out = lambda: (handed_out.wait(60), None)[1]
    room.transfers.submit(room.job(1, room.lookups.begin("r", None)))
    monkeypatch.setattr(transfers, "_JOB_SECONDS", 0.0)
    assert room.finished() == {1: frozenset()}
    handed_out.set()


def test_a_load_is_good_for_the_leases_that_held(room: TierParts) -> None:
    """B3.18 Bytes read under a lost lease are not used; the rest of the job is."""
    room.client.confirm = _lose_lease_1
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), [1, 2, 1, 2]))
    assert room.finished() == {1: {KEYS[1], KEYS[3]}}
    assert not room.lookups.circuit.is_open


def test_a_key_without_a_lease_is_not_loaded(room: TierParts) -> None:
    """B3.18 A job may name keys that were never found, or were evicted."""
    job = room.job(1, room.lookups.begin("r", None), [1, 1, 1, 1])
    room.transfers.submit(dataclasses.replace(job, pins=[None, *list(job.pins or ())[1:]]))
    assert room.finished() == {1: set(KEYS[1:])}
    assert (room.rows[0] == 1).all()
    assert (room.rows[1:] == 7).all()


@pytest.mark.parametrize(
    ("status", "done"), [(StoreStatus.PRESENT, 4), (StoreStatus.IN_PROGRESS, 4), (StoreStatus.NO_ROOM, 3)]
)
def test_a_store_says_what_is_stored(room: TierParts, status: StoreStatus, done: int) -> None:
    """B1.5, B3.5 Present chunks are not written again; a chunk without room fails the job."""
    room.client.statuses = bytes([StoreStatus.GRANTED, status, StoreStatus.GRANTED, StoreStatus.GRANTED])
    room.transfers.submit(room.job(1, room.lookups.begin("r", None)))
    assert len(room.finished()[1]) == done
    assert [int(slot[0]) for slot in room.client.memory[:4]] == [1, 7, 1, 1]


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_large_job_is_made_in_calls_that_the_server_takes(room: TierParts, leases: list[int] | None) -> None:
    """The server refuses a call with more keys than it has said."""
    room.client.max_keys, calls = 3, []
    batch_of = room.client._batch
    room.client._batch = lambda items: calls.append(len(items)) or batch_of(items)  # type: ignore[method-assign, func-returns-value]
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), leases))
    assert room.finished() == {1: set(KEYS)}
    assert calls == [3, 1]


def test_a_lookup_ends_at_the_first_call_without_all_of_its_hits(room: TierParts) -> None:
    """Later chunks of a prefix would be pinned, although the engine cannot use them."""
    room.client.max_keys, room.client.keys = 2, {KEYS[0], KEYS[2], KEYS[3]}
    request = room.lookups.begin("r", None)
    for number, key in enumerate(KEYS):
        assert room.lookups.answer(request, key, 16 * (number + 1)) is Answer.UNKNOWN
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is not Answer.UNKNOWN)
    assert room.client.asked == [2]
    assert [key for key, pin in request.known.items() if pin is not None] == [KEYS[0]]


def test_a_job_with_a_row_that_does_not_exist_is_not_begun(room: TierParts) -> None:
    """No other row of the job is copied."""
    job = dataclasses.replace(room.job(1, room.lookups.begin("r", None)), rows=[0, 1, 2, 9])
    with pytest.raises(ValueError, match="row 9 is outside"):
        room.transfers.submit(job)
    assert room.transfers.take_finished() == []


def test_the_end_of_a_request_reaches_the_server_after_its_last_store(room: TierParts) -> None:
    """B3.12 It is sent once, when no call about the request is in flight."""
    stored = threading.Event()
    room.client.hand_out = lambda: (stored.wait(60), None)[1]
    request = room.lookups.begin("r", None)
    for number in range(3):
        room.transfers.submit(room.job(number, request))
    room.lookups.end(request, {})
    said_by_now = threading.Event()
    room.lookups._control_thread.submit(said_by_now.set)
    assert said_by_now.wait(60)
    assert room.client.told == []
    stored.set()
    wait_until(lambda: "finished r" in room.client.told)
    assert room.client.told == ["stored for r"] * 3 + ["finished r"]


def test_a_request_s_settings_reach_the_server(room: TierParts) -> None:
    """B3.1 A user's settings go with the request's calls; tiers see the policy only."""
    wishes = {"retain_for_s": 60, "exclude": ["lmdb"], "offload_policy": "request_level"}
    request = room.lookups.begin("r", {"kvtier": wishes, "other": 1})
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is Answer.MISS)
    assert room.client.options == [{"exclude": TierFilter(("lmdb",)), "retain_for": 60.0}]
    assert room.client.begun["r"] == (16, {"other": 1, "offload_policy": "request_level"})


def test_a_request_may_skip_what_is_stored(room: TierParts) -> None:
    """`skip_load` is a miss at once, without a call."""
    request = room.lookups.begin("r", {"kvtier": {"skip_load": True}})
    assert room.lookups.answer(request, KEYS[0], 16) is Answer.MISS
    assert not request.new


def test_policies_have_the_names_that_the_running_vllm_gives_them() -> None:
    """B3.1 `chunk_level` if the version has it, else `block_level`."""
    new = Enum("OffloadPolicy", {"CHUNK_LEVEL": "chunk_level", "REQUEST_LEVEL": "request_level"})
    old = Enum("OffloadPolicy", {"BLOCK_LEVEL": "block_level", "REQUEST_LEVEL": "request_level"})
    assert compat.block_level_of(new).value == "chunk_level"
    assert compat.block_level_of(old).value == "block_level"


def test_jobs_are_read_by_either_version_s_names() -> None:
    """Rows are `chunk_ids`, formerly `block_ids`; not every version reports a chunk's end."""
    assert compat.rows_of(SimpleNamespace(chunk_ids=np.array([3, 1]))) == [3, 1]
    assert compat.rows_of(SimpleNamespace(block_ids=np.array([2]))) == [2]
    assert compat.end_token(request_of("r", KEYS), KEYS[1]) == 32
    assert compat.end_token(SimpleNamespace(), KEYS[1]) == 0
    assert compat.end_tokens(request_of("r", KEYS)) == {key: 16 * (number + 1) for number, key in enumerate(KEYS)}
    assert compat.end_tokens(SimpleNamespace()) == {}


def test_a_lookup_that_fails_or_takes_too_long_is_a_miss(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or a timeout, is a miss of that request, and opens the circuit."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    answered, asked = threading.Event(), threading.Event()
    request = room.lookups.begin("waits", None)
    room.client.before = lambda: (asked.set(), answered.wait(60), None)[2]
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    assert asked.wait(60)
    request.waiting[KEYS[0]] = room.lookups._timeout_s = 0.0  # it has timed out
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is Answer.MISS)
    assert room.lookups.circuit.is_open
    assert room.lookups.answer(room.lookups.begin("other", None), KEYS[0], 16) is Answer.MISS
    room.client.keys = set(KEYS)
    answered.set()
    wait_until(lambda: bool(room.lookups._done))
    assert room.lookups.answer(request, KEYS[0], 16) is Answer.MISS
    wait_until(lambda: room.client.released == [1])

    def refuse() -> None:
        raise NotConnected("gone")

    room.client.before, room.lookups._timeout_s, room.lookups.circuit._open_until = refuse, 20.0, 0.0
    failed = room.lookups.begin("fails", None)
    room.lookups.answer(failed, KEYS[0], 16)
    room.lookups.send(failed)
    wait_until(lambda: room.lookups.answer(failed, KEYS[0], 16) is Answer.MISS)
    assert room.lookups.circuit.is_open


def test_a_question_that_had_to_queue_says_nothing_of_the_server(room: TierParts) -> None:
    """In a burst, lookups that were queued too long are misses, and the circuit stays closed."""
    answered, asked = threading.Event(), threading.Event()
    room.client.before = lambda: (asked.set(), answered.wait(60), None)[2]
    first, queued = room.lookups.begin("first", None), room.lookups.begin("queued", None)
    room.lookups.answer(first, KEYS[0], 16)
    room.lookups.send(first)
    assert asked.wait(60)
    room.lookups._timeout_s = 0.05
    room.lookups.answer(queued, KEYS[0], 16)
    room.lookups.send(queued)
    wait_until(lambda: room.lookups.answer(queued, KEYS[0], 16) is Answer.MISS)
    assert not room.lookups.circuit.is_open
    answered.set()


def test_stores_do_not_fail_because_lookups_did(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are sent also while the circuit is open for lookups."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    room.lookups.circuit.open()
    room.transfers.submit(room.job(1, room.lookups.begin("stores", None)))
    room.transfers.submit(room.job(2, room.lookups.begin("loads", None), [1] * 4))
    found = room.finished()
    wait_until(lambda: bool(found.update(room.finished() if len(found) < 2 else {})) or len(found) == 2)
    assert room.lookups.circuit.is_open
    assert found == {1: set(KEYS), 2: set()}


def test_a_late_answer_is_released(room: TierParts) -> None:
    """B4.3 A late answer pins nothing; a preempted request is looked up again."""
    answered = threading.Event()
    room.client.keys, room.client.before = set(KEYS), lambda: (answered.wait(60), None)[1]
    request = room.lookups.begin("runs", None)
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    room.lookups.mark_scheduled(request)
    answered.set()
    wait_until(lambda: bool(room.lookups._done))
    assert room.lookups.answer(request, KEYS[0], 16) is Answer.UNKNOWN
    wait_until(lambda: room.client.released == [1])
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is Answer.HIT)


def test_settings_are_checked_at_start() -> None:
    """An unknown key is a warning with the nearest known one; a wrong value is an error."""
    warnings: list[str] = []
    config = ManagerConfig.parse({"endpoint": "unix:/x", "tennant": "a", "identity": "m"}, warnings.append)
    assert (config.endpoint, config.identity, config.tenant) == ("unix:/x", "m", "")
    assert [warning for warning in warnings if "'tennant'" in warning and "did you mean tenant" in warning] == warnings
    for wrong in ({"identity": 1}, {"locality": "near"}, {"transport": "rdma"}, {"lookup_timeout_s": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ManagerConfig.parse(wrong, warnings.append)


def build_tier_namespace(*arguments: Any, **options: Any) -> Namespace:
    return prepare_tier_namespace(*arguments, **options)()


def _engine(**fields: Any) -> Any:
    model = SimpleNamespace(
        model="m",
        dtype="float32",
        revision="a" * 40,
        quantization=None,
        hf_overrides={},
        hf_config=None,
        max_model_len=512,
    )
    parts = {
        "model_config": model,
        "cache_config": SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "speculative_config": None,
        "lora_config": None,
        "device_config": SimpleNamespace(device_type="cpu"),
        "attention_config": SimpleNamespace(backend=None),
        "load_config": SimpleNamespace(load_format="auto"),
    }
    return SimpleNamespace(**(parts | fields))


def test_namespaces_differ_by_all_that_changes_a_row() -> None:
    """Engines that compute or lay out rows differently share none; equal engines do."""
    config, engine = make_config({}), _engine()
    parallel = dataclasses.replace(config.parallel, tp_size=2, world_size=2)
    cache = dataclasses.replace(config.cache, blocks_per_chunk=4)
    changed = dict(vars(engine.model_config))
    spaces = [
        build_tier_namespace(config, engine, ROW),
        build_tier_namespace(config, engine, 2 * ROW),
        build_tier_namespace(config, engine, ROW, tenant="t"),
        build_tier_namespace(config, engine, ROW, identity="i"),
        build_tier_namespace(dataclasses.replace(config, parallel=parallel), engine, ROW),
        build_tier_namespace(dataclasses.replace(config, cache=cache), engine, ROW),
        build_tier_namespace(dataclasses.replace(config, canonical_layout=True), engine, ROW),
        build_tier_namespace(dataclasses.replace(config, kv_cache_layout="LBHNC"), engine, ROW),
        build_tier_namespace(make_config({}, groups=2), engine, ROW),
        build_tier_namespace(config, _engine(model_config=SimpleNamespace(**changed | {"quantization": "fp8"})), ROW),
        build_tier_namespace(config, _engine(model_config=SimpleNamespace(**changed | {"dtype": "float16"})), ROW),
        build_tier_namespace(config, _engine(model_config=SimpleNamespace(**changed | {"max_model_len": 9})), ROW),
        build_tier_namespace(config, _engine(model_config=SimpleNamespace(**changed | {"revision": "b" * 40})), ROW),
    ]
    assert len({namespace_digest(space) for space in spaces}) == len(spaces)
    replica = dataclasses.replace(config.parallel, rank=3, data_parallel_index=1, data_parallel_size=2)
    again = dataclasses.replace(config, engine_id="another", extra_config={"x": 1}, parallel=replica)
    assert namespace_digest(build_tier_namespace(again, engine, ROW)) == namespace_digest(spaces[0])


def test_each_field_of_the_namespace_of_a_tier() -> None:
    """With the engine's configuration, and with the operator's `identity` in place of it."""
    cache = dataclasses.replace(make_config({}).cache, tokens_per_hash=8, blocks_per_chunk=2)
    config = dataclasses.replace(make_config({}, groups=2, kv_cache_layout="NHD"), cache=cache)
    expected = Namespace(
        model="model",
        dtype="float32",
        groups=(Group(ROW, 32, "group 0"), Group(ROW, 32, "group 1")),
        layout="vllm-tiering:NHD",
        hash_scheme="vllm:sha256:8",
        revision="a" * 40,
        tenant="red",
    )
    known = build_tier_namespace(config, _engine(), ROW, tenant="red")
    told = build_tier_namespace(config, None, ROW, tenant="red", identity="mine")
    assert dataclasses.replace(known, attributes={}) == expected
    assert dataclasses.replace(told, attributes={}) == dataclasses.replace(expected, hash_scheme="vllm::8", revision="")
    assert known.attributes.keys() == {"device", "engine", "identity", "row", "settings", WEIGHTS, *SCHEME}
    assert told.attributes.keys() == {"engine", "identity", "row", *SCHEME}
    assert told.attributes["identity"] == "mine"


NEUTRAL_FIELDS = {
    *("engine_id", "extra_config", "enable_kv_cache_events", "parallel.rank", "parallel.data_parallel_index"),
    *("parallel.data_parallel_size", "parallel.data_parallel_rank_local"),
}


def test_each_field_of_vllms_configuration_of_rows_counts() -> None:
    """Except the names of this process, and those of its replicas."""

    def row_of(config: Any) -> str:
        return build_tier_namespace(config, None, ROW, identity="mine").attributes["row"]

    config, neutral = make_config({}), set()
    before = row_of(config)
    parts = {"": config, "model.": config.model, "cache.": config.cache, "parallel.": config.parallel}
    for prefix, part in parts.items():
        for field in dataclasses.fields(part):
            if (f"{field.name}.") in parts or field.name in ("groups", "dcp_size", "pcp_size"):
                continue
            other: Any = dataclasses.replace(part, **{field.name: 7})
            if row_of(dataclasses.replace(config, **{prefix[:-1]: other}) if prefix else other) == before:
                neutral.add(prefix + field.name)
    assert neutral == NEUTRAL_FIELDS
    for field in dataclasses.fields(config.groups[0]):
        group = dataclasses.replace(config.groups[0], **{field.name: 7})
        assert row_of(dataclasses.replace(config, groups=(group,))) != before, field.name


def test_a_namespace_has_a_group_for_each_number_in_keys() -> None:
    """VLLM may leave out numbers of groups, and a key ends with the number of its group."""
    config = make_config({}, groups=3)
    sparse = dataclasses.replace(config, groups=(config.groups[0], config.groups[2]))
    assert len(build_tier_namespace(sparse, _engine(), ROW).groups) == 3


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (None, "identity"),
        (_engine(lora_config=object()), "LoRA"),
        (_engine(cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="xxhash")), "xxhash"),
    ],
)
def test_engines_whose_rows_may_be_mistaken_are_refused(engine: Any, why: str) -> None:
    """Keys that do not identify the bytes are not used."""
    with pytest.raises(Unsupported, match=why):
        build_tier_namespace(make_config({}), engine, ROW)


@pytest.mark.parametrize("engine", [None, _engine()])
@pytest.mark.parametrize("size", ["dcp_size", "pcp_size"])
def test_context_parallel_engines_are_refused(engine: Any, size: str) -> None:
    """A rank's tokens of a block are unknown then, so such rows are never shared."""
    config = make_config({})
    split = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **{size: 2}))
    with pytest.raises(Unsupported, match="context parallelism"):
        build_tier_namespace(split, engine, ROW, identity="given")


def test_a_disabled_tier_says_why_once_and_misses(caplog: pytest.LogCaptureFixture) -> None:
    """An unsupported set-up ends no engine: all is a miss, and every job is reported."""
    config = make_config({})
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("vllm"), "propagate", True)
        tier = KVTierSecondaryTier(SimpleNamespace(config=config), memoryview(np.zeros((4, ROW), np.int8)), "kvtier")
    assert "disabled" in caplog.text
    assert "'identity'" in caplog.text
    context = request_of("r", KEYS)
    assert tier.on_new_request(context).policy is compat.BLOCK_LEVEL
    assert tier.lookup(KEYS[0], context) is compat.LookupResult.MISS
    tier.submit_store(TransferJob(5, KEYS, np.arange(4), False, context))
    assert [(done.job_id, done.success) for done in tier.get_finished_jobs()] == [(5, False)]
    tier.on_schedule_end(SimpleNamespace(new_req_ids=["r"], preempted_req_ids=[]))
    tier.on_request_finished(context)
    tier.drain_jobs()
    tier.shutdown()


def test_the_loaded_part_of_a_load_is_used(room: TierParts) -> None:
    """B3.18 vLLM learns which keys were loaded, and only these are hits again."""
    config = make_config({})
    tier = KVTierSecondaryTier(SimpleNamespace(config=config), memoryview(np.zeros((4, ROW), np.int8)), "kvtier")
    tier._lookups, tier._transfers = room.lookups, room.transfers
    request = room.lookups.begin("r", None)
    request.loading = 1
    room.client.confirm = _lose_lease_1
    job = room.job(1, request, [1, 2, 1, 2])
    room.transfers.submit(job)
    done: list[Any] = []
    wait_until(lambda: done.extend(tier.get_finished_jobs()) or bool(done))
    assert [(result.success, set(result.successful_keys)) for result in done] == [(False, {KEYS[1], KEYS[3]})]
    assert job.pins is not None
    assert request.known == {KEYS[1]: job.pins[1], KEYS[3]: job.pins[3]}


def test_a_job_without_a_result_does_not_affect_others(room: TierParts) -> None:
    """Each job that ended is reported even if another fails, because its rows are pinned."""
    config = make_config({})
    tier = KVTierSecondaryTier(SimpleNamespace(config=config), memoryview(np.zeros((4, ROW), np.int8)), "kvtier")
    tier._lookups, tier._transfers = room.lookups, room.transfers
    request = room.lookups.begin("r", None)
    broken, sound = room.job(1, request, [1] * 4), room.job(2, request)
    broken.request = None  # type: ignore[assignment]
    broken.done = sound.done = frozenset(KEYS)
    room.transfers._finished += [broken, sound]
    assert [(done.job_id, done.success) for done in tier.get_finished_jobs()] == [(1, False), (2, True)]


def test_the_engine_is_found_among_the_callers() -> None:
    """Only the configuration of the engine that builds the tier is found."""
    vllm_config = VllmConfig.__new__(VllmConfig)
    vllm_config.kv_transfer_config = SimpleNamespace(engine_id="this")  # type: ignore[assignment]
    assert compat.find_engine_config("this") is vllm_config
    assert compat.find_engine_config("that") is None


def test_a_vllm_that_asks_for_unknown_hooks_is_refused_with_one_clear_message() -> None:
    """A version with more hooks raises an error that names the missing ones."""
    compat.check_hooks(frozenset({"lookup"}), frozenset({"lookup", "touch"}))
    with pytest.raises(ImportError, match=r"needs vLLM .*this is vLLM .*asks a tier for beam_up, warp"):
        compat.check_hooks(frozenset({"lookup", "warp", "beam_up"}), frozenset({"lookup"}))
