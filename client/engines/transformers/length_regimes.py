"""Length regimes of a model: ranges of sequence lengths in which the KV of a prefix is the same.

In most models the KV of a token does not depend on how long the sequence becomes. With dynamic or
long RoPE it does, because the frequencies change when the sequence exceeds a limit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from .layout import CACHE_ARGUMENT

__all__ = ["LengthRegimes"]

_PROMPT = 8
"""Tokens of the prompt that the probe computes."""

_LONGEST = 256
"""Longest prompt that the probe computes. Positions represent longer prompts."""

_LAYERS = 2
"""Layers that are compared between prompts of different lengths. Rounding errors grow with each
layer: a bfloat16 model has 2 % in its eighth layer."""

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest relative difference that counts as rounding."""

_COARSE_ROUNDING = 0.06

_TABLE = re.compile("position|n_ctx|max_seq")
_LIMIT = re.compile("position|n_ctx|seq|length|window|context|chunk|floor|limit")
_LIMITS = range(2, 1 << 24)


Range = tuple[int, int | None]
"""First and last length. None: no end."""


@dataclass(frozen=True)
class LengthRegimes:
    """Ranges of lengths, ascending. The KV of a sequence of another length is not shared."""

    ranges: tuple[Range, ...]

    def of(self, length: int) -> int | None:
        """Returns the number of the regime of a sequence, or None."""
        for number, (first, last) in enumerate(self.ranges):
            if first <= length and (last is None or length <= last):
                return number
        return None

    @property
    def is_one(self) -> bool:
        """Whether the KV of a prefix is the same for all lengths."""
        return self.ranges == ((1, None),)

    def tag(self, regime: int) -> bytes:
        """Returns bytes that identify a regime in the hashes of its blocks."""
        return f"lengths from {self.ranges[regime][0]}".encode() if regime else b""

    @classmethod
    def probe(cls, model: Any, after_run: Callable[[], None] = lambda: None) -> LengthRegimes:
        """Runs the model about 10 times on 9 tokens, and about 8 times on at most 256 tokens.

        `after_run` is called after each run.

        Computes a prompt that a token at a distant position follows: on both sides of each limit of
        the configuration, and far beyond. The prompt's KV must have equal bits. All these runs have
        the same shape, so kernels and rounding are the same.

        Then computes the prompt as the beginning of longer prompts, because a model may take the
        length from their shape: its KV must be equal except for rounding.
        """
        limits = dict(_limits(model.config.to_dict()))
        probe = _Probe(model, after_run)
        try:
            ranges = _by_positions(probe, limits)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it takes no such positions
            ranges = None
        if ranges is None:
            ranges = ((1, min((limit for limit in limits.values() if limit >= _LONGEST), default=None)),)
        return cls(_until_differs(probe, limits, cls(ranges)))


class _Probe:
    def __init__(self, model: Any, after_run: Callable[[], None]) -> None:
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        # Only a rotary embedding computes any position. A table would be read beyond its end.
        self.rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
        self._model, self._after_run = model, after_run
        self._tokens = torch.arange(_LONGEST, device=model.device)[None] * 7 % min(vocabulary, 1000)

    def at_position(self, length: int) -> tuple[bytes, bytes]:
        """Returns digests of the KV of the prompt, and of a token after it at the last position."""
        positions = torch.tensor([[*range(_PROMPT), length - 1]], device=self._tokens.device)
        layers = self._run(_PROMPT + 1, position_ids=positions)
        parts = [[layer[:, :, :_PROMPT] for layer in layers], [layer[:, :, _PROMPT:] for layer in layers]]
        prompt, last = (hashlib.sha256(b"".join(map(_bytes, part))).digest() for part in parts)
        return prompt, last

    def in_prompt(self, length: int) -> list[torch.Tensor]:
        """Returns the KV of the prompt as the beginning of a prompt of another length."""
        return [layer[:, :, :_PROMPT] for layer in self._run(length)[: 2 * _LAYERS]]

    @torch.no_grad()  # not inference mode: torch counts no changes of tensors that are made in it
    def _run(self, length: int, **options: Any) -> list[torch.Tensor]:
        tokens = self._tokens[:, :length]
        output = self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True, **options)
        self._after_run()
        return [tensor for layer in getattr(output, CACHE_ARGUMENT).layers for tensor in (layer.keys, layer.values)]


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _limits(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _limits(value, f"{prefix}{name}.")
        elif isinstance(value, int) and value in _LIMITS and _LIMIT.search(name):
            yield prefix + name, value


def _by_positions(probe: _Probe, limits: Mapping[str, int]) -> tuple[Range, ...] | None:
    """Returns the regimes, or None if positions have no effect, for example with ALiBi."""
    most = None if probe.rotary else min((limits[name] for name in limits if _TABLE.search(name)), default=_PROMPT + 1)
    lengths = {_PROMPT + 1, _PROMPT + 2}
    for limit in limits.values():
        lengths |= {limit - 1, limit, limit + 1, 2 * limit + 1, 4 * limit + 1}
    ordered = sorted(length for length in lengths if length > _PROMPT and (most is None or length <= most))
    found = {length: probe.at_position(length) for length in ordered}
    if len({last for _, last in found.values()}) == 1:
        return None
    before = {length: prompt for length, (prompt, _) in found.items()}
    if len(set(before.values())) == 1 and probe.at_position(ordered[0])[0] == before[ordered[0]]:
        return ((1, most),)
    after = {}
    for length in ordered:  # some models keep the frequencies of a longer sequence
        probe.at_position(ordered[-1])
        after[length] = probe.at_position(length)[0]
    ranges: list[Range] = []
    for prompt, group in groupby(
        ordered, key=lambda length: before[length] if before[length] == after[length] else None
    ):
        members = list(group)
        if prompt is not None and len(members) > 1:  # else each length may have its own KV
            last = None if members[-1] == ordered[-1] else members[-1]
            ranges.append((1 if members[0] == ordered[0] else members[0], most if last is None else last))
    return tuple(ranges)


def _until_differs(probe: _Probe, limits: Mapping[str, int], regimes: LengthRegimes) -> tuple[Range, ...]:
    """Ends the first regime at the longest prompt that begins with the same KV as a short one."""
    lengths = {_PROMPT + 1, 2 * _PROMPT, 3 * _PROMPT + 1, _LONGEST // 4, _LONGEST}
    for limit in limits.values():
        lengths |= {limit - 1, limit, limit + 1, 2 * limit + 1}
    alone, longest = probe.in_prompt(_PROMPT), _PROMPT
    rounding = _ROUNDING.get(alone[0].dtype, _COARSE_ROUNDING)
    for length in sorted(lengths):
        if _PROMPT < length <= _LONGEST and regimes.of(length) == 0:
            try:
                longer = probe.in_prompt(length)
            except (IndexError, RuntimeError, ValueError):  # longer than the model permits
                return ((1, longest),)
            if any((a - b).abs().max() > rounding * a.abs().max() for a, b in zip(alone, longer, strict=True)):
                return ((1, longest),)
            longest = length
    return regimes.ranges
