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
from ..failures import Unsupported
from .compat import KVConnectorHandshakeMetadata, MambaSpec, MLAAttentionSpec
from .groups import layer_specs

__all__ = ["Parts", "Ranks", "merge_stages", "parts_of", "pieces_of", "resolve_ranks", "worker_number"]


@dataclass(frozen=True)
class Ranks:
    """The workers of one engine, without other data parallel engines.

    `tensor`: ranks per pipeline stage. `stages`: number of pipeline stages. `copies`: number of
    consecutive ranks of a stage that hold the same bytes (latent attention). These ranks share the
    same parts of each block, and only the first of them stores these. vLLM does not report copies
    of KV heads, so ranks with the same head have a part each. `pieces`: number of parts of a block
    that one worker holds.
    """

    tensor: int = 1
    stages: int = 1
    copies: int = 1
    pieces: int = 1

    @property
    def workers(self) -> int:
        """Number of workers, each of which reports every job (B4.5)."""
        return self.tensor * self.stages

    @property
    def shards(self) -> int:
        """Number of different parts of a block in one stage."""
        return self.tensor // self.copies * self.pieces

    @property
    def parts(self) -> int:
        """Number of different parts of a block. The namespace uses it as world size."""
        return self.shards * self.stages

    def part(self, rank: int, piece: int = 0) -> int:
        """Returns the number of a worker's part. `rank` may count over all data parallel engines.

        `piece` is less than `pieces`.
        """
        stage, place = divmod(rank % self.workers, self.tensor)
        return stage * self.shards + place // self.copies * self.pieces + piece

    def stores(self, rank: int) -> bool:
        return rank % self.tensor % self.copies == 0


@dataclass(frozen=True)
class Parts(KVConnectorHandshakeMetadata):
    """Parts of a block in one pipeline stage, or in all stages. Pickled by vLLM.

    `part_bytes`: bytes of a part, per group. `digest`: hash of the layers, their order and formats.
    `copies`, `pieces`: see Ranks.
    """

    part_bytes: tuple[int, ...]
    digest: str
    copies: int = 1
    pieces: int = 1


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
    return Ranks(tensor, stages, _copies(parts.copies, tensor), parts.pieces)


def _copies(replicas: int, tensor: int) -> int:
    return replicas if tensor % replicas == 0 else 1


def pieces_of(kv_parts: int, vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the number of parts of a block that each worker holds, for the setting `kv_parts`.

    Raises Unsupported if the KV of a worker cannot be divided.
    """
    if not kv_parts:
        return 1
    specs = list(layer_specs(kv_cache_config))
    if all(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return 1
    tensor = int(vllm_config.parallel_config.tensor_parallel_size)
    ranks = tensor // _copies(int(getattr(kv_cache_config, "kv_tp_replicas", 1)), tensor)
    if kv_parts % ranks:
        raise Unsupported(
            f"kv_parts={kv_parts} is not a multiple of the {ranks} tensor parallel ranks with different KV"
        )
    pieces = kv_parts // ranks
    for spec in specs if pieces > 1 else ():
        if getattr(spec, "num_head_slots", None) is not None:
            raise Unsupported(
                f"kv_parts={kv_parts}: the attention backend stores K and V in separate head slots, so the KV heads of a"
                " rank cannot be divided. Use the tensor parallel size as kv_parts, or another attention backend"
            )
        if isinstance(spec, (MambaSpec, MLAAttentionSpec)) or spec.num_heads % pieces:
            raise Unsupported(
                f"kv_parts={kv_parts}: the {spec.num_heads} KV heads of a rank ({type(spec).__name__}) cannot be divided"
                f" into {pieces} parts"
            )
    return pieces


def worker_number(vllm_config: Any) -> int:
    """Returns the number of a worker in its engine. vLLM's rank may count over several engines."""
    parallel = vllm_config.parallel_config
    workers: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return int(parallel.rank) % workers


def parts_of(geometry: CacheGeometry, kv_cache_config: Any, pieces: int = 1) -> Parts:
    """Returns the parts of a rank with these layers. `geometry` has the page sizes of one part."""
    layers = [[list(group.layers), list(group.page_bytes), list(group.formats)] for group in geometry.groups]
    digest = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return Parts(tuple(group.part_bytes for group in geometry.groups), digest, copies, pieces)


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
    copies, pieces = {parts.copies for parts in merged}, {parts.pieces for parts in merged}
    if len(pieces) != 1:
        raise Unsupported("the workers of the pipeline stages hold different numbers of parts")
    sizes = zip(*(parts.part_bytes for parts in merged), strict=True)
    return Parts(tuple(map(max, sizes)), digest, copies.pop() if len(copies) == 1 else 1, pieces.pop())
