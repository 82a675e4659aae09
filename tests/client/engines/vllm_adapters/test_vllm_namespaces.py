"""Engines share blocks only if the same keys mean the same bytes, and what a hit of each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FakeClient, await_namespace, make_request
from engine_config import engine_config
from harness.polling import wait_until
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvtier.client import Namespace, make_key
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.identity import namespace_digest
from kvtier.client.engines.vllm import KVTierConnector, connector
from kvtier.client.engines.vllm.compat import KVConnectorRole
from kvtier.client.engines.vllm.groups import resolve_geometry

TOKENS = 4


def full(tokens: int = TOKENS, head_size: int = 8) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=head_size, dtype=torch.float32)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens)


def cache(*specs: Any, layout: str | None = None, layer: str = "layer") -> KVCacheConfig:
    """Returns the KV cache of a model with one layer per group."""
    groups = [KVCacheGroupSpec([f"{layer}.{number}"], spec) for number, spec in enumerate(specs or (full(),))]
    return KVCacheConfig(8, [], groups, kv_cache_layout=layout)


class Server(FakeClient):
    """A client that is connected at once. `namespace`: the namespace that the connector asked for."""

    transport, engine_id = "none", "engine"

    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        self.namespace = namespace

    def wait_until_connected(self, _: float) -> None:
        pass


Make = Callable[..., KVTierConnector]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Creates the scheduler's connector of an engine."""
    made: list[KVTierConnector] = []
    monkeypatch.setattr(connector, "Client", lambda _endpoint, *, namespace, **_: Server(namespace))

    def make(config: Any, kv_cache: KVCacheConfig | None = None) -> KVTierConnector:
        made.append(KVTierConnector(config, KVConnectorRole.SCHEDULER, kv_cache or cache()))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def server_of(made: KVTierConnector) -> Server:
    assert made._scheduler is not None, "the connector is disabled"
    await_namespace(made)
    client: Any = made._scheduler._client
    return client  # type: ignore[no-any-return]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def digest_of(make: Make, model: Path) -> Callable[..., str]:
    """Returns the digest of an engine's namespace; the arguments are those of `engine_config`."""

    def digest_of(kv_cache: KVCacheConfig | None = None, extra: dict[str, Any] | None = None, **changes: Any) -> str:
        return namespace_digest(server_of(make(engine_config(str(model), extra or {}, **changes), kv_cache)).namespace)

    return digest_of


def test_engines_of_other_weights_share_nothing(digest_of: Callable[..., str], model: Path) -> None:
    """The content of the model's files counts, not the name of their folder."""
    first = digest_of()
    assert digest_of() == first
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert digest_of() != first


DIFFERENT: dict[str, dict[str, Any]] = {
    "dtype": {"model": {"dtype": torch.bfloat16}},
    "overrides": {"model": {"hf_overrides": {"rope_theta": 500000.0}}},
    "function as overrides": {"model": {"hf_overrides": full}},
    "quantization": {"model": {"quantization": "fp8"}},
    "length of contexts": {"model": {"max_model_len": 128}},
    "revision": {"model": {"revision": "v2"}},
    "class of the model": {"model": {"model_class_overrides": {"LlamaForCausalLM": "package:Other"}}},
    "dtype of the cache": {"cache": {"cache_dtype": "fp8_e4m3"}},
    "hashes": {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "attention back end": {"attention": {"backend": "FLASH_ATTN"}},
    "format of the files": {"load": {"load_format": "dummy"}},
    "draft model": {"speculative": SimpleNamespace(model="draft", use_eagle_block_drop=lambda: False)},
    "tenant": {"extra": {"tenant": "other"}},
    "version of the weights": {"extra": {"weights_version": "2"}},
    "tokens of a block": {"kv_cache": cache(full(2))},
    "bytes of a block": {"kv_cache": cache(full(head_size=16))},
    "groups": {"kv_cache": cache(full(), full())},
    "layers": {"kv_cache": cache(layer="other")},
    "layout": {"kv_cache": cache(layout="NHD")},
    "window": {"kv_cache": cache(window(5))},
    "ranks": {"parallel": {"tensor_parallel_size": 2, "world_size": 2}},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_engines_that_compute_or_lay_out_kv_differently_share_nothing(
    digest_of: Callable[..., str], changes: dict[str, Any]
) -> None:
    """One different setting suffices."""
    assert digest_of(**changes) != digest_of()


def test_windows_of_other_sizes_share_nothing(digest_of: Callable[..., str]) -> None:
    """The bytes of a layer of a window depend on the window."""
    assert len({digest_of(cache(window(tokens))) for tokens in range(4, 8)}) == 4


NEUTRAL: dict[str, dict[str, Any]] = {
    "name": {"kv_transfer": {"engine_id": "another"}},
    "producer": {"kv_transfer": {"is_kv_consumer": False}},
    "consumer": {"kv_transfer": {"is_kv_producer": False}},
    "replica": {"parallel": {"data_parallel_rank": 3, "rank": 3}},
    "tokens of a step": {"scheduler": {"max_num_batched_tokens": 4096}},
    "limits": {"extra": {"lookup_timeout_s": 7.0, "max_held_fraction": 0.1}},
    "served name": {"model": {"served_model_name": "alias"}},
}


@pytest.mark.parametrize("changes", NEUTRAL.values(), ids=NEUTRAL)
def test_engines_that_differ_otherwise_share_blocks(digest_of: Callable[..., str], changes: dict[str, Any]) -> None:
    """Names, roles, ranks of replicas, limits and timeouts do not change the KV."""
    assert digest_of(**changes) == digest_of()


# ---- what a hit needs


@pytest.mark.parametrize("tokens", range(1, 11))
def test_a_hit_needs_the_blocks_that_the_window_of_the_next_token_reaches(model: Path, tokens: int) -> None:
    """B4.10 A token attends to itself and to the `sliding_window - 1` tokens before it."""
    geometry = resolve_geometry(engine_config(str(model), {}), cache(full(), window(tokens)))
    group = geometry.groups[1]
    for hit in range(TOKENS, 6 * TOKENS, TOKENS):
        reached = {token // TOKENS for token in range(hit) if hit - token < tokens}
        assert set(range(group.first_needed_block(hit), hit // TOKENS)) == reached


@pytest.mark.parametrize(
    ("speculative", "drops"),
    [
        (None, False),
        (SimpleNamespace(model="draft", use_eagle_block_drop=lambda: False), False),
        (SimpleNamespace(model="eagle", use_eagle_block_drop=lambda: True), True),
    ],
)
def test_the_last_block_of_a_hit_is_computed_again_if_the_draft_model_asks(
    model: Path, speculative: Any, *, drops: bool
) -> None:
    """B4.2 EAGLE's KV of a token depends on the next token, which the stored block lacks."""
    config = engine_config(str(model), {}, speculative=speculative)
    assert resolve_geometry(config, cache()).drop_last_block is drops


@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_engines_are_refused(model: Path, size: str) -> None:
    """A rank has some of the tokens of a block, and the configuration does not say which."""
    with pytest.raises(Unsupported, match="context parallelism"):
        resolve_geometry(engine_config(str(model), {}, parallel={size: 2}), cache())


# ---- roles


@pytest.mark.parametrize(("consumer", "producer"), [(True, False), (False, True), (True, True)])
def test_a_consumer_loads_and_a_producer_saves(make: Make, model: Path, *, consumer: bool, producer: bool) -> None:
    """`kv_role` decides whether an engine loads stored blocks, and whether it stores its own."""
    roles = {"is_kv_consumer": consumer, "is_kv_producer": producer}
    made = make(engine_config(str(model), {}, kv_transfer=roles))
    server, request = server_of(made), make_request(3)
    server.keys = {make_key(bytes([number]) * 32, 0) for number in range(2)}
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == ((8, True) if consumer else (0, False)))
    assert made._scheduler is not None
    adapted = made._scheduler._requests["r"]
    assert adapted.may_save is producer
