"""Layout of a block of a `DynamicCache`: per layer keys, then values `[heads, tokens, dim]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

__all__ = ["CACHE_ARGUMENT", "CacheLayout", "UnsupportedModelError"]

CACHE_ARGUMENT = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""Name of the KV cache in the arguments and outputs of models.

transformers 5.24 renamed it from `past_key_values` to `cache`."""


class UnsupportedModelError(ValueError):
    """The model's cache is not one full-attention KV cache per layer. The message says why."""


@dataclass(frozen=True)
class _Tensor:
    layer: int
    values: bool
    heads: int
    dim: int
    offset: int
    nbytes: int


class CacheLayout:
    """Positions of each layer's keys and values in a block. Created by `probe`."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], block_tokens: int) -> None:
        """`layers`: keys and values `[1, heads, any, dim]`; only shape, dtype and device matter."""
        first = layers[0][0]
        self.block_tokens = block_tokens
        self.dtype, self.device = first.dtype, first.device
        self._devices = [keys.device for keys, _ in layers]
        self._tensors: list[_Tensor] = []
        offset = 0
        for layer, pair in enumerate(layers):
            for values, tensor in enumerate(pair):
                if tensor.dtype != self.dtype:
                    raise UnsupportedModelError(
                        f"all layers must have one dtype: layer {layer} has {tensor.dtype}, layer 0 has {self.dtype}"
                    )
                heads, dim = tensor.shape[1], tensor.shape[3]
                nbytes = heads * dim * block_tokens * tensor.element_size()
                self._tensors.append(_Tensor(layer, bool(values), heads, dim, offset, nbytes))
                offset += nbytes
        self.part_bytes = offset

    @classmethod
    def probe(cls, model: Any, block_tokens: int) -> CacheLayout:
        """Runs the model on one token. Raises UnsupportedModelError for an unsupported model."""
        try:
            with torch.inference_mode():
                token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
                cache = getattr(model(input_ids=token, use_cache=True), CACHE_ARGUMENT)
        except Exception as error:
            raise UnsupportedModelError(f"the model does not run on one token alone: {error}") from error
        if type(cache) is not DynamicCache:
            raise UnsupportedModelError(f"the model's cache is a {type(cache).__name__}, not a DynamicCache")
        odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
        if odd or not cache.layers or any(layer.keys is None for layer in cache.layers):
            raise UnsupportedModelError(
                f"some layers have {', '.join(odd) or 'no cache'}: only full attention is supported (no sliding windows,"
                " linear attention or shared layers)"
            )
        layers: list[Any] = cache.layers
        return cls([(layer.keys, layer.values) for layer in layers], block_tokens)

    def describe(self) -> str:
        shapes = [f"{tensor.heads}x{tensor.dim}" for tensor in self._tensors]
        runs = ",".join(shapes) if len(set(shapes)) > 1 else f"{len(shapes) // 2}*2*{shapes[0]}"
        return f"layers,kv,heads,tokens,dim:{runs}"

    def copy_out(self, cache: DynamicCache, blocks: Sequence[int], memory: memoryview, offsets: Sequence[int]) -> None:
        """Copies blocks from the cache to `memory`. `blocks`: positions in the sequence."""
        for tensor in self._tensors:
            layer: Any = cache.layers[tensor.layer]
            source = (layer.values if tensor.values else layer.keys)[0]
            for block, slot in zip(blocks, self._slots(tensor, memory, offsets), strict=True):
                slot.copy_(source[:, block * self.block_tokens : (block + 1) * self.block_tokens])

    def copy_in(self, memory: memoryview, offsets: Sequence[int]) -> list[torch.Tensor]:
        """Copies leading blocks from `memory`. Returns keys and values per layer for `cache_of`."""
        tokens = len(offsets) * self.block_tokens
        copies = []
        for tensor in self._tensors:
            shape = (1, tensor.heads, tokens, tensor.dim)
            copy = torch.empty(shape, dtype=self.dtype, device=self._devices[tensor.layer])
            for block, slot in enumerate(self._slots(tensor, memory, offsets)):
                copy[0, :, block * self.block_tokens : (block + 1) * self.block_tokens] = slot
            copies.append(copy)
        return copies

    def cache_of(self, copies: Sequence[torch.Tensor]) -> DynamicCache:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(copies[::2], copies[1::2], strict=True)):
            cache.update(keys, values, layer)
        return cache

    def matches(self, cache: Any, tokens: int) -> bool:
        """Whether the cache has this layout, one sequence and at least `tokens` tokens."""
        layers = getattr(cache, "layers", ())
        return len(layers) * 2 == len(self._tensors) and all(
            tensor.dtype == self.dtype
            and tensor.shape[:2] == (1, place.heads)
            and tensor.shape[2] >= tokens
            and tensor.shape[3] == place.dim
            for place in self._tensors
            for tensor in (layers[place.layer].values if place.values else layers[place.layer].keys,)
        )

    def _slots(self, tensor: _Tensor, memory: memoryview, offsets: Sequence[int]) -> Iterator[torch.Tensor]:
        shape = (tensor.heads, self.block_tokens, tensor.dim)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for offset in offsets:
            start = offset + tensor.offset
            yield flat[start : start + tensor.nbytes].view(self.dtype).view(shape)
