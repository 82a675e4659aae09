"""Tiny models with random weights, whose outputs depend on every part of their KV cache.

Weights are scaled by fan-in, and queries and keys so that attention is peaked: one wrong block
moves log-probabilities by 1e-2, float32 noise by 1e-5.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "VOCABULARY",
    "common_sizes",
    "make_adapter",
    "make_dense",
    "make_hybrid",
    "make_state",
    "make_tokenizer",
    "randomize",
]

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


def common_sizes() -> dict[str, Any]:
    """Returns the sizes of all models, for the configuration of a transformer."""
    return dict(_SIZES)


def make_dense(path: Path, seed: int = 1234) -> None:
    """Writes a Llama with one KV cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, tie_word_embeddings=False, **_SIZES))
    randomize(model, normed=False, seed=seed)
    model.save_pretrained(path)


def make_adapter(path: Path, seed: int) -> None:
    """Writes a LoRA adapter for the dense model, whose answers differ from those of the model."""
    from safetensors.torch import save_file

    rank, size, generator = 8, _SIZES["hidden_size"], torch.Generator().manual_seed(seed)
    outputs = {"q_proj": size, "k_proj": size // 2, "v_proj": size // 2, "o_proj": size}
    weights = {}
    for layer in range(4):
        for name, width in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, size)), ("lora_B", (width, rank))):
                noise = torch.randn(shape, generator=generator)
                weights[f"{module}.{part}.weight"] = noise / math.sqrt(shape[1])
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(outputs), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def make_hybrid(path: Path) -> None:
    """Writes a Gemma3 with sliding windows of 128 tokens and full attention: several groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["full_attention" if number % 3 == 2 else "sliding_attention" for number in range(6)]
    config = Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=128, layer_types=layers, query_pre_attn_scalar=64, **_SIZES
    )
    model = Gemma3ForCausalLM(config)
    randomize(model, normed=True)
    model.save_pretrained(path)


def make_state(path: Path) -> None:
    """Writes a Granite hybrid: Mamba2 layers and one layer of full attention.

    A state is smaller than the 32 tokens of an attention block, so that blocks can be of 32 tokens.
    Time steps are small and decay is slow: what a state holds shows up hundreds of tokens later.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = ["full_attention" if number == 2 else "linear_attention" for number in range(4)]
    sizes = {name: size for name, size in _SIZES.items() if name != "head_dim"}
    config = GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=layers,
        num_local_experts=0,
        shared_intermediate_size=512,
        attention_multiplier=0.125,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=8,
        mamba_chunk_size=8192,  # vLLM on CPU is wrong if a prompt is several chunks
        **sizes,
    )
    model = GraniteMoeHybridForCausalLM(config)
    randomize(model, normed=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-2.0, 1.0, len(weight)))
            elif name.endswith("dt_bias"):
                weight.fill_(-3.0)
    model.save_pretrained(path)


def make_tokenizer(path: Path) -> None:
    """Writes a tokenizer for a model: token 7 is the word "w7", and chats are joined words.

    An answer that is sent back as text therefore has the engine's own tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = {f"w{token}": token for token in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names).save_pretrained(path)


def randomize(model: torch.nn.Module, *, normed: bool, seed: int = 1234) -> None:
    """Sets weights of which outputs depend on the KV. `normed`: queries have a norm."""
    generator = torch.Generator().manual_seed(seed)
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
