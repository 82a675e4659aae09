"""KV cache for transformers: restores prefixes into a `DynamicCache` and stores computed blocks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache

from ... import Client, DurableStatus, Group, KVTierError, Namespace, make_key
from .cache_layout import CACHE_ARGUMENT, CacheLayout

__all__ = ["HASH_SCHEME", "Hit", "KVTierCache", "block_hashes", "config_digest", "weights_digest"]

_log = logging.getLogger(__name__)

_NEUTRAL_ARGUMENTS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "tokenizer",
}
"""Arguments of `generate` that do not change the KV of tokens. Other arguments may change it."""

_SINGLE_SEQUENCE_VALUES: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
}
"""Settings of `generate`, with the values for which it fills one cache of one sequence."""

HASH_SCHEME = "kvtier.transformers.sha256.1"
"""Hash scheme in the namespace. It must change when the hashes change."""

SAMPLES = 256
"""Number of elements of each parameter in the digest."""

_IRRELEVANT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Settings of a model that do not change its KV, such as its origin."""


@dataclass(frozen=True)
class Hit:
    """Result of `KVTierCache.restore`."""

    tokens: int = 0
    """Number of leading tokens whose KV was loaded."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Number of these tokens per tier that had them."""


class KVTierCache:
    """Loads and stores one model's KV cache in a kvtier server.

    One sequence at a time (batch size 1, no beams). Not thread-safe, like the model itself. If the
    server is absent, slow or incompatible, every lookup is a miss. Only invalid arguments raise.
    """

    def __init__(
        self,
        model: Any,
        endpoint: str | None = None,
        *,
        block_tokens: int = 64,
        name: str | None = None,
        revision: str | None = None,
        tenant: str = "",
        extra: bytes = b"",
        wait: float = 2.0,
        connect: Callable[[Namespace], Client] | None = None,
    ) -> None:
        """Probes the model with one token and samples its weights.

        Two processes share blocks if `name`, `revision`, `block_tokens`, `tenant`, `extra` and the
        model's configuration are equal. If `name` or `revision` is None, a digest of the weights
        replaces `revision`. `extra`: bytes that identify anything else that changes the KV, such as
        an adapter. `wait`: seconds to wait for the server at start, and for blocks of a lower tier
        in each lookup. `connect`: function that creates the client instead of `endpoint`, for
        example the method `client` of `kvtier.client.testing.FakeServer`.

        Raises `UnsupportedModelError` for a model whose cache is not full attention throughout.
        """
        self._model = model
        self._extra = extra
        self._wait = wait
        self._layout = CacheLayout.probe(model, block_tokens)
        namespace = self._namespace(name, revision, tenant)
        self._client = connect(namespace) if connect else Client(endpoint, namespace=namespace, name="transformers")
        self._failing = False
        self.last_hit = Hit()
        """Result of the latest `restore` or `generate`."""
        with contextlib.suppress(KVTierError):  # the client has logged the error, and retries
            self._client.wait_until_connected(wait)

    @property
    def client(self) -> Client:
        return self._client

    @property
    def block_tokens(self) -> int:
        return self._layout.block_tokens

    def restore(self, input_ids: Any) -> tuple[DynamicCache, Hit]:
        """Returns a cache with the leading full blocks that the server has, and the hit.

        Pass the cache to the model as `cache` (`past_key_values` before transformers 5.24). After a
        miss the cache is empty. The cache never holds the last token, so that the model has a token
        to compute.
        `input_ids`: one sequence, as `[n]`, `[1, n]` or a list.
        """
        tokens = _sequence(input_ids)
        self.last_hit = Hit()
        try:
            cache, self.last_hit = self._restore(tokens[:-1])
            self._failing = False
        except Exception as error:  # noqa: BLE001 - the engine must continue without the cache
            self._log_failure("the cache was not restored, so the prompt is computed", error)
            cache = DynamicCache()
        return cache, self.last_hit

    def save(self, input_ids: Any, cache: DynamicCache) -> int:
        """Stores the full blocks that `cache` holds and the server lacks. Returns their number.

        If `cache` and `input_ids` differ in length, the shorter length counts.
        """
        tokens = _sequence(input_ids)
        try:
            return self._save(tokens[: cache.get_seq_length()], cache)
        except Exception as error:  # noqa: BLE001 - a failed save is only a later miss
            self._log_failure("blocks were not saved", error)
            return 0

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Restores the known prefix, calls `model.generate`, then stores prompt and output.

        Arguments and result are those of `model.generate`. kvtier is not used for batches, beams,
        padding or inputs other than tokens, and not if the caller passes a cache.
        """
        self.last_hit = Hit()
        if not is_single_sequence(input_ids, options, self._model.generation_config):
            return self._model.generate(input_ids, **options)
        cache, _ = self.restore(input_ids)
        wants_dict = options.pop("return_dict_in_generate", False)
        options.setdefault("attention_mask", torch.ones_like(input_ids))
        options[CACHE_ARGUMENT] = cache
        output = self._model.generate(input_ids, return_dict_in_generate=True, **options)
        self.save(output.sequences[0], getattr(output, CACHE_ARGUMENT))
        return output if wants_dict else output.sequences

    def flush(self, input_ids: Any, *, wait: float = 10.0) -> int:
        """Waits up to `wait` s until full blocks are durable. Returns how many are durable."""
        keys = self.keys(input_ids)
        try:
            return self._client.flush(keys, wait=wait).count(DurableStatus.DURABLE) if keys else 0
        except KVTierError as error:
            self._log_failure("blocks were not flushed", error)
            return 0

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keys(self, input_ids: Any) -> list[bytes]:
        """Returns the keys of the full blocks of a sequence."""
        hashes = block_hashes(_sequence(input_ids), self.block_tokens, extra=self._extra)
        return [make_key(block, 0) for block in hashes]

    def _restore(self, tokens: Sequence[int]) -> tuple[DynamicCache, Hit]:
        keys = self.keys(tokens)
        if not keys:
            return DynamicCache(), Hit()
        lease = self._client.lookup(keys, wait=self._wait, prefix=True)
        try:
            hits = lease.prefix_hits
            if hits == 0:
                return DynamicCache(), Hit()
            with self._client.read(lease, range(hits)) as batch:
                copies = self._layout.copy_in(batch.memory, batch.offsets)
        finally:
            lease.release()
        # The hit is certain only now, because the end of the read has checked the lease.
        blocks = Counter(lease.sources[:hits])
        tiers = {tier: count * self.block_tokens for tier, count in blocks.items()}
        return self._layout.cache_of(copies), Hit(hits * self.block_tokens, tiers)

    def _save(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        keys = self.keys(tokens)
        if not keys:
            return 0
        if not self._layout.matches(cache, len(keys) * self.block_tokens):
            raise ValueError("`cache` does not hold one sequence of this model")
        with self._client.write(keys) as batch:
            if batch.wanted:
                self._layout.copy_out(cache, batch.wanted, batch.memory, batch.offsets)
            return len(batch.wanted)

    def _log_failure(self, what: str, error: Exception) -> None:
        _log.log(logging.DEBUG if self._failing else logging.WARNING, "kvtier: %s: %s", what, error)
        self._failing = True

    def _namespace(self, name: str | None, revision: str | None, tenant: str) -> Namespace:
        trusted = name is not None and revision is not None
        return Namespace(
            model=name or type(self._model).__name__,
            revision=(revision or "") if trusted else weights_digest(self._model),
            dtype=str(self._layout.dtype).removeprefix("torch."),
            layout=self._layout.describe(),
            hash_scheme=HASH_SCHEME,
            world_size=1,
            groups=(Group(name="full_attention", block_tokens=self.block_tokens, part_bytes=self._layout.part_bytes),),
            tenant=tenant,
            attributes={"engine": "transformers", "config": config_digest(self._model.config)},
        )


def _sequence(input_ids: Any) -> list[int]:
    """Returns one sequence as a list; raises ValueError for a batch."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1:
            raise ValueError(f"input_ids must be one sequence, [n] or [1, n], not {tuple(input_ids.shape)}")
        return [int(token) for token in input_ids.tolist()]
    return [int(token) for token in input_ids]


def is_single_sequence(input_ids: torch.Tensor, options: Mapping[str, Any], defaults: Any) -> bool:
    """Whether the tokens alone determine the KV: no batch, beams, padding or images."""
    settings = options.get("generation_config") or defaults
    mask = options.get("attention_mask")
    chosen = {name: options.get(name, getattr(settings, name, None)) for name in _SINGLE_SEQUENCE_VALUES}
    return (
        input_ids.dim() == 2
        and input_ids.shape[0] == 1
        and (mask is None or bool(mask.all()))
        and all(name in _NEUTRAL_ARGUMENTS or hasattr(settings, name) for name in options)
        and all(chosen[name] in plain for name, plain in _SINGLE_SEQUENCE_VALUES.items())
    )


def block_hashes(tokens: Sequence[int], block_tokens: int, *, extra: bytes = b"") -> list[bytes]:
    """Returns the hash (32 bytes) of each full block of `tokens`."""
    data = np.asarray(tokens, dtype="<i8").tobytes()
    parent = hashlib.sha256(HASH_SCHEME.encode() + b"\0" + extra).digest()
    step = 8 * block_tokens
    hashes = []
    for end in range(step, len(data) + 1, step):
        parent = hashlib.sha256(parent + data[end - step : end]).digest()
        hashes.append(parent)
    return hashes


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str:
    """Returns a hex digest of a sample of all parameters and buffers."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        if tensor.is_meta:  # the parameter is offloaded and not in memory
            continue
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        if count:
            places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device="cpu").long()
            sample = flat[places.to(flat.device)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def config_digest(config: Any) -> str:
    """Returns a hex digest of a transformers config (rope, layer types, windows, …)."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
