"""Telling models apart: what must be equal for two processes to share blocks.

Two ways. With a name *and* a revision given by the caller, these are trusted: nothing is read. Without, the weights in memory
are sampled: a few hundred elements of every parameter, spread evenly, by name, shape and type. That tells apart any two
trainings, fine-tunes, merges and quantizations (they change nearly every element), takes milliseconds for a small and about a
second for a large model, and agrees between hosts whatever the path that the model was loaded from. What it cannot see is an
edit of single elements between the samples, and adapters that are switched on or off after the fingerprint was taken: make a
new `KVTierCache` then, or say so through `extra`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

__all__ = ["config_digest", "weights_digest"]

SAMPLES = 256
"""Elements of each parameter that the fingerprint covers."""

_IRRELEVANT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Settings that say where a model came from or how it is run, not what its KV means."""


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str:
    """Returns a digest of a sample of all parameters and buffers, as hex."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        if tensor.is_meta:  # offloaded: not here to be looked at
            continue
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        if count:
            places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device="cpu").long()
            sample = flat[places.to(flat.device)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def config_digest(config: Any) -> str:
    """Returns a digest of a transformers config (rope, layer types, windows, …), as hex."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
