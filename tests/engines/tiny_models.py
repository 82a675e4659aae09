"""Two tiny models with random weights, whose outputs depend on every part of their KV cache.

Weights are scaled by fan-in, and queries and keys so that attention is peaked: one wrong block moves log-probabilities by 1e-2,
float32 noise by 1e-5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

__all__ = ["VOCABULARY", "make_dense", "make_hybrid"]

VOCABULARY = 1024
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_PEAKED = 2.5


def make_dense(path: Path) -> None:
    """Writes a Llama with one KV cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, tie_word_embeddings=False, **_SIZES))
    _randomize(model, normed=False)
    model.save_pretrained(path)


def make_hybrid(path: Path) -> None:
    """Writes a Gemma3 whose layers alternate sliding windows of 128 tokens with full attention: several groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["full_attention" if number % 3 == 2 else "sliding_attention" for number in range(6)]
    config = Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=128, layer_types=layers, query_pre_attn_scalar=64, **_SIZES
    )
    model = Gemma3ForCausalLM(config)
    _randomize(model, normed=True)
    model.save_pretrained(path)


def _randomize(model: torch.nn.Module, *, normed: bool) -> None:
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.fill_(math.sqrt(_PEAKED) - 1.0)  # Gemma multiplies by 1 + weight
                continue
            scale = 1.0 / math.sqrt(weight.shape[1])
            if "embed_tokens" in name:
                scale = scale if normed else 1.0
            elif "lm_head" in name:
                scale *= 4.0
            elif ("q_proj" in name or "k_proj" in name) and not normed:
                scale *= math.sqrt(_PEAKED)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
