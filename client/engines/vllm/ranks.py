"""An engine's workers, which part of a block each of them has, and what all of them have together.

A worker knows its own layers only, and the scheduler those of the first pipeline stage at best. What all must agree on, the size of
a part and what it holds, they tell each other while the engine starts (vLLM's connector handshake).
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

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
    """The workers of one engine; those of other data parallel engines are not among them.

    ``tensor``: ranks in a pipeline stage. ``stages``: pipeline stages. ``copies``: so many ranks in a row of a stage hold the same
    bytes (latent attention): they have one part of a block, and the first of them stores it.
    """

    tensor: int = 1
    stages: int = 1
    copies: int = 1

    @property
    def workers(self) -> int:
        """How many there are: so many report each job (B4.5)."""
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
        """The part that a worker has. Data parallel engines of one launcher count on: their workers' ranks start anew here."""
        stage, place = divmod(rank % self.workers, self.tensor)
        return stage * self.shards + place // self.copies

    def stores(self, rank: int) -> bool:
        """Whether a worker is the one that stores its part."""
        return rank % self.tensor % self.copies == 0


@dataclass(frozen=True)
class Parts(KVConnectorHandshakeMetadata):
    """What the ranks of one pipeline stage, or of all, hold of a block: pickled by vLLM, from workers to the scheduler and back.

    ``part_bytes``: per group. ``digest``: of the layers, their order and formats. ``copies``: see Ranks.
    """

    part_bytes: tuple[int, ...]
    digest: str
    copies: int = 1


def resolve_ranks(vllm_config: Any, parts: Parts) -> Ranks:
    """Read the ranks of an engine. Raises Unsupported where the scheduler would not hear of all workers."""
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and tensor * stages > 1:
        raise Unsupported("with the external launcher every rank has a scheduler of its own")
    if stages > 1 and getattr(vllm_config, "speculative_config", None) is not None:
        # Only the last stage's workers would be told that a step's forward is over.
        raise Unsupported("pipeline parallelism with speculative decoding is not supported")
    return Ranks(tensor, stages, parts.copies if tensor % parts.copies == 0 else 1)


def parts_of(geometry: CacheGeometry, kv_cache_config: Any) -> Parts:
    """What a rank with these layers holds; vLLM says that ranks hold the same only where all layers of the rank do."""
    layers = [[list(group.layers), list(group.page_bytes), list(group.formats)] for group in geometry.groups]
    digest = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return Parts(tuple(group.part_bytes for group in geometry.groups), digest, copies)


def merge_stages(told: Mapping[tuple[int, int], object], stages: int, tensor: int) -> Parts:
    """What all stages hold, from what (stage, place in it) told. Slots are of the largest part: smaller ones leave the end unused.

    Raises Unsupported when not every worker has told, or those of one stage differ.
    """
    merged: list[Parts] = []
    for stage in range(stages):
        parts = {told.get((stage, place)) for place in range(tensor)}
        first = parts.pop()
        if parts or not isinstance(first, Parts):
            raise Unsupported(
                f"the workers of pipeline stage {stage} did not say what they hold, or hold different layers"
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
