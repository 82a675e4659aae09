"""The workers of an engine and which part of a block each of them holds.

A worker knows its own layers, and the scheduler at best those of the first pipeline stage. Through
vLLM's connector handshake they agree on the size of a part and on its contents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...offload import CacheGeometry
from .compat import KVConnectorHandshakeMetadata
from .groups import Unsupported

__all__ = ["Parts", "Ranks", "merge_stages", "parts_of", "resolve_ranks"]


@dataclass(frozen=True)
class Ranks:
    """The workers of one engine, without other data parallel engines.

    `tensor`: ranks per pipeline stage. `stages`: pipeline stages. `copies`: the number of adjacent
    ranks of a stage that hold the same bytes (latent attention). They have one part of a block, and
    the first of them stores it.
    """

    tensor: int = 1
    stages: int = 1
    copies: int = 1

    @property
    def workers(self) -> int:
        """Number of workers, each of which reports every job (B4.5)."""
        return self.tensor * self.stages

    @property
    def shards(self) -> int:
        """Different parts of a block in one stage."""
        return self.tensor // self.copies

    @property
    def parts(self) -> int:
        """Parts of a block: the world size of the namespace."""
        return self.shards * self.stages

    def part(self, rank: int) -> int:
        """Returns the part that a worker holds. `rank` may count on over data parallel engines."""
        stage, place = divmod(rank % self.workers, self.tensor)
        return stage * self.shards + place // self.copies

    def stores(self, rank: int) -> bool:
        """Whether this worker stores its part."""
        return rank % self.tensor % self.copies == 0


@dataclass(frozen=True)
class Parts(KVConnectorHandshakeMetadata):
    """What the ranks of one pipeline stage, or of all stages, hold of a block. Pickled by vLLM.

    `part_bytes`: per group. `digest`: of the layers, their order and formats. `copies`: see Ranks.
    """

    part_bytes: tuple[int, ...]
    digest: str
    copies: int = 1


def resolve_ranks(vllm_config: Any, parts: Parts) -> Ranks:
    """Returns the engine's ranks. Raises Unsupported if the scheduler would miss some workers."""
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and tensor * stages > 1:
        raise Unsupported("with the external launcher every rank has a scheduler of its own")
    if stages > 1 and getattr(vllm_config, "speculative_config", None) is not None:
        # Only the workers of the last stage would learn that a step's forward is over.
        raise Unsupported("pipeline parallelism with speculative decoding is not supported")
    return Ranks(tensor, stages, parts.copies if tensor % parts.copies == 0 else 1)


def parts_of(geometry: CacheGeometry, kv_cache_config: Any) -> Parts:
    """Returns what a rank with these layers holds. vLLM reports replicas for whole ranks only."""
    layers = [[list(group.layers), list(group.page_bytes), list(group.formats)] for group in geometry.groups]
    digest = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return Parts(tuple(group.part_bytes for group in geometry.groups), digest, copies)


def merge_stages(reported: Mapping[tuple[int, int], object], stages: int, tensor: int) -> Parts:
    """Returns what all stages hold, from reports by (stage, rank in it).

    A slot has the size of the largest part; smaller parts leave its end unused.
    Raises Unsupported if a worker did not report, or the ranks of a stage differ.
    """
    merged: list[Parts] = []
    for stage in range(stages):
        parts = {reported.get((stage, place)) for place in range(tensor)}
        first = parts.pop()
        if parts or not isinstance(first, Parts):
            raise Unsupported(
                f"the workers of pipeline stage {stage} did not report their layers, or have different ones"
            )
        merged.append(first)
    return _merge(merged)


def _merge(stages: Sequence[Parts]) -> Parts:
    if len(stages) == 1:
        return stages[0]
    digest = hashlib.sha256(json.dumps([stage.digest for stage in stages]).encode()).hexdigest()
    copies = {stage.copies for stage in stages}
    sizes = zip(*(stage.part_bytes for stage in stages), strict=True)
    return Parts(tuple(map(max, sizes)), digest, copies.pop() if len(copies) == 1 else 1)
