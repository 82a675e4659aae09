"""The transformers adapter, over a real server across processes, otherwise over a fake one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.launch import launch
from harness.tiny_llama import tiny_llama
from transformers import DynamicCache

from kvtier.client.engines.transformers import KVTierCache
from kvtier.client.engines.transformers.layout import CACHE_ARGUMENT
from kvtier.client.testing import FakeServer

BLOCK = 8
PROMPT = torch.randint(4, 64, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A real server for this test."""
    with launch(tmp_path, region="64MiB") as server:
        server.wait_ready()
        yield f"unix:{tmp_path}/s"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def _cache(model: Any, server: FakeServer | str, **options: Any) -> KVTierCache:
    """A cache whose digest of the weights is known."""
    if isinstance(server, str):
        cache = KVTierCache(model, server, block_tokens=BLOCK, **options)
    else:
        cache = KVTierCache(model, connect=server.client, block_tokens=BLOCK, **options)
    cache.wait_until_identified(60)
    return cache


def _plain(model: Any, prompt: torch.Tensor, tokens: int = 12) -> list[int]:
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
    )
    return output[0].tolist()


def _kept(cache: KVTierCache, prompt: torch.Tensor, tokens: int = 12) -> list[int]:
    return cache.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)[0].tolist()


def test_a_second_engine_loads_what_the_first_computed(model: Any, endpoint: str) -> None:
    """Another session restores the prompt's full blocks, computes the rest, same output."""
    expected = _plain(model, PROMPT)
    with _cache(model, endpoint) as first:
        assert _kept(first, PROMPT) == expected
        assert first.last_hit.tokens == 0
    with _cache(model, endpoint) as second:
        assert _kept(second, PROMPT[:, :39]) == expected[:39] + _plain(model, PROMPT[:, :39])[39:]
        assert second.last_hit.tokens == 32
        assert second.last_hit.tiers == {"cpu": 32}


def test_generated_tokens_are_found_again(model: Any, server: FakeServer) -> None:
    """Blocks that a generation filled are stored too, for the next turn of a conversation."""
    with _cache(model, server) as cache:
        output = torch.tensor([_kept(cache, PROMPT, tokens=25)])
        follow_up = torch.cat([output, PROMPT[:, :5]], dim=1)
        assert _kept(cache, follow_up) == _plain(model, follow_up)
        assert cache.last_hit.tokens == 64


def test_at_least_one_token_is_computed(model: Any, server: FakeServer) -> None:
    """Of a prompt of whole blocks the last block is computed (B4.2)."""
    with _cache(model, server) as cache:
        _kept(cache, PROMPT)
        assert _kept(cache, PROMPT) == _plain(model, PROMPT)
        assert cache.last_hit.tokens == PROMPT.shape[1] - BLOCK


def test_a_shared_prefix_is_restored_and_the_rest_computed(model: Any, server: FakeServer) -> None:
    """Of a prompt with a common prefix only that prefix is loaded."""
    other = torch.cat([PROMPT[:, :20], PROMPT.flip(1)[:, :20]], dim=1)
    with _cache(model, server) as cache:
        _kept(cache, PROMPT)
        assert _kept(cache, other) == _plain(model, other)
        assert cache.last_hit.tokens == 16


def test_what_is_restored_is_bit_identical(model: Any, endpoint: str) -> None:
    """`save` and `restore` alone, with a model called by hand."""
    computed = DynamicCache()
    with torch.inference_mode():
        model(input_ids=PROMPT, **{CACHE_ARGUMENT: computed})
    with _cache(model, endpoint) as cache:
        assert cache.save(PROMPT, computed) == 5
        assert cache.save(PROMPT, computed) == 0
        restored, hit = cache.restore(PROMPT)
    assert hit.tokens == restored.get_seq_length() == 32
    for old, new in zip(computed.layers, restored.layers, strict=True):
        assert torch.equal(old.keys[:, :, :32], new.keys)
        assert torch.equal(old.values[:, :, :32], new.values)


@pytest.mark.parametrize("options", [{"extra": b"adapter"}, {"tenant": "other"}, {"name": "m", "revision": "2"}])
def test_what_differs_is_not_shared(model: Any, endpoint: str, options: dict[str, Any]) -> None:
    """Another adapter, tenant or revision finds nothing."""
    with _cache(model, endpoint) as first, _cache(model, endpoint, **options) as second:
        _kept(first, PROMPT)
        _kept(second, PROMPT)
        assert second.last_hit.tokens == 0


def test_other_weights_are_not_shared(model: Any, server: FakeServer) -> None:
    """A model of the same shape with other weights finds nothing, without being told.

    Only a name and a revision together stand for the weights.
    """
    for options, hit in ({}, 0), ({"name": "m"}, 0), ({"revision": "2"}, 0), ({"name": "m", "revision": "2"}, 32):
        with _cache(model, server, **options) as first, _cache(tiny_llama(seed=1), server, **options) as second:
            _kept(first, PROMPT)
            _kept(second, PROMPT)
            assert second.last_hit.tokens == hit, options


def test_without_a_server_everything_is_a_miss(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine without a server computes, and logs it."""
    with caplog.at_level(logging.WARNING), _cache(model, f"unix:{tmp_path / 'none'}", wait=0.1) as cache:
        assert _kept(cache, PROMPT) == _plain(model, PROMPT)
        assert cache.last_hit.tokens == 0
        assert cache.save(PROMPT, DynamicCache()) == 0
    assert "so the prompt is computed" in caplog.text


def test_a_batch_goes_past_the_cache(model: Any, server: FakeServer) -> None:
    """`generate` passes a batch on unchanged; `restore` and `save` refuse one."""
    batch = PROMPT.repeat(2, 1)
    with _cache(model, server) as cache:
        output = cache.generate(batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=3)
        assert output.shape == (2, 43)
        with pytest.raises(ValueError, match="one sequence"):
            cache.restore(batch)


def test_generate_returns_what_the_model_would(model: Any, server: FakeServer) -> None:
    """With `return_dict_in_generate` the caller gets the model's own output, scores included."""
    with _cache(model, server) as cache:
        answer = cache.generate(
            PROMPT, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        assert len(answer.scores) == 3
        assert answer.sequences.shape == (1, 43)


def test_a_server_that_fails_is_a_miss_and_one_warning(
    model: Any, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is down or hangs is logged once per failure, and never raises."""
    with _cache(model, server) as cache, caplog.at_level(logging.WARNING):
        for trouble in ("down", "hanging"):
            caplog.clear()
            _kept(cache, PROMPT)
            setattr(server, trouble, True)
            assert [_kept(cache, PROMPT), _kept(cache, PROMPT)] == [_plain(model, PROMPT)] * 2
            assert cache.last_hit.tokens == 0
            assert cache.flush(PROMPT) == 0
            assert len(caplog.records) == 1
            setattr(server, trouble, False)


def test_a_restart_between_two_prompts_is_survived(model: Any, server: FakeServer) -> None:
    """After a restart of the server the same cache finds its blocks again."""
    with _cache(model, server) as cache:
        _kept(cache, PROMPT)
        server.restart()
        cache.restore(PROMPT)
        assert _kept(cache, PROMPT) == _plain(model, PROMPT)
        assert cache.last_hit.tokens == 32


def test_flush_counts_what_survives(model: Any, server: FakeServer) -> None:
    """`flush` returns the durable blocks: those of the prompt and of the output."""
    with _cache(model, server) as cache:
        output = _kept(cache, PROMPT, tokens=9)
        assert cache.flush(output) == 6
