"""The stand-in for vLLM's copy kernel obeys the contract of the kernel (see `cpu_tiering`)."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import cpu_tiering
import numpy as np
import pytest
import torch
from harness.polling import wait_until
from vllm import _custom_ops
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering import spec as tiering_spec

COPIES = 40
SIZES = [8 * (1 + number % 7) for number in range(COPIES)]
ROW = 64
# vLLM has the kernel in Triton as well, for small copies. Triton interprets it on a CPU.
COMPARE_WITH_TRITON = """
import torch, triton, triton.language
from vllm import triton_utils
triton_utils.triton, triton_utils.tl = triton, triton.language
from vllm.v1.kv_offload.cpu.swap_blocks_triton import _swap_blocks_kernel
import cpu_tiering, test_cpu_tiering
source, theirs = test_cpu_tiering.make_memory()
ours = theirs.copy()
_swap_blocks_kernel[(2,)](*test_cpu_tiering.descriptors(source, theirs), test_cpu_tiering.COPIES, BYTES_PER_CHUNK=16)
cpu_tiering.swap_blocks_batch(*test_cpu_tiering.descriptors(source, ours))
cpu_tiering.submit(int).result()
assert theirs.any() and (ours == theirs).all()
"""


@pytest.fixture
def held() -> Iterator[Callable[[], None]]:
    """Holds all copies back until the test calls this."""
    release = threading.Event()
    cpu_tiering.submit(release.wait)
    yield release.set
    release.set()


def descriptors(source: np.ndarray, target: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of different sizes, from the end of `source` to the start of `target`, with gaps."""
    starts = np.arange(COPIES) * ROW
    src, dst = source.ctypes.data + starts[::-1].copy(), target.ctypes.data + starts
    return torch.tensor(src), torch.tensor(dst), torch.tensor(SIZES)


def make_memory() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(1).integers(1, 127, COPIES * ROW, np.int8)
    return source, np.zeros_like(source)


def test_it_takes_what_vllm_s_kernel_takes() -> None:
    """Names, order and defaults of the parameters."""
    ours, theirs = (inspect.signature(kernel.swap_blocks_batch).parameters for kernel in (cpu_tiering, _custom_ops))
    assert [(name, ours[name].default) for name in ours] == [(name, theirs[name].default) for name in theirs]


def test_it_copies_these_bytes_and_no_others(held: Callable[[], None]) -> None:
    """Each copy has its own size; what is between the destinations stays as it was."""
    source, target = make_memory()
    cpu_tiering.swap_blocks_batch(*descriptors(source, target))
    held()
    wait_until(lambda: bool(target[-ROW:].any()))
    expected = np.zeros_like(target)
    for number, size in enumerate(SIZES):
        first = ROW * (COPIES - 1 - number)
        expected[ROW * number : ROW * number + size] = source[first : first + size]
    assert (target == expected).all()


def test_events_follow_the_copies(held: Callable[[], None]) -> None:
    """A call returns before it has copied; an event happens after the copies before it."""
    source, target = make_memory()
    stream, start, end = cpu_tiering._Stream(), *(cpu_tiering._Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    cpu_tiering.swap_blocks_batch(*descriptors(source, target), is_src_access_order_any=True)
    end.record(stream)
    assert not any((target.any(), start.query(), end.query()))
    held()
    end.synchronize()
    assert target[-ROW:].any()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def test_it_copies_what_vllm_s_triton_kernel_copies() -> None:
    """The same descriptors move the same bytes."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPARE_WITH_TRITON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_vllm_s_worker_reports_a_job_when_its_bytes_are_copied(
    held: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks go to the halves of chunks and come back, in the order of the jobs."""
    for module, name in ((gpu_worker, "torch"), (gpu_worker, "ops"), (tiering_spec, "CPUOffloadingWorker")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores it after the test
    for module in (gpu_worker, cpu_spec):
        monkeypatch.setattr(module, "current_platform", module.current_platform)
    cpu_tiering.prepare_engine()
    blocks = torch.arange(6, dtype=torch.int8).repeat_interleave(ROW).reshape(6, ROW)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(blocks, ROW)], [[CanonicalKVCacheRef(0, ROW)]])
    worker = tiering_spec.CPUOffloadingWorker(caches, blocks_per_chunk=2, num_cpu_chunks=3)
    worker.submit_store(1, _blocks([1, 2, 3], first=1), CPULoadStoreSpec([2, 0]))
    worker.submit_load(2, CPULoadStoreSpec([0]), _blocks([5], first=3))
    assert worker.get_finished() == []
    assert blocks[5, 0] == 5
    held()
    worker.wait({1, 2})
    assert [(job.job_id, job.success, job.transfer_size) for job in worker.get_finished()] == [
        (1, True, 3 * ROW),
        (2, True, ROW),
    ]
    assert blocks[:, 0].tolist() == [0, 1, 2, 3, 4, 3]
    assert (blocks == blocks[:, :1]).all()


def _blocks(numbers: list[int], *, first: int) -> GPULoadStoreSpec:
    """Blocks of one group; `first`: position of the first one in its request."""
    return GPULoadStoreSpec(numbers, group_sizes=[len(numbers)], block_indices=[first])
