"""`publish_token_ids`: the connector tells a real server the tokens of blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FULL, FakeClient, make_request, make_step, scheduler_side
from handoff_engine import BLOCK, NAMESPACE, ToyEngine, ToyRequest
from harness.polling import wait_until
from harness.server_process import ServerProcess
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.client import Client, make_key
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.scheduler.kv_events import KVEvents
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.events import EventStream
from kvtier.client.offload import CacheGeometry

PROMPT = list(range(100, 100 + 3 * BLOCK))


def numbers(hashes: list[bytes]) -> list[Any]:
    return [maybe_convert_block_hash(BlockHash(each)) for each in hashes]


@pytest.mark.parametrize("config", [ConnectorConfig(publish_token_ids=True), ConnectorConfig()])
def test_the_server_tells_other_engines_the_tokens(tmp_path: Path, config: ConnectorConfig) -> None:
    """B6.9 Tokens and parents of the blocks come back in vLLM's events, if the setting is on."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        events = KVEvents(
            [FULL],
            lambda client, take: EventStream(
                client, take, lambda _: None, endpoint=server.endpoint, with_contents=True
            ),
            enabled=True,
        )
        events.follow(client)
        engine = ToyEngine(server.endpoint, "a", config)
        try:
            engine.run(PROMPT)
            found: list[Any] = []

            def has_all() -> bool:
                found.extend(events.take())
                return len(found) >= 3

            wait_until(has_all, 60)
        finally:
            engine.close()
            events.close()
        hashes = numbers(ToyRequest("r", PROMPT, None).block_hashes)
        stored = {event.block_hashes[0]: event for event in found if event.medium == "CPU"}
        assert set(stored) == set(hashes)
        for position, block_hash in enumerate(hashes):
            event = stored[block_hash]
            tokens = PROMPT[position * BLOCK : (position + 1) * BLOCK]
            parent = hashes[position - 1] if position else None
            assert (event.token_ids, event.parent_block_hash) == (
                (tokens, parent) if config.publish_token_ids else ([], None)
            )


def test_without_the_stream_own_stores_have_the_tokens() -> None:
    """B6.9 With `watch_events` off, the events come from the reports of the workers."""
    with scheduler_side(FakeClient(), events=True, publish_token_ids=True) as (scheduler, _):
        request = make_request(2, all_token_ids=list(range(9)), mm_features=[], cache_salt=None, prompt_embeds=None)
        scheduler.new_request(request)
        (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        events: list[Any] = list(scheduler.take_events())
    assert [event.token_ids for event in events] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [event.parent_block_hash for event in events] == [None, numbers([bytes(32)])[0]]


@pytest.mark.parametrize("other_input", [{"mm_features": [object()]}, {"cache_salt": "s"}, {"prompt_embeds": object()}])
def test_blocks_that_depend_on_other_inputs_than_tokens_are_not_described(other_input: dict[str, Any]) -> None:
    """B6.9 An indexer would find them for prompts that have only the same tokens."""
    request = ToyRequest("r", PROMPT, None)
    adapted = VllmRequest(
        request, RequestRegistration("r"), CacheGeometry((FULL,), BLOCK, BLOCK), may_load=True, may_save=True
    )
    assert adapted.content(FULL, 0) is not None
    vars(request).update(other_input)
    assert adapted.content(FULL, 0) is None


def test_the_adapter_is_named() -> None:
    request = ToyRequest("r", PROMPT, None)
    request.lora_request = SimpleNamespace(name="adapter")
    adapted = VllmRequest(
        request, RequestRegistration("r"), CacheGeometry((FULL,), BLOCK, BLOCK), may_load=True, may_save=True, tag=b"t"
    )
    content = adapted.content(FULL, 1)
    assert content is not None
    assert content.lora_name == "adapter"
    assert content.parent_key == make_key(request.block_hashes[0] + b"t")
