"""Errors of shared device memory and device copies, with advice for operators."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Cause", "CopyCancelled", "DeviceError"]


class Cause(StrEnum):
    """Why device memory cannot be shared or copied. Stable codes for logs, metrics and the wire."""

    NO_BINDINGS = "no_bindings"
    NO_DRIVER = "no_driver"
    NO_DEVICE = "no_device"
    UNKNOWN_MEMORY = "unknown_memory"
    HOST_MEMORY = "host_memory"
    MANAGED_MEMORY = "managed_memory"
    POOL_MEMORY = "pool_memory"
    EXPANDABLE_SEGMENTS = "expandable_segments"
    VMM_MEMORY = "vmm_memory"
    BAD_EXPORT = "bad_export"
    OTHER_HOST = "other_host"
    SAME_PROCESS = "same_process"
    SAME_PID = "same_pid"
    OTHER_NAMESPACE = "other_namespace"
    EXPORTER_GONE = "exporter_gone"
    CANNOT_OPEN = "cannot_open"
    CAPTURING = "capturing"
    CLOSED = "closed"
    REFUSED = "refused"
    BROKEN = "broken"


_ADVICE = {
    Cause.NO_BINDINGS: "the package cuda-bindings is missing: pip install 'kvtier[cuda]'",
    Cause.NO_DRIVER: "there is no usable CUDA driver",
    Cause.NO_DEVICE: "this process does not see that device: check CUDA_VISIBLE_DEVICES and the container's devices",
    Cause.UNKNOWN_MEMORY: "the address is in no allocation of this device",
    Cause.HOST_MEMORY: "the memory is on the host, not on the device",
    Cause.MANAGED_MEMORY: "managed memory (cudaMallocManaged) cannot be shared between processes",
    Cause.POOL_MEMORY: (
        "memory of a stream-ordered pool cannot be shared: remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF"
    ),
    Cause.EXPANDABLE_SEGMENTS: (
        "memory of expandable segments cannot be shared: remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"
    ),
    Cause.VMM_MEMORY: "memory of cuMemCreate cannot be shared (vLLM's sleep mode allocates the KV cache that way)",
    Cause.BAD_EXPORT: "the engine's description of its memory is invalid",
    Cause.OTHER_HOST: "the memory is on another host",
    Cause.SAME_PROCESS: "a process cannot open the memory that it exported itself",
    Cause.SAME_PID: (
        "both processes have the same pid, in different PID namespaces, and the driver treats them as one process:"
        " share the PID namespace"
    ),
    Cause.OTHER_NAMESPACE: (
        "the memory belongs to a process in other namespaces, and the driver does not open it from here: share the PID"
        " namespace (docker --pid, Kubernetes shareProcessNamespace or hostPID), and give both containers the device"
    ),
    Cause.EXPORTER_GONE: "the process that exported the memory has ended or has freed it",
    Cause.CANNOT_OPEN: "the driver does not open the memory",
    Cause.CAPTURING: "the stream is being captured into a graph",
    Cause.CLOSED: "the memory has been closed",
    Cause.REFUSED: "the driver refused a call",
    Cause.BROKEN: "the device's context is broken; only a new process can use the device",
}


class DeviceError(Exception):
    """Device memory cannot be shared or copied; ``cause`` is the stable code."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(f"{_ADVICE[cause]} ({detail})" if detail else _ADVICE[cause])
        self.cause = cause
        self.detail = detail


class CopyCancelled(Exception):
    """A copy was cancelled. Some bytes may have been written; no more will be written."""
