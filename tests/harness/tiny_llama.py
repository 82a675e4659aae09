"""A tiny Llama model, whose outputs differ from token to token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["SMALL", "one_thread", "tiny_llama"]

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
"""Settings that configurations of other models have, too."""


def tiny_llama(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **settings)).eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
