"""Several proxies share the holds of conversations in a Redis server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disagg_proxy.conversations import MAX_TURNS, Conversation, Conversations, FoundHold, Reuse
from disagg_proxy.metrics import Metrics
from disagg_proxy.shared import SharedConversations, _read
from disagg_proxy.transfer import first_turn
from harness.disagg_site import Site
from harness.ports import ReservedPort
from harness.redis_server import RedisServer, needs_redis
from harness.running_proxy import Clock

C1 = Conversation("owner", "m", "c1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the server time on a busy machine."""
    monkeypatch.setattr("disagg_proxy.shared.DEADLINE_S", 60.0)


def _shared(url: str, clock: Clock) -> SharedConversations:
    return SharedConversations(Conversations(), Metrics((), lambda: 0), clock, url)


@pytest.mark.remote
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_turn_continues_after_the_loss_of_a_replica(site: Site, store: RedisServer, *, is_stream: bool) -> None:
    """P of the next turn gets the hold that the other replica has recorded."""
    settings = replace(site.settings(), state=store.url)
    async with site.proxy(settings) as first:
        await first.turn(prompt="one", stream=is_stream)
    async with site.proxy(settings) as second:
        await second.turn(prompt="one, two", stream=is_stream)
        assert await second.metric("turns_total", reuse="hit") == 1
        assert await second.metric("state_errors_total", operation="find") == 0
    assert site.prefill[0].seen[0].handoff == first_turn()
    assert site.prefill[0].seen[1].params["remote_engine_id"] == site.decode[0].engine_id


@pytest.mark.remote
async def test_branches_at_two_replicas_use_the_same_hold(site: Site, store: RedisServer) -> None:
    """At the same time, and when one of them has ended."""
    settings = replace(site.settings(), state=store.url)
    async with site.proxy(settings) as first, site.proxy(settings) as second:
        await first.turn(prompt="one")
        await asyncio.gather(first.turn(prompt="one, two"), second.turn(prompt="one, three"))
        await second.turn(prompt="one, four")
        await second.turn(prompt="one, two, five")
    seen = [one.params.get("remote_request_id") for one in site.prefill[0].seen[1:]]
    assert None not in seen
    assert seen[0] == seen[1] == seen[2] != seen[3]


@pytest.mark.remote
async def test_the_server_has_the_latest_turns_of_a_conversation(store: RedisServer) -> None:
    """It removes the conversation after the lifetime of an entry."""
    shared = _shared(store.url, Clock())
    for number in range(MAX_TURNS + 3):
        await shared.put(C1, b"%d" % number, {"turn": number})
    assert await shared.find(C1, b"5, next") == FoundHold(Reuse.HIT, {"turn": 5})
    [key] = store.command("KEYS", "*")
    assert store.command("HLEN", key) == MAX_TURNS
    assert 440 < store.command("TTL", key) <= 450
    await shared.close()


@pytest.mark.remote
async def test_the_own_table_is_used_while_the_server_is_down(store: RedisServer) -> None:
    """The server is asked again a second later. Turns that it has lost are still found."""
    clock = Clock()
    shared = _shared(store.url, clock)
    await shared.put(C1, b"a", {"turn": 1})
    store.kill()
    assert await shared.find(C1, b"ab") == FoundHold(Reuse.HIT, {"turn": 1})
    store.start()
    clock.ahead = 2.0
    assert await shared.find(C1, b"ab") == FoundHold(Reuse.HIT, {"turn": 1})
    assert shared._metrics.state_errors.labels("find")._value.get() == 1
    await shared.close()


@pytest.mark.remote
async def test_a_server_that_hangs_is_given_up(store: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a deadline the proxy uses its own table."""
    shared = _shared(store.url, Clock())
    await shared.put(C1, b"a", {"turn": 1})
    monkeypatch.setattr("disagg_proxy.shared.DEADLINE_S", 0.05)
    store.freeze(frozen=True)
    assert await shared.find(C1, b"ab") == FoundHold(Reuse.HIT, {"turn": 1})
    assert shared._metrics.state_errors.labels("find")._value.get() == 1
    store.freeze(frozen=False)
    await shared.close()


@pytest.mark.remote
@pytest.mark.parametrize(("prompt", "turn"), [(b"one, two, three", 2), (b"one, four", 1), (b"another, too", 3)])
async def test_turns_of_the_server_and_of_the_own_table_are_found(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch, prompt: bytes, turn: int
) -> None:
    """If the server missed a turn, its older turns do not hide this turn."""
    monkeypatch.setattr("disagg_proxy.shared.PAUSE_S", 0.0)
    shared, other = _shared(store.url, Clock()), _shared(store.url, Clock())
    await other.put(C1, b"another", {"turn": 3})
    await shared.put(C1, b"one", {"turn": 1})
    store.command("CONFIG", "SET", "maxmemory", "1")  # refuses writes only
    await shared.put(C1, b"one, two", {"turn": 2})
    store.command("CONFIG", "SET", "maxmemory", "0")
    [key] = store.command("KEYS", "*")
    assert store.command("HLEN", key) == 2
    assert await shared.find(C1, prompt) == FoundHold(Reuse.HIT, {"turn": turn})
    for one in (shared, other):
        await one.close()


@pytest.mark.remote
async def test_fields_that_no_proxy_has_written_are_skipped(store: RedisServer) -> None:
    """The other turns of the conversation are still found, and no call counts as failed."""
    writer, reader = _shared(store.url, Clock()), _shared(store.url, Clock())
    await writer.put(C1, b"a", {"turn": 1})
    [key] = store.command("KEYS", "*")
    valid = {"prompt_bytes": 1, "until": time.time() + 900, "hold": {"turn": 2}}
    wrong = [
        {"prompt_bytes": None},
        {"prompt_bytes": -1},
        {"prompt_bytes": True},
        {"until": None},
        {"until": "9"},
        {"until": math.nan},
        {"until": math.inf},
        {"hold": [1]},
        {"hold": None},
    ]
    fields = [b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"until": 2e9}']
    fields += [json.dumps({**valid, **one}).encode() for one in wrong]
    for number, value in enumerate(fields):
        store.command("HSET", key, b"%d" % number, value)
    store.command("HSET", key, b"\xff", json.dumps(valid))
    assert await reader.find(C1, b"ab") == FoundHold(Reuse.HIT, {"turn": 1})
    assert len(await reader._ask("find", lambda server: _read(server, key))) == 1
    assert b"disagg_proxy_state_errors_total{" not in reader._metrics.render()
    store.command("HSET", key, hashlib.sha256(b"b").hexdigest(), json.dumps(valid))
    assert await reader.find(C1, b"b") == FoundHold(Reuse.HIT, {"turn": 2}), "the values are valid but for one each"
    for shared in (writer, reader):
        await shared.close()


async def test_a_server_that_is_absent_affects_no_request(site: Site) -> None:
    """The proxy counts the failure, and uses its own table."""
    with ReservedPort() as port:
        async with site.proxy(replace(site.settings(), state=f"valkey://127.0.0.1:{port.number}")) as proxy:
            for _ in range(2):
                assert (await proxy.turn()).status_code == 200
            assert await proxy.metric("turns_total", reuse="hit") == 1
            assert await proxy.metric("state_errors_total", operation="find") >= 1
