"""Creates the demo's model: a small Llama with seeded random weights.

The model has the same bytes on all machines of one kind. The weights are scaled so that attention
concentrates on a few tokens. One wrong or misplaced block of the cache would therefore change the
output.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

__all__ = ["make_model", "make_prompt"]

VOCABULARY = 2048
QK_GAIN = 2.5
HEAD_GAIN = 4.0


def make_model(directory: Path, seed: int = 1234) -> None:
    """Saves the model (47 million parameters, float32) to `directory`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * _deviation(name, weight.shape[1]))
    disable_progress_bar()
    model.save_pretrained(directory)


def make_prompt(tokens: int, seed: int = 7) -> list[int]:
    """Returns a prompt of random token ids without special tokens."""
    return random.Random(seed).choices(range(4, VOCABULARY), k=tokens)


def _deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    gain = HEAD_GAIN if "lm_head" in name else math.sqrt(QK_GAIN) if "q_proj" in name or "k_proj" in name else 1.0
    return gain / math.sqrt(fan_in)
