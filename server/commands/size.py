"""`kvtier size`: bytes of KV cache per token of a model, and how many tokens a tier holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.units import GIB, human_size, parse_size
from .console import EXIT_FAILURE, EXIT_USAGE, print_line, refuse

__all__ = ["run"]

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
LMDB_SHARE = 0.8
"""Fraction of an lmdb tier's size that blocks can use."""
_SLOT_BYTES = 4096
_KEY_BYTES = {"cpu": 501, "disk": 270}
"""Memory of the server's index per key (docs/performance-tables.md, at 1,000,000 keys)."""
_PROMPTS = 2
"""Number of prompts of the model's longest context that the suggested region holds."""

_WINDOW = ("sliding_attention", "chunked_attention")
_STATE = ("linear_attention", "mamba", "conv", "recurrent")
_KINDS = ("full_attention", "attention", *_WINDOW, *_STATE)
_UNSUPPORTED = (
    *("attn_layer_period", "attn_type_list", "block_configs", "compress_ratios", "global_head_dim"),
    *("hybrid_override_pattern", "is_encoder_decoder", "linear_attn_config", "swa_head_dim"),
)
"""Keys of config.json that only models with unsupported shapes of KV caches have."""


class ModelConfigError(ValueError):
    """The config.json cannot be read, or this command cannot compute the model's cache size."""


@dataclass(frozen=True)
class KvShape:
    """Shape of a model's KV cache.

    A token has `head_dim` values per layer with MLA, otherwise 2 * `kv_heads` * `head_dim`.
    """

    layers: int
    window_layers: int
    state_layers: int
    latent: bool
    kv_heads: int
    head_dim: int
    dtype: str
    context_tokens: int

    def token_bytes(self, ranks: int) -> int:
        """Returns the bytes of a token on one rank; each rank has at least one KV head."""
        values = self.head_dim if self.latent else 2 * -(-self.kv_heads // ranks) * self.head_dim
        return self.layers * values * DTYPES[self.dtype]


def run(options: argparse.Namespace) -> int:
    try:
        sizes = {tier: parse_size(text) for tier in _KEY_BYTES if (text := getattr(options, tier)) is not None}
    except ValueError as error:
        return refuse([f"--cpu, --disk: {error}"], EXIT_USAGE)
    if 0 in sizes.values():
        return refuse(["--cpu, --disk: must be more than 0"], EXIT_USAGE)
    try:
        shape = read_shape(Path(options.model_config), options.dtype)
    except ModelConfigError as error:
        return refuse([f"{options.model_config}: {error}"], EXIT_FAILURE)
    found = figures(shape, options.block_tokens, options.tp, sizes)
    print_line(
        json.dumps(found) if options.json else "\n".join(f"{name:<10} {text}" for name, text in _rows(shape, found))
    )
    return 0


def figures(shape: KvShape, block_tokens: int, ranks: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Returns the figures for JSON. `sizes`: bytes of the region ("cpu") and lmdb tier ("disk")."""
    parts = 1 if shape.latent else ranks  # with MLA all ranks have the same bytes, stored once
    part_bytes = shape.token_bytes(ranks) * block_tokens
    slot_bytes = -(-part_bytes // _SLOT_BYTES) * _SLOT_BYTES * parts
    prompts_bytes = _PROMPTS * -(-shape.context_tokens // block_tokens) * slot_bytes
    found: dict[str, Any] = vars(shape) | {
        "ranks": ranks,
        "block_tokens": block_tokens,
        "bytes_per_token": shape.token_bytes(ranks) * parts,
        "bytes_per_token_of_a_rank": shape.token_bytes(ranks),
        "bytes_per_block": part_bytes * parts,
        "suggested_region_bytes": -(-prompts_bytes // GIB) * GIB,
    }
    for tier, size in sizes.items():
        blocks = int(size * (LMDB_SHARE if tier == "disk" else 1)) // slot_bytes
        tokens, index = blocks * block_tokens, blocks * _KEY_BYTES[tier]
        found[tier] = {"bytes": size, "blocks": blocks, "tokens": tokens, "index_bytes": index}
    return found


def _rows(shape: KvShape, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    heads = "MLA" if shape.latent else f"{shape.kv_heads} KV heads"
    yield "model", f"{shape.layers} layers with KV, {heads} of {shape.head_dim} values, {shape.dtype}"
    if shape.window_layers:
        yield "windows", f"{shape.window_layers} of these layers have a sliding window; kvtier stores all their blocks"
    if shape.state_layers:
        yield (
            "states",
            f"{shape.state_layers} layers have a state instead of KV; the figures do not include these states",
        )
    yield "token", f"{found['bytes_per_token']:,} bytes; {found['bytes_per_token_of_a_rank']:,} on each rank"
    yield "block", f"{human_size(found['bytes_per_block'])} of {found['block_tokens']:,} tokens"
    for tier, name in (("cpu", "region"), ("disk", "lmdb tier")):
        if has := found.get(tier):
            held = f"{human_size(has['bytes'])} holds {has['tokens']:,} tokens, {has['blocks']:,} blocks"
            yield name, f"{held}; index {human_size(has['index_bytes'])}"
    region = found["suggested_region_bytes"] // GIB
    yield "suggested", f"--region-size {region}GiB, for {_PROMPTS} prompts of {shape.context_tokens:,} tokens"


def read_shape(path: Path, dtype: str = "auto") -> KvShape:
    """Reads a Hugging Face config.json. Raises `ModelConfigError`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError("is not a JSON object")
    nested = (config.get(name) for name in ("text_config", "language_config", "llm_config"))
    config |= next((each for each in nested if isinstance(each, dict)), {})
    if odd := [name for name in _UNSUPPORTED if config.get(name)]:
        raise ModelConfigError(f"{', '.join(odd)}: KV caches of this kind are not supported")
    kinds = _layer_kinds(config)
    windows, states = (sum(kind in group for kind in kinds) for group in (_WINDOW, _STATE))
    latent = bool(config.get("kv_lora_rank"))
    if latent:
        kv_heads, head_dim = 1, _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
    else:
        heads = _number(config, "num_attention_heads", "n_head")
        kv_heads = _number(config | {"heads": heads}, "num_key_value_heads", "heads")
        has_size = config.get("head_dim") is not None
        head_dim = _number(config, "head_dim") if has_size else _number(config, "hidden_size", "n_embd") // heads
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelConfigError(f"dtype {dtype!r} is not supported: use --dtype with one of {', '.join(DTYPES)}")
    context = _number(config, "max_position_embeddings", "n_positions")
    return KvShape(len(kinds) - states, windows, states, latent, kv_heads, head_dim, dtype, context)


def _layer_kinds(config: dict[str, Any]) -> list[str]:
    """Returns the kind of each layer, except the last layers that use the KV of other layers."""
    layers = _number(config, "num_hidden_layers", "n_layer")
    kinds = ["full_attention"] * layers
    if isinstance(listed := config.get("layer_types") or config.get("layers_block_type"), list):
        kinds = listed[:layers]
    elif config.get("full_attention_interval"):
        every = _number(config, "full_attention_interval")
        kinds = ["linear_attention" if (place + 1) % every else "full_attention" for place in range(layers)]
    elif config.get("sliding_window_pattern"):
        every = _number(config, "sliding_window_pattern")
        kinds = ["sliding_attention" if (place + 1) % every else "full_attention" for place in range(layers)]
    if odd := sorted({str(kind) for kind in kinds} - set(_KINDS)):
        raise ModelConfigError(f"layers of these kinds are not supported: {', '.join(odd)}")
    shared = _number(config, "num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0
    return kinds[: layers - shared]


def _number(config: dict[str, Any], *names: str) -> int:
    """Returns the value of the first of these keys that the config has."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise ModelConfigError(f"has no {' or '.join(names)}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{names[0]} is {value!r}; it must be a whole number above 0")
    return value
