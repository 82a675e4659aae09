"""Hand-offs of vLLM's connector: both halves over real servers, without an engine (B2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import UNKNOWN_ADAPTER
from handoff_engine import BLOCK, FIRST_TURN, ToyEngine
from harness.polling import wait_until
from harness.ports import ReservedPort
from server_process import ServerProcess

from kvtier.client.engines.vllm.config import ConnectorConfig

PROMPT = list(range(100, 100 + 6 * BLOCK + 3))
BOTH_WAYS = ConnectorConfig(bidirectional_kv_xfer=True, kv_recompute_threshold=0)
MakeEngine = Callable[..., ToyEngine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "64MiB")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def make(server: ServerProcess) -> Iterator[MakeEngine]:
    """Creates engines of that server, or of another one."""
    engines: list[ToyEngine] = []

    def make(name: str, config: ConnectorConfig = BOTH_WAYS, endpoint: str = server.endpoint, **more: Any) -> ToyEngine:
        engines.append(ToyEngine(endpoint, name, config, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def prefill(make: MakeEngine) -> ToyEngine:
    return make("P")


@pytest.fixture
def decode(make: MakeEngine) -> ToyEngine:
    """A decode engine of the same server."""
    return make("D")


def holds_of(server: ServerProcess) -> list[str]:
    return [hold["request_id"] for hold in server.handoffs()["handoffs"]]


def params_of(engine: ToyEngine, tokens: list[int], params: Any = FIRST_TURN, new_tokens: int = 0) -> dict[str, Any]:
    answer = engine.run(tokens, params, new_tokens).params
    assert answer is not None
    return answer


def test_a_conversation_of_three_turns(server: ServerProcess, prefill: ToyEngine, decode: ToyEngine) -> None:
    """B2.2, B2.3, B2.6, B2.10, B2.18 Each engine computes only new tokens."""
    tokens, params = list(PROMPT), dict(FIRST_TURN)
    for number in range(3):
        first = prefill.run(tokens, params)
        assert first.computed == (len(tokens) if number == 0 else 5 + 1)
        assert first.params is not None
        second = decode.run(tokens, first.params, 10)
        assert second.computed == 9, "the last token has no KV yet"
        assert second.params is not None
        params, tokens = second.params, [*second.tokens, 7, 7, 7, 7, 7]
    counts = prefill.counts()
    assert (counts["claims:granted"], counts["publications:published"]) == (2, 3)
    assert counts["pull_tokens"] == sum(len(PROMPT) + 9 + 15 * turn for turn in range(2))
    assert counts["pull_blocks:pulled"] == sum(-(-(len(PROMPT) + 9 + 15 * turn) // BLOCK) for turn in range(2))
    assert holds_of(server) == [params["remote_request_id"]], "the others were released by who pulled them"
    totals = {total["direction"]: total["published"] for total in server.handoffs()["totals"]}
    assert totals == {"prefill_to_decode": 3, "decode_to_prefill": 3}


@pytest.mark.parametrize("lazy", [False, True])
def test_all_of_a_request_is_held(make: MakeEngine, decode: ToyEngine, *, lazy: bool) -> None:
    """B2.17 Blocks that were loaded are held too, also in lazy mode, which stores blocks later."""
    prefill = make("P", replace(BOTH_WAYS, lazy_offload=lazy))
    make("other").run(PROMPT[: 3 * BLOCK])
    first = prefill.run(PROMPT, FIRST_TURN)
    assert first.computed == len(PROMPT) - 3 * BLOCK
    assert decode.run(PROMPT, first.params).computed == 0


@pytest.mark.parametrize("loaded", [False, True])
def test_blocks_evicted_before_the_request_ends_are_held(
    server: ServerProcess, make: MakeEngine, decode: ToyEngine, monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    """B2.17 B4.15 A server with only a CPU tier had the blocks when they were stored or loaded."""
    prefill = make("P")
    if loaded:
        make("other").run(PROMPT[: 3 * BLOCK])
    end = prefill.end

    def end_after_eviction(*args: Any) -> Any:
        wait_until(lambda: not prefill.step() and not prefill.scheduler.has_pending_work())
        server.evict_all()
        return end(*args)

    monkeypatch.setattr(prefill, "end", end_after_eviction)
    first = prefill.run(PROMPT, FIRST_TURN)
    assert first.computed == len(PROMPT) - (3 * BLOCK if loaded else 0)
    assert decode.run(PROMPT, first.params).computed == 0


@pytest.mark.parametrize(("prompt_tokens", "pulled"), [(68, 0), (69, 64)])
def test_too_few_tokens_are_computed(
    make: MakeEngine, server: ServerProcess, decode: ToyEngine, prompt_tokens: int, pulled: int
) -> None:
    """B2.4, B2.11 Below the threshold of 64 nothing is pulled, and the other engine is told."""
    prompt = list(range(prompt_tokens))
    params = params_of(decode, prompt[:5], {"do_remote_prefill": True}) | {"remote_num_tokens": prompt_tokens - 5}
    held = params_of(decode, prompt[: prompt_tokens - 5], {"do_remote_prefill": True})
    assert held["remote_num_tokens"] == prompt_tokens - 5
    prefill = make("P", ConnectorConfig(bidirectional_kv_xfer=True), may_load=False)
    assert prefill.run(prompt, held).computed == prompt_tokens - pulled
    assert held["remote_request_id"] not in holds_of(server)
    assert params["remote_request_id"] in holds_of(server)


@pytest.mark.parametrize("knows", [True, False])
def test_what_has_expired_is_not_read(make: MakeEngine, prefill: ToyEngine, *, knows: bool) -> None:
    """B2.19 A hold of six seconds expires after one, by its parameters, or else by the server."""
    decode = make("D", replace(BOTH_WAYS, decoder_kv_blocks_ttl=6.0 if knows else 1.0))
    params = params_of(decode, PROMPT, {"do_remote_prefill": True})
    params["remote_blocks_expiry_time"] -= 1.0
    if not knows:
        params["remote_blocks_expiry_time"] = None
    prefill.run(PROMPT[:BLOCK])
    turn = prefill.run(PROMPT, params)
    counts = prefill.counts()
    assert counts.get("pull_tokens", 0) == 0
    assert counts.get("claims:gone", 0) == (0 if knows else 1)
    assert turn.computed == len(PROMPT) - 6 * BLOCK, "what is cached is loaded as ever"


def test_a_request_that_ends_before_it_is_scheduled(
    server: ServerProcess, prefill: ToyEngine, decode: ToyEngine
) -> None:
    """B2.14 The holder is told in every state of the claim, and nothing is returned."""
    for asks in (False, True):
        params = params_of(prefill, PROMPT)
        request = decode.arrive(PROMPT, params)
        if asks:
            assert decode.match(request) == len(PROMPT)
        assert decode.end(request, [], "FINISHED_ABORTED") is None
        decode.settle()
        is_released(server, params)


def test_a_request_that_ends_while_it_is_pulled(server: ServerProcess, prefill: ToyEngine, decode: ToyEngine) -> None:
    """B2.16, B5.6 Blocks that are still being written are neither saved nor freed."""
    params = params_of(prefill, PROMPT)
    decode.counts()
    request = decode.arrive(PROMPT, params)
    assert decode.match(request) == len(PROMPT)
    table = list(range(1, 8))
    decode.scheduler.blocks_allocated(request, [table], len(PROMPT))
    request.num_computed_tokens = len(PROMPT)
    assert decode.end(request, table, "FINISHED_ABORTED") is None
    assert decode.scheduler.has_pending_work(), "the engine must step on: a load is to be reported"
    assert not decode.scheduler.reset(), "B4.13"
    decode.settle()
    counts = decode.counts()
    # A lease ends with its request, so the load may have failed.
    assert counts.get("pull_blocks:pulled", 0) + counts.get("pull_blocks:failed", 0) == 7
    assert counts.get("save_blocks:stored", 0) == 0
    is_released(server, params)


def test_a_pull_that_fails_is_computed(server: ServerProcess, prefill: ToyEngine, decode: ToyEngine) -> None:
    """B2.10 One transfer per request; the server dies between claim and pull."""
    params = params_of(prefill, PROMPT)
    turn = decode.run(PROMPT, params, before_pull=server.kill)
    assert turn.computed == len(PROMPT)
    counts = decode.counts()
    assert (counts["pull_blocks:failed"], counts["claims:granted"]) == (7, 1)


def test_a_hold_is_called_as_the_caller_says(prefill: ToyEngine, decode: ToyEngine) -> None:
    """A caller may name the hold, so that prefill and decode can be asked at the same time."""
    theirs = {
        "do_remote_prefill": True,
        "remote_engine_id": "P",
        "remote_request_id": "turn 1",
        "remote_block_ids": [[0]],
    }
    host, port = prefill.scheduler._handoffs._core._identity[1:3]
    request = decode.arrive(PROMPT, theirs | {"remote_host": host, "remote_port": port})
    assert decode.scheduler.matched_tokens(request, 0) == (None, False)
    params = params_of(prefill, PROMPT, FIRST_TURN | {"kvtier": {"hold_as": "turn 1"}})
    assert params["remote_request_id"] == "turn 1"
    assert decode.match(request) == len(PROMPT)
    decode.end(request, [], "FINISHED_ABORTED")


@pytest.mark.parametrize("known", [True, False])
def test_servers_of_two_hosts(server: ServerProcess, tmp_path: Path, make: MakeEngine, *, known: bool) -> None:
    """Blocks are pulled only from servers in the settings, because parameters come from outside.

    The engine's own server counts the requests that are computed because of this.
    """
    (tmp_path / "far").mkdir()
    far = ServerProcess(tmp_path / "far", "64MiB", ["--insecure"])
    reserved = ReservedPort()
    far.endpoint = f"127.0.0.1:{reserved.number}"
    far.start()
    try:
        params = params_of(make("P", endpoint=far.endpoint), PROMPT)
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", int(far.endpoint.rpartition(":")[2]))
        decode = make("D", replace(BOTH_WAYS, peers=[far.endpoint] if known else ["127.0.0.1:1"]))
        assert decode.run(PROMPT, params).computed == (0 if known else len(PROMPT))
        assert decode.counts().get("claims:peer_not_listed", 0) == (0 if known else 1)
        assert server.handoffs()["missed_claims"] == ({} if known else {"peer_not_listed": 1})
        assert (params["remote_request_id"] in holds_of(far)) is not known
        assert make("D2").run(PROMPT).computed == len(PROMPT) - 6 * BLOCK, "its own server has it, too, now"
    finally:
        far.kill()
        reserved.close()


def test_roles_are_about_the_cache(make: MakeEngine) -> None:
    """A producer pulls, and a consumer holds, if a request asks for it; otherwise not."""
    producer, consumer = make("P", may_load=False), make("D", may_save=False)
    first = consumer.run(PROMPT, {"do_remote_prefill": True}, 5)
    assert producer.run([*first.tokens, 7], first.params).computed == 2, "the last token's KV was never computed"
    consumer.run(list(range(40)))
    assert make("other").run(list(range(40))).computed == 40


@pytest.mark.parametrize(
    ("theirs", "pulls", "holds"),
    [({"skip_load": True}, False, True), ({"skip_save": True}, True, False), ({"hold": False}, True, False)],
)
def test_what_a_request_does_not_want(
    server: ServerProcess, prefill: ToyEngine, decode: ToyEngine, theirs: Any, *, pulls: bool, holds: bool
) -> None:
    """A request without loads pulls nothing; one without saves, or without hold, is not held."""
    params = params_of(prefill, PROMPT)
    turn = decode.run(PROMPT, params | {"kvtier": theirs}, 1)
    assert (turn.computed == 0, turn.params is not None) == (pulls, holds)
    is_released(server, params)


def test_other_content_is_not_pulled(prefill: ToyEngine, decode: ToyEngine) -> None:
    """The last block's tokens may stand for an image, for example; its key covers that."""
    feature = SimpleNamespace(identifier="one", mm_position=SimpleNamespace(offset=len(PROMPT) - 2, length=2))
    request = prefill.arrive(PROMPT, FIRST_TURN)
    request.mm_features = [feature]
    prefill.scheduler.blocks_allocated(request, [list(range(1, 8))], 0)
    request.num_computed_tokens = len(PROMPT)
    params = prefill.end(request, list(range(1, 8)), "FINISHED_STOPPED")
    prefill.settle()
    for identifier, tokens in (("another", 6 * BLOCK), ("one", len(PROMPT))):
        asked = decode.arrive(PROMPT, params)
        asked.mm_features = [SimpleNamespace(identifier=identifier, mm_position=feature.mm_position)]
        assert decode.match(asked) == tokens
        # Dropped, not ended: the hold stays.
        decode.scheduler._handoffs._core._requests.clear()
        decode.scheduler._core._requests.clear()


def test_the_same_end_of_another_beginning_is_not_pulled(prefill: ToyEngine, decode: ToyEngine) -> None:
    """A partial block matches only behind the same tokens, also if nothing before it is pulled."""
    params = params_of(prefill, PROMPT)
    for prompt, pulled in (([7, *PROMPT[1:]], 0), (PROMPT, 3)):
        request = decode.arrive(prompt, params | {"kvtier": {"hold": False}})
        wait_until(lambda: decode.scheduler.matched_tokens(request, 6 * BLOCK)[0] is not None)  # noqa: B023 - called at once
        assert decode.scheduler.matched_tokens(request, 6 * BLOCK) == (pulled, pulled > 0)
        decode.scheduler._handoffs._core._requests.clear()
        decode.scheduler._core._requests.clear()


def test_a_request_with_an_unknown_adapter_is_not_handed_on(server: ServerProcess, prefill: ToyEngine) -> None:
    """The hashes of an adapter's blocks do not cover its weights."""
    request = prefill.arrive(PROMPT, FIRST_TURN)
    prefill.end(request, [], "FINISHED_ABORTED")
    request.lora_request = UNKNOWN_ADAPTER
    request.request_id = "adapted"
    prefill.scheduler.new_request(request)
    prefill.scheduler.blocks_allocated(request, [list(range(1, 8))], 0)
    request.num_computed_tokens = len(PROMPT)
    assert prefill.end(request, list(range(1, 8)), "FINISHED_STOPPED") is None
    prefill.settle()
    assert holds_of(server) == []


def is_released(server: ServerProcess, params: dict[str, Any]) -> None:
    """Waits until the hold is gone and every lease is released."""
    wait_until(lambda: params["remote_request_id"] not in holds_of(server))
    wait_until(lambda: server.status()["leases"] == 0)
