"""vLLM's own tiering on the CPU: its `TieringOffloadingSpec` with a worker that copies with NumPy.

vLLM refuses to offload on this device only because its copy kernel is CUDA's
(`CPUOffloadingSpec.get_worker`). Everything else (connector, tiering manager, primary tier, its
shared region and the layout in it) is vLLM's own code, unchanged. Load it with `"spec_name":
"CpuTieringSpec", "spec_module_path": "cpu_tiering"`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):
    """The tiering of vLLM, for an engine whose KV cache is in host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker that copies between the engine's KV cache and the primary tier."""
        if not self._worker:
            tiering_spec.CPUOffloadingWorker = _Worker
            self._worker = self.create_worker(kv_caches)
        return self._worker


class _Worker(OffloadingWorker):
    """Copies synchronously, in vLLM's direct layout (see `SingleDirectionOffloadingHandler`)."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any,
        **others: Any,
    ) -> None:
        assert not others.get("canonical_layout"), "not written for it"
        caches, region = kv_caches, mmap_region
        self._refs = caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._finished: list[TransferResult] = []
        self._blocks: list[np.ndarray] = []
        self._chunks: list[np.ndarray] = []
        for cache in caches.tensors:
            page = cache.page_size_bytes
            self._blocks.append(cache.tensor.view(torch.int8).view((-1, page)).numpy())
            self._chunks.append(region.create_next_worker_view(page * blocks_per_chunk).numpy())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Engine to primary tier."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: FBT001, FBT002
        """Primary tier to engine."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Returns the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing, because copies are synchronous."""

    def shutdown(self) -> None:
        """Unmaps the primary tier."""
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, primary: Any, *, store: bool) -> bool:
        first_block = first_chunk = copied = 0
        for refs, count, index in zip(self._refs, engine.group_sizes, engine.block_indices, strict=True):
            skipped = index % self._blocks_per_chunk
            blocks = engine.block_ids[first_block : first_block + count]
            chunks = primary.block_ids[first_chunk:]
            first_block += count
            first_chunk += -(-(skipped + count) // self._blocks_per_chunk) if count else 0
            for number, block in enumerate(blocks, start=skipped):
                chunk, part = chunks[number // self._blocks_per_chunk], number % self._blocks_per_chunk
                for ref in refs:
                    copied += self._copy_page(ref, int(block), int(chunk), part, store=store)
        assert first_chunk == len(primary.block_ids)
        self._finished.append(TransferResult(job_id, True, copied, 0.0))
        return True

    def _copy_page(self, ref: Any, block: int, chunk: int, part: int, *, store: bool) -> int:
        pages, rows = self._blocks[ref.tensor_idx], self._chunks[ref.tensor_idx]
        size, start = ref.page_size_bytes, part * pages.shape[1]
        if store:
            rows[chunk, start : start + size] = pages[block, :size]
        else:
            pages[block, :size] = rows[chunk, start : start + size]
        return int(size)
