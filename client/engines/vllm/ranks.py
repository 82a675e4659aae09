"""The workers of an engine, and the part of a block that each worker holds.

Each worker knows only its own layers. The scheduler knows at most the layers of the first pipeline
stage. In vLLM's connector handshake the workers report their layers, so that scheduler and workers
agree on the size and the contents of a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...offload import CacheGeometry
from .compat import KVConnectorHandshakeMetadata
from .groups import Unsupported

__all__ = ["Parts", "Ranks", "merge_stages", "parts_of", "resolve_ranks", "worker_number"]


@dataclass(frozen=True)
class Ranks:
    """The workers of one engine, without other data parallel engines.

    `tensor`: ranks per pipeline stage. `stages`: number of pipeline stages. `copies`: number of
    consecutive ranks of a stage that hold the same bytes (latent attention). These ranks share one
    part of each block, and only the first of them stores it.
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
        """Number of different parts of a block in one stage."""
        return self.tensor // self.copies

    @property
    def parts(self) -> int:
        """Number of different parts of a block. The namespace uses it as world size."""
        return self.shards * self.stages

    def part(self, rank: int) -> int:
        """Returns a worker's part number. `rank` may count over all data parallel engines."""
        stage, place = divmod(rank % self.workers, self.tensor)
        return stage * self.shards + place // self.copies

    def stores(self, rank: int) -> bool:
        return rank % self.tensor % self.copies == 0


@dataclass(frozen=True)
class Parts(KVConnectorHandshakeMetadata):
    """Parts of a block in one pipeline stage, or in all stages. Pickled by vLLM.

    `part_bytes`: bytes of a part, per group. `digest`: hash of the layers, their order and formats.
    `copies`: see Ranks.
    """

    part_bytes: tuple[int, ...]
    digest: str
    copies: int = 1


def resolve_ranks(vllm_config: Any, parts: Parts) -> Ranks:
    """Returns the engine's ranks. Raises Unsupported if the scheduler would not get all reports."""
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and tensor * stages > 1:
        raise Unsupported(
            "the external launcher is not supported with several ranks, because each rank has its own scheduler"
        )
    if stages > 1 and getattr(vllm_config, "speculative_config", None) is not None:
        # vLLM would tell only the workers of the last stage when a step's forward pass is over.
        raise Unsupported("pipeline parallelism with speculative decoding is not supported")
    return Ranks(tensor, stages, parts.copies if tensor % parts.copies == 0 else 1)


def worker_number(vllm_config: Any) -> int:
    """Returns the number of a worker in its engine. vLLM's rank may count over several engines."""
    parallel = vllm_config.parallel_config
    workers: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return int(parallel.rank) % workers


def parts_of(geometry: CacheGeometry, kv_cache_config: Any) -> Parts:
    """Returns the parts of a rank with these layers."""
    layers = [[list(group.layers), list(group.page_bytes), list(group.formats)] for group in geometry.groups]
    digest = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return Parts(tuple(group.part_bytes for group in geometry.groups), digest, copies)


def merge_stages(reported: Mapping[tuple[int, int], object], stages: int, tensor: int) -> Parts:
    """Returns the parts of all stages. `reported`: a report by stage and rank in the stage.

    A slot has the size of the largest part. A smaller part leaves the end of the slot unused.
    Raises Unsupported if a worker did not report, or if the ranks of a stage differ.
    """
    merged: list[Parts] = []
    for stage in range(stages):
        parts = {reported.get((stage, place)) for place in range(tensor)}
        first = parts.pop()
        if parts or not isinstance(first, Parts):
            raise Unsupported(
                f"the workers of pipeline stage {stage} did not report their layers, or their layers differ"
            )
        merged.append(first)
    if stages == 1:
        return merged[0]
    digest = hashlib.sha256(json.dumps([parts.digest for parts in merged]).encode()).hexdigest()
    copies = {parts.copies for parts in merged}
    sizes = zip(*(parts.part_bytes for parts in merged), strict=True)
    return Parts(tuple(map(max, sizes)), digest, copies.pop() if len(copies) == 1 else 1)
