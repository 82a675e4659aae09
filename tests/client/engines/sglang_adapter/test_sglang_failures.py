"""Failures of the server, and settings that are wrong or not supported."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from harness.polling import wait_until
from harness.server_process import ServerProcess
from rig import attach, extra_config, hashes, kv_pool, page_of, rows
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

from kvtier.client import DeadlineExceeded
from kvtier.client.effects import Call, Connect
from kvtier.client.engines.sglang import deadlines, links, storage
from kvtier.client.engines.sglang.config import StorageConfig
from kvtier.client.engines.sglang.deadlines import CALL_SECONDS, COPY_SECONDS, END_SECONDS, Deadline, DeadlineTransport

KEYS = hashes("prompt", 6)
ALL = rows(*range(6))


def assert_all_miss(attached: storage.KVTierStorage) -> None:
    """Asserts that each hook returns what SGLang takes for misses."""
    sidecar = PoolTransfer(PoolName.MAMBA, rows(0, page=1), keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert attached.batch_exists(KEYS) == 0
    assert attached.batch_get_v1(KEYS, ALL) == attached.batch_set_v1(KEYS, ALL) == [False] * 6
    found = attached.batch_exists_v2(KEYS, [sidecar])
    assert (found.kv_hit_pages, found.restorable_prefix_pages or []) == (0, [])
    assert attached.batch_get_v2([sidecar]) == attached.batch_set_v2([sidecar]) == {PoolName.MAMBA: [False]}
    attached.clear()
    assert attached.get_stats() is not None
    assert not attached.exists(KEYS[0])


def test_without_a_server_all_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts, and each call returns misses; a server that starts later is used."""
    with ServerProcess(tmp_path) as server, attach(server.endpoint, kv_pool(seed=1)) as attached:
        assert_all_miss(attached)
        assert "no server is connected yet" in caplog.text
        server.start()
        wait_until(lambda: all(attached.batch_set_v1(KEYS, ALL)))
        assert attached.batch_exists(KEYS) == 6


def test_in_a_forked_child_all_is_a_miss(server: ServerProcess) -> None:
    """Also while another thread of the parent holds the locks of log and lookups."""
    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        assert all(attached.batch_set_v1(KEYS, ALL))
        link = attached._links[storage.KV]  # type: ignore[attr-defined]
        with attached.log._lock, link._found._lock:
            if (pid := os.fork()) == 0:
                signal.alarm(60)
                code = 1
                try:
                    assert_all_miss(attached)
                    code = 0
                finally:
                    os._exit(code)
        # gRPC may abort the child.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, -signal.SIGABRT)
        assert attached.batch_exists(KEYS) == 6
        assert all(attached.batch_get_v1(KEYS, ALL))


def test_a_server_that_dies_between_lookup_and_load(server: ServerProcess) -> None:
    """A load that finds no server misses; after a restart the pages come from the disk."""
    pool = kv_pool()
    with attach(server.endpoint, kv_pool(seed=1)) as ours, attach(server.endpoint, pool) as attached:
        ours.batch_set_v1(KEYS, ALL)
        server.wait_for_stored(6)
        assert attached.batch_exists(KEYS) == 6
        server.kill()
        assert attached.batch_get_v1(KEYS, ALL) == [False] * 6
        server.start()
        wait_until(lambda: all(attached.batch_get_v1(KEYS, ALL)))
        assert any(page_of(pool, 5))


def test_a_lease_of_a_lost_session_is_not_used(server: ServerProcess) -> None:
    """If the server was restarted between lookup and load, the load uses a later lookup."""
    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        attached.batch_set_v1(KEYS, ALL)
        server.wait_for_stored(6)
        assert attached.batch_exists(KEYS) == 6
        server.restart()
        wait_until(lambda: attached.batch_exists(KEYS) == 6, otherwise=server.status)
        assert attached.batch_get_v1(KEYS, ALL) == [True] * 6


@pytest.mark.parametrize("way", ["load", "store"])
def test_a_server_that_dies_during_a_copy(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """If the end of a copy cannot be confirmed, its pages count as not loaded or not stored."""
    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        attached.batch_set_v1(KEYS[:3], rows(0, 1, 2))
        copy = links.copy_batch  # type: ignore[attr-defined]

        def die(*batch: Any) -> None:
            copy(*batch)
            server.kill()

        monkeypatch.setattr(links, "copy_batch", die)
        if way == "load":
            assert attached.batch_exists(KEYS) == 3
            assert attached.batch_get_v1(KEYS[:3], rows(3, 4, 5)) == [False] * 3
        else:
            assert attached.batch_set_v1(KEYS[3:], rows(3, 4, 5)) == [False] * 3


def test_calls_to_a_server_that_hangs_end_in_time(server: ServerProcess) -> None:
    """SGLang ends itself if a thread of its storage does not end within 10 s."""
    found: list[Any] = []

    def call(attached: storage.KVTierStorage) -> None:
        found.append(attached.batch_get_v1(KEYS, ALL))
        found.append(attached.batch_exists(KEYS))
        found.append(attached.batch_set_v1(KEYS, ALL))

    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        assert all(attached.batch_set_v1(KEYS, ALL))
        attached.call_seconds = 1.0
        server.suspend()
        try:
            thread = threading.Thread(target=call, args=(attached,), daemon=True)
            thread.start()
            thread.join(10)
            assert found == [[False] * 6, 0, [False] * 6]
        finally:
            server.resume()


def test_two_calls_end_in_time() -> None:
    """A load thread of SGLang can make two calls for three pools after it was told to stop."""
    assert 2 * CALL_SECONDS + 3 * END_SECONDS < 10


@pytest.mark.parametrize(("way", "seconds", "pages"), [("load", 85, 2), ("store", 85, 3), ("store", 70, 2)])
def test_what_is_copied_in_time_counts(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, way: str, seconds: int, pages: int
) -> None:
    """A call that takes too long ends after the copy in progress, and the session continues.

    If the copy in progress is a store, it counts. No copy begins with less than END_SECONDS left.
    """
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    copy = links.copy_batch  # type: ignore[attr-defined]

    def slow_copy(*batch: Any) -> None:
        nonlocal now
        copy(*batch)
        now += 30.0

    monkeypatch.setattr(links, "_BATCH_BYTES", 1)
    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        assert way == "store" or all(attached.batch_set_v1(KEYS, ALL))
        attached.call_seconds = seconds
        (client,) = attached._clients
        client.wait_until_connected()
        session = client._transport.session
        monkeypatch.setattr(deadlines, "time", clock)
        monkeypatch.setattr(deadlines, "END_SECONDS", 20.0)
        monkeypatch.setattr(links, "copy_batch", slow_copy)
        move = attached.batch_get_v1 if way == "load" else attached.batch_set_v1
        assert move(KEYS, ALL) == [number < pages for number in range(6)]
        assert client._transport.session is session
        assert server.status().leases == 0


def test_the_server_gets_the_time_that_is_left() -> None:
    """The first effect of a call has its own time-out, the next the rest, and then none begins.

    Only calls that end a store or a lease begin later, and need a connected session.
    """
    transport = mock.Mock()
    deadline = Deadline()
    bounded = DeadlineTransport(transport, deadline)
    with deadline.within(1000):
        bounded.perform(Call("first", None, 2.0))
        bounded.perform(Call("second", None, 5000.0))
        with deadline.within(0):
            with pytest.raises(DeadlineExceeded):
                bounded.perform(Call("third", None, 2.0))
            bounded.perform(Call("CacheService/CompleteStore", None, 2.0))
            bounded.perform(Connect(2.0))
            bounded.perform(Call("CacheService/ReleaseLease", None, 2.0))
            bounded.perform(Call("CacheService/WithdrawGrants", None, 2.0))
    bounded.perform(Call("no deadline", None, 5000.0))
    effects = [call.args[0] for call in transport.perform.call_args_list]
    timeouts = {getattr(effect, "method", "connect"): effect.timeout for effect in effects}
    assert timeouts.pop("second") <= 1000
    assert timeouts == {
        "first": 2.0,
        "CacheService/CompleteStore": END_SECONDS,
        "connect": 0.0,
        "CacheService/ReleaseLease": END_SECONDS,
        "CacheService/WithdrawGrants": END_SECONDS,
        "no deadline": 5000.0,
    }


def test_other_calls_of_the_transport_are_passed_on() -> None:
    """They wait for nothing, so the deadline does not concern them."""
    transport = mock.Mock()
    bounded, session = DeadlineTransport(transport, Deadline()), mock.Mock()
    assert bounded.session is transport.session
    with bounded._deadline.within(0):
        bounded.withdraw(session, 7)
        bounded.invalidate(session)
        bounded.close()
    assert transport.mock_calls == [mock.call.withdraw(session, 7), mock.call.invalidate(session), mock.call.close()]


def test_a_deadline_inside_another_is_not_longer() -> None:
    """One call by SGLang can be part of another; then the earlier deadline counts."""
    deadline = Deadline()
    with deadline.within(100):
        with deadline.within(1000):
            assert deadline.left() <= 100
        with deadline.within(10):
            assert deadline.left() <= 10
        assert 10 < deadline.left() <= 100
    assert deadline.left() > 1000


def test_one_warning_for_many_failures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is down costs a line in the log, not a line per request."""
    with ServerProcess(tmp_path) as server:
        with attach(server.endpoint, kv_pool()) as attached:
            for _ in range(20):
                attached.batch_exists(KEYS)
        assert caplog.text.count("a lookup failed") == 1


def test_a_defect_is_a_miss(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """An exception of our own code is logged with its traceback, and does not reach SGLang."""
    with attach(server.endpoint, kv_pool(seed=1)) as attached:
        assert attached.batch_exists(["no hash"]) == 0
        assert attached.batch_get_v1(["no hash"], rows(0)) == [False]
        assert attached.batch_set_v1(["no hash"], rows(0)) == [False]
        assert attached.batch_exists_v2(["no hash"], []) == PoolTransferResult(0, {}, [])
    assert "batch_exists failed" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"arguments": {"model": {"revision": "", "model_path": "no/such-model"}}}, "cannot identify the weights"),
        ({"is_mla_model": True}, "draft model of another kind"),
        ({"arguments": {"parallel": {"enable_kv_cache_sharding": True}}}, "KV cache sharding"),
    ],
)
def test_what_is_not_supported_is_disabled(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    """One warning gives the reason, and every page is a miss."""
    with attach(server.endpoint, kv_pool(), **options) as attached:
        assert reason in caplog.text
        assert_all_miss(attached)


def test_a_set_up_that_fails_disables_the_storage(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect, or a file that cannot be read, does not end the engine."""

    def fail(*_: object) -> None:
        raise PermissionError("config.json")

    monkeypatch.setattr(storage, "prepare_spaces", fail)
    with attach(server.endpoint, kv_pool()) as attached:
        assert "the storage is disabled, every page is a miss: config.json" in caplog.text
        assert_all_miss(attached)


def test_a_pool_without_bytes_is_disabled(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """A pool can share the pages of another one."""
    pool = kv_pool()
    pool.get_page_buffer_meta = lambda _: ([], [])
    with attach(server.endpoint, pool) as attached:
        assert "the host pool kv has no bytes of its own" in caplog.text
        assert attached.batch_exists(KEYS) == 0


def test_a_pool_without_addresses_is_disabled(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says which layout helps."""
    pool = kv_pool()
    pool.layout = "page_unified"
    del pool.kv_buffer
    with attach(server.endpoint, pool) as attached:
        assert "try --hicache-mem-layout page_first_direct" in caplog.text
        assert attached.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"interface_v1": 0}, '"interface_v1": 1'),
        ({"endpoint": 7}, "endpoint must be a string"),
        ({"endpoint": "no endpoint"}, "endpoint"),
        ({"transport": "cuda_ipc"}, "transport must not be cuda_ipc"),
        ({"transport": "carrier pigeon"}, "transport must be one of"),
        ({"lookup_timeout_s": -1}, "lookup_timeout_s must be a number from 0 to 60"),
        ({"load_timeout_s": "long"}, "load_timeout_s must be a number from 0.1 to 60"),
        ({"model_name": 1}, "model_name must be a string"),
        ({"tenant": None}, "tenant must be a string"),
    ],
)
def test_wrong_settings_end_the_start(setting: dict[str, Any], message: str) -> None:
    """The engine does not start with a setting that is certainly wrong, and the error names it."""
    with pytest.raises(ValueError, match=message), attach("unix:/nowhere", kv_pool(), extra=setting):
        pass


def test_unknown_settings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt setting is ignored, with a hint; settings of SGLang are no mistake."""
    config = extra_config(allocator="shm", load_timout_s=3) | {"lookup_timeout_s": 1, "load_timeout_s": 3}
    StorageConfig.parse(config, logging.getLogger().warning)
    (record,) = caplog.records
    assert "unknown key 'load_timout_s' in hicache_storage_backend_extra_config is ignored" in record.message
    assert record.message.endswith("did you mean load_timeout_s?")


@pytest.mark.parametrize(("name", "low"), [("lookup_timeout_s", 0.0), ("load_timeout_s", 0.1)])
def test_the_limits_of_waits(name: str, low: float) -> None:
    """A load waits for a moment at least. No wait is longer than a call without its copies."""
    for right in (low, CALL_SECONDS - COPY_SECONDS):
        assert getattr(StorageConfig.parse({"interface_v1": 1, name: right}, pytest.fail), name) == right
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        StorageConfig.parse({"interface_v1": 1, name: low - 0.001}, pytest.fail)
    usual = StorageConfig.parse({"interface_v1": 1}, pytest.fail)
    assert (usual.lookup_timeout_s, usual.load_timeout_s) == (1.0, 3.0)


@pytest.mark.parametrize("setting", ["lookup_timeout_s", "load_timeout_s"])
def test_no_wait_is_longer_than_a_call(setting: str) -> None:
    """SGLang's limit applies to all settings."""
    config = extra_config(lookup_timeout_s=1, load_timeout_s=3)
    StorageConfig.parse(config, logging.getLogger().warning)
    with pytest.raises(ValueError, match=f"{setting} must be a number from .* to 3, not 3.1"):
        StorageConfig.parse(config | {setting: 3.1}, logging.getLogger().warning)
