"""kvtier below vLLM's tiering manager and primary tier, with a real server, without an engine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_timeouts import LONG_TIMEOUT_SECONDS
from harness.polling import wait_until
from scenario import wait_until_durable
from server_process import ServerProcess
from tier_fixtures import keys_of, request_of
from tiering_harness import content_of, world
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.client.engines.vllm_tier import manager

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
FLAG = {"do_remote_decode": True}
BOUND_SECONDS = 60.0
ROOM_BYTES = 32 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = _start(ServerProcess(tmp_path_factory.mktemp("kvtier"), long_timeout=True))
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = _start(ServerProcess(tmp_path))
    yield server
    server.kill()


def _start(server: ServerProcess) -> ServerProcess:
    """Starts a server and waits until it has memory, which takes a while if memory is short."""
    server.start()
    wait_until(
        lambda: any(tier["available_bytes"] >= ROOM_BYTES for tier in server.status()["tiers"] if tier["name"] == "cpu")
    )
    return server


def _pinned(server: ServerProcess) -> int:
    status = server.status()
    return int(status["leases"]) + int(status["stores"])


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_what_one_engine_stored_another_loads_to_the_byte(running: ServerProcess, transport: str) -> None:
    """B3.15 Unknown chunks miss; another engine's chunks are first unknown, then hits."""
    keys = keys_of(40, seed=len(transport))
    with world(running.endpoint, tier={"transport": transport, "tenant": transport}) as first:
        assert first.tier._client.transport == transport
        early = request_of("early", keys)
        first.manager.on_new_request(early)
        assert first.ask(early, keys) == [RETRY] * 40
        assert first.find(early, keys) == [MISS]
        first.run("stores", keys)
    with world(running.endpoint, tier={"transport": transport, "tenant": transport}) as second:
        late = request_of("late", keys)
        second.manager.on_new_request(late)
        assert second.ask(late, keys)[0] is RETRY
        assert second.find(late, keys) == [HIT] * 40
        assert second.read(late, keys) == [content_of(key) for key in keys]
        second.step("late")
        second.manager.on_request_finished(late)
        second.until(lambda: _pinned(running) == 0)


def test_a_prefix_ends_where_the_store_does(running: ServerProcess) -> None:
    """The prefix up to the first missing chunk hits, but not for another tenant or model."""
    keys = keys_of(6, seed=1)
    with world(running.endpoint) as filler:
        filler.run("stores", keys[:3])
    with world(running.endpoint) as reader:
        context = request_of("r", keys)
        reader.manager.on_new_request(context)
        assert reader.find(context, keys) == [HIT, HIT, HIT, MISS]
    for other in ({"tier": {"tenant": "other"}}, {"tier": {"identity": "other"}}, {"kv_cache_layout": "LBHNC"}):
        with world(running.endpoint, **other) as stranger:
            context = request_of("r", keys)
            stranger.manager.on_new_request(context)
            assert stranger.find(context, keys) == [MISS], other


def test_windows_are_found_from_their_end(running: ServerProcess) -> None:
    """B4.10 vLLM asks for windows from the end: a missing chunk does not hide earlier ones."""
    whole, windows = keys_of(6, seed=2), keys_of(6, seed=2, group=1)
    with world(running.endpoint, groups=2) as filler:
        filler.run("stores", whole)
        filler.run("stores windows", windows[2:4])
    with world(running.endpoint, groups=2) as reader:
        context = request_of("r", whole)
        for number, key in enumerate(windows):
            context.set_offload_key_position(key, 16 * (number + 1))
        reader.manager.on_new_request(context)

        def asked() -> list[LookupResult]:
            answers = [reader.manager.lookup(key, context) for key in (*whole, *reversed(windows))]
            reader.step()
            return answers

        reader.until(lambda: not {RETRY, LookupResult.HIT_PENDING} & set(asked()))
        assert asked() == [HIT] * 6 + [MISS, MISS, HIT, HIT, MISS, MISS]
        assert reader.read(context, windows[2:4]) == [content_of(key) for key in windows[2:4]]


def test_what_was_found_stays_until_it_is_loaded_or_the_request_ends(running: ServerProcess) -> None:
    """B4.3 A hit is pinned at the server until its request runs or ends."""
    keys = keys_of(4, seed=3)
    with world(running.endpoint) as filler:
        filler.run("stores", keys)
    with world(running.endpoint, tier={"transport": "grpc"}) as reader:
        for name in ("runs", "aborted"):
            context = request_of(name, keys)
            reader.manager.on_new_request(context)
            assert reader.manager.lookup(keys[0], context) is RETRY
            reader.step()
            reader.until(lambda: bool(_pinned(running)))
            if name == "runs":
                reader.find(context, keys)
                reader.step(name)
                reader.until(lambda: not _pinned(running))
            reader.manager.on_request_finished(context)
            reader.until(lambda: not _pinned(running))
            reader.reset()


def test_a_request_that_ends_while_it_is_looked_up_or_loaded_leaves_nothing(running: ServerProcess) -> None:
    """B4.3 Ended at any moment: each job is reported, and nothing stays pinned."""
    keys = keys_of(8, seed=4)
    with world(running.endpoint) as filler:
        filler.run("stores", keys)
    with world(running.endpoint) as reader:
        for moment in range(4):
            context = request_of(f"aborted {moment}", keys)
            reader.manager.on_new_request(context)
            for _ in range(moment):
                reader.ask(context, keys)
                time.sleep(0.03)
            reader.manager.on_request_finished(context)
        reader.idle()
        reader.until(lambda: not _pinned(running))
        context = request_of("next", keys)
        reader.manager.on_new_request(context)
        assert reader.find(context, keys) == [HIT] * 8
        assert reader.read(context, keys) == [content_of(key) for key in keys]


def test_a_reset_keeps_what_the_server_has(running: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """B3.19 Jobs end, the primary tier is emptied, and kvtier's chunks are found again."""
    monkeypatch.setattr(manager, "_DRAIN_SECONDS", LONG_TIMEOUT_SECONDS)
    keys = keys_of(8, seed=5)
    with world(running.endpoint) as engine:
        context = request_of("r", keys)
        engine.manager.on_new_request(context)
        engine.store(context, keys)
        engine.reset()
        assert not engine.manager.has_pending_work()
        assert engine.find(context, keys) == [HIT] * 8
        assert engine.read(context, keys) == [content_of(key) for key in keys]


def test_without_a_server_everything_is_a_miss(tmp_path: Path) -> None:
    """Without a server requests miss at once and stores are reported; a later server is used."""
    keys = keys_of(4)
    server = ServerProcess(tmp_path)
    with world(server.endpoint) as engine:
        context = request_of("r", keys)
        engine.manager.on_new_request(context)
        assert engine.ask(context, keys) == [MISS]
        engine.run("stores", keys)
        _start(server)
        try:
            engine.until(lambda: bool(engine.tier._client and engine.tier._client.connected))
            engine.reset()
            engine.run("stores again", keys)
            engine.reset()
            context = request_of("late", keys)
            engine.manager.on_new_request(context)
            assert engine.find(context, keys) == [HIT] * 4
        finally:
            server.kill()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_hung_server_holds_nothing_up(server: ServerProcess, transport: str) -> None:
    """A server that hangs: lookups, stores, loads and a reset end in bounded time."""
    stored, others = keys_of(8, seed=6), keys_of(8, seed=7)
    table = {"lookup_timeout_s": 1.0, "transport": transport}
    with world(server.endpoint, tier=table, long_timeout=False) as engine:
        engine.run("stores", stored)
        engine.reset()
        pinned = request_of("pinned", stored)
        engine.manager.on_new_request(pinned)
        engine.ask(pinned, stored)
        engine.until(lambda: engine.manager.lookup(stored[0], pinned) is not RETRY)
        server.signal(signal.SIGSTOP)
        start = time.monotonic()
        assert engine.find(pinned, stored)[-1] is MISS
        hung = request_of("hung", others)
        engine.manager.on_new_request(hung)
        assert engine.find(hung, others) == [MISS]
        assert engine.store(hung, others) == others
        engine.idle()
        engine.manager.on_request_finished(hung)
        engine.reset()
        assert engine.store(pinned, others) == others
        engine.reset()
        assert time.monotonic() - start < BOUND_SECONDS
        server.signal(signal.SIGCONT)
        engine.until(
            lambda: bool(
                engine.tier._client and engine.tier._client.connected and not engine.tier._lookups.circuit.is_open
            )
        )  # type: ignore[union-attr]
        engine.run("after", others)
        engine.reset()
        later = request_of("later", others)
        engine.manager.on_new_request(later)
        assert engine.find(later, others) == [HIT] * 8
        assert engine.read(later, others) == [content_of(key) for key in others]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_server_killed_between_submit_and_finish_fails_the_job(server: ServerProcess, transport: str) -> None:
    """B3.18 Jobs that a dead server took are reported once, and nothing of them is used."""
    stored, others = keys_of(8, seed=8), keys_of(8, seed=9)
    with world(server.endpoint, tier={"transport": transport}, long_timeout=False) as engine:
        engine.run("stores", stored)
        wait_until_durable(server)
        engine.reset()
        context = request_of("r", stored)
        engine.manager.on_new_request(context)
        engine.ask(context, stored)
        lookups = engine.tier._lookups
        engine.until(lambda: bool(lookups._done))
        server.signal(signal.SIGSTOP)
        assert [engine.manager.lookup(key, context) for key in stored] == [LookupResult.HIT_PENDING] * 8
        engine.store(context, others)
        engine.step()
        assert engine.manager.has_pending_work()
        server.kill()
        engine.idle()
        assert engine.find(context, stored) == [MISS]
        assert engine.read(context, others) == [content_of(key) for key in others]
        engine.manager.on_request_finished(context)
        _start(server)
        engine.until(
            lambda: bool(engine.tier._client and engine.tier._client.connected and not lookups.circuit.is_open)
        )
        later = request_of("later", stored)
        engine.manager.on_new_request(later)
        assert engine.find(later, stored) == [HIT] * 8
        assert engine.read(later, stored) == [content_of(key) for key in stored]


def test_policies_by_their_names_here(running: ServerProcess) -> None:
    """B3.1 block_level is this vLLM's chunk_level; a flagged request is stored whole (B1.6)."""
    keys = keys_of(4, seed=10)
    with world(running.endpoint) as engine:
        plain, flagged = request_of("plain", keys), request_of("flagged", keys, FLAG)
        assert engine.manager.on_new_request(plain).policy is OffloadPolicy.CHUNK_LEVEL
        assert engine.manager.on_new_request(flagged).policy is OffloadPolicy.REQUEST_LEVEL


def test_a_request_may_leave_nothing_behind(running: ServerProcess) -> None:
    """`skip_save` keeps a request's chunks from kvtier; its jobs are reported."""
    keys = keys_of(4, seed=12)
    with world(running.endpoint) as engine:
        engine.run("private", keys, {"kvtier": {"skip_save": True}})
        assert not engine.manager.has_pending_work()
        engine.reset()
        context = request_of("r", keys)
        engine.manager.on_new_request(context)
        assert engine.find(context, keys) == [MISS]


@pytest.mark.parametrize("how", ["touch", "end"])
def test_uses_of_the_engine_s_own_chunks_reach_the_server(tmp_path: Path, how: str) -> None:
    """B4.9 `touch` and the end of a request mark chunks as used: others are evicted first."""
    (tmp_path / "kvtier.toml").write_text('tiers = []\n[cpu]\neviction = "lru"\n')
    server = ServerProcess(tmp_path, region="1MiB", flags=["--config", str(tmp_path / "kvtier.toml")])
    server.start()
    hot, cold, others = keys_of(64, seed=13), keys_of(64, seed=14), keys_of(160, seed=15)
    try:
        with world(server.endpoint, rows=512) as engine:
            engine.run("hot", hot)
            engine.run("cold", cold)
            again = request_of("again", hot)
            engine.manager.on_new_request(again)
            assert engine.ask(again, hot) == [HIT] * 64
            if how == "touch":
                engine.manager.touch(hot, again)
            else:
                engine.step("again")
                engine.manager.on_request_finished(again)
            control = engine.tier._lookups._control_thread
            marked = threading.Event()
            control.submit(marked.set)
            assert marked.wait(LONG_TIMEOUT_SECONDS)
            engine.run("others", others)
        with world(server.endpoint) as reader:
            for name, keys in (("hot", hot), ("cold", cold)):
                context = request_of(name, keys)
                reader.manager.on_new_request(context)
                found = reader.find(context, keys)
                assert (found == [HIT] * 64) is (name == "hot"), name
    finally:
        server.kill()


@pytest.mark.parametrize(("params", "offered"), [(None, 0), (FLAG, 4)])
def test_a_flagged_request_stores_what_the_primary_tier_has_already(
    running: ServerProcess, params: dict[str, bool] | None, offered: int
) -> None:
    """B1.1, B3.6 Chunks that vLLM holds are offered again only at request level."""
    keys = keys_of(4, seed=11)
    with world(running.endpoint) as engine:
        engine.run("stores", keys)
        submitted: list[bytes] = []
        submit = engine.tier.submit_store

        def spy(job: TransferJob) -> None:
            submitted.extend(job.keys)
            submit(job)

        engine.tier.submit_store = spy  # type: ignore[method-assign]
        engine.run("again", keys, params)
        assert len(submitted) == offered
        assert not engine.manager.has_pending_work()
