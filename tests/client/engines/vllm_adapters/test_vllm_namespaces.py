"""Engines share blocks only if the same keys mean the same bytes; roles of engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import make_request
from connector_rig import MakeConnector, server_of
from engine_config import engine_config, full, kv_cache, state, window
from harness.polling import wait_until

from kvtier.client import make_key
from kvtier.client.engines.identity import namespace_digest
from kvtier.client.engines.vllm import namespace


@pytest.fixture
def digest_of(make: MakeConnector, model: Path) -> Callable[..., str]:
    """Returns the digest of an engine's namespace; the arguments are those of `engine_config`."""

    def digest_of(groups: Any = None, extra: dict[str, Any] | None = None, **changes: Any) -> str:
        return namespace_digest(server_of(make(engine_config(str(model), extra or {}, **changes), groups)).namespace)

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
    "tokens of a block": {"groups": kv_cache(full(2))},
    "bytes of a block": {"groups": kv_cache(full(head_size=16))},
    "groups": {"groups": kv_cache(full(), full())},
    "layers": {"groups": kv_cache(layer="other")},
    "layout": {"groups": kv_cache(layout="NHD")},
    "window": {"groups": kv_cache(window(5))},
    "states": {"groups": kv_cache(full(), state())},
    "ranks": {"parallel": {"tensor_parallel_size": 2, "world_size": 2}},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_engines_that_compute_or_lay_out_kv_differently_share_nothing(
    digest_of: Callable[..., str], changes: dict[str, Any]
) -> None:
    """One different setting suffices."""
    assert digest_of(**changes) != digest_of()


def test_engines_that_differ_outside_of_their_configuration_share_nothing(
    digest_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, processor and version of vLLM decide about kernels and formats."""
    digests = {digest_of()}
    with monkeypatch.context() as changed:
        changed.setenv("VLLM_PORT", "5000")
        assert digest_of() in digests, "an address"
        changed.setenv("VLLM_NEW_KERNELS", "1")
        digests.add(digest_of())
    with monkeypatch.context() as changed:
        changed.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
        digests.add(digest_of())
    with monkeypatch.context() as changed:
        changed.setattr(namespace, "vllm_version", "0.32.9")
        digests.add(digest_of())
    assert len(digests) == 4


def test_groups_of_another_form_share_nothing(digest_of: Callable[..., str]) -> None:
    """Bytes of a layer depend on its window; a state can have the same bytes in other shapes."""
    assert len({digest_of(kv_cache(window(tokens))) for tokens in range(4, 8)}) == 4
    states = [state(), state("all"), state(width=5)]
    assert len({digest_of(kv_cache(full(), spec)) for spec in states}) == 3
    swapped = replace(state(), shapes=((3, 2), (4,)))
    assert digest_of(kv_cache(full(), swapped)) != digest_of(kv_cache(full(), state()))


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


# ---- roles


@pytest.mark.parametrize(("consumer", "producer"), [(True, False), (False, True), (True, True)])
def test_a_consumer_loads_and_a_producer_saves(
    make: MakeConnector, model: Path, *, consumer: bool, producer: bool
) -> None:
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
