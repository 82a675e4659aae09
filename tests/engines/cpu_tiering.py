"""Copy kernel and streams for vLLM's own tiering on the CPU; all the rest is vLLM's own code.

vLLM refuses to offload on a CPU, because its copy kernel is a device's. `prepare_engine` replaces
this kernel, `swap_blocks_batch`, and the streams and events that it runs on. Connector, spec,
tiering manager, primary tier, and the worker that computes the addresses stay as they are, so an
engine gets the settings of an operator.

Contract of the kernel (`vllm/_custom_ops.py`, `SingleDirectionOffloadingHandler`):

- It gets three int64 tensors of equal length: source addresses, destination addresses, and sizes in
  bytes. It copies `sizes[i]` bytes from `src[i]` to `dst[i]`, and writes nothing else.
- The call may return before the copies are made. They are made in the order of the stream: after
  the work that the stream waits for, and before the events that are recorded later.
- With `is_src_access_order_any` the sources may be read at any time after the call.
- The caller keeps the memory until an event of the stream has happened.

On a CPU the engine computes in the calling thread, so its own work is done before a call. One
thread makes all copies in the order of the calls, which is a valid order of any set of streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.tiering import spec as tiering_spec

__all__ = ["prepare_engine", "submit", "swap_blocks_batch"]

_thread: list[ThreadPoolExecutor] = []


def prepare_engine() -> None:
    """Lets this process, and those that it forks, offload from a CPU's KV cache."""
    make_worker = gpu_worker.CPUOffloadingWorker

    def worker(kv_caches: Any, **settings: Any) -> Any:
        tensors = [
            dataclasses.replace(cache, tensor=cache.tensor.as_subclass(_DeviceTensor)) for cache in kv_caches.tensors
        ]
        return make_worker(kv_caches=dataclasses.replace(kv_caches, tensors=tensors), **settings)

    for module in (cpu_spec, gpu_worker):
        module.current_platform = _Platform
    gpu_worker.ops = _Kernels
    gpu_worker.torch = _Torch()
    tiering_spec.CPUOffloadingWorker = worker


def submit(work: Any) -> Future[Any]:
    """Appends work to the copies of this process, which has one thread for them."""
    if not _thread:
        _thread.append(ThreadPoolExecutor(1, "copies"))
    return _thread[0].submit(work)


def swap_blocks_batch(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> None:
    """The kernel; its parameters are those of vLLM's."""
    batch = list(zip(dst_ptrs.tolist(), src_ptrs.tolist(), sizes.tolist(), strict=True))

    def copy() -> None:
        for target, source, size in batch:
            ctypes.memmove(target, source, size)

    submit(copy)


class _Kernels:
    swap_blocks_batch = staticmethod(swap_blocks_batch)


class _DeviceTensor(torch.Tensor):
    """A KV cache tensor, which vLLM's worker requires to be on a device."""

    is_cuda = True


class _Stream:
    """Waits for nothing, because the copies of a process are made in the order of the calls."""

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...


class _Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._reached: Future[float] = Future()

    def record(self, stream: _Stream) -> None:
        self._reached = submit(time.perf_counter)

    def query(self) -> bool:
        return self._reached.done()

    def synchronize(self) -> None:
        self._reached.result()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return 1000 * (end._reached.result() - self._reached.result())


class _Platform:
    """What the modules of vLLM's offloading ask the platform for."""

    Stream = current_stream = _Stream

    @staticmethod
    def is_cuda_alike() -> bool:
        return True

    @staticmethod
    def is_rocm() -> bool:
        return False

    @staticmethod
    def is_xpu() -> bool:
        return False

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: _Stream) -> Iterator[None]:  # noqa: ARG004
        yield


class _Torch:
    """torch, with events that a CPU lacks."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
