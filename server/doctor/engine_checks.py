"""Checks of engines on this machine: block hashes, and the server's access to GPU memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..devices.registry import unavailable_reason
from . import machine
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["cuda_ipc", "hashes"]

_REPRODUCIBLE = frozenset(("sha256", "sha256_cbor"))
"""Hash algorithms that kvtier's vLLM connector accepts."""
_DEFAULT = "sha256"
_FLAG = "--prefix-caching-hash-algo"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Engine:
    """A running or planned engine."""

    name: str
    algorithm: str
    seed: str | None
    """PYTHONHASHSEED of the engine."""


def hashes(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that all engines compute the same block hashes."""
    engines = list(_running())
    if context.hash_algo is not None:
        engines.append(Engine("the planned engine", context.hash_algo, context.environ.get("PYTHONHASHSEED")))
    if not engines:
        yield ok("this user runs no vLLM here; vLLM's default (sha256) gives the same hashes in all processes")
    for engine in engines:
        yield _judge(engine)
    seeds = sorted({engine.seed for engine in engines if engine.algorithm in _REPRODUCIBLE}, key=str)
    if len(seeds) > 1:
        yield fail(
            f"engines have different PYTHONHASHSEED: {', '.join('unset' if seed is None else repr(seed) for seed in seeds)}",
            "block hashes depend on PYTHONHASHSEED: engines with different values find no blocks of each other",
            "set PYTHONHASHSEED to the same value in all engines, or in none",
        )


def _judge(engine: Engine) -> CheckResult:
    seed = "PYTHONHASHSEED is not set" if engine.seed in (None, "", "random") else f"PYTHONHASHSEED={engine.seed}"
    if engine.algorithm in _REPRODUCIBLE:
        return ok(f"{engine.name}: hash algorithm {engine.algorithm}, {seed}")
    why = "such hashes can collide: kvtier's connector stores and loads nothing for this engine, and logs one warning"
    if engine.seed in (None, "", "random"):
        why = (
            "the block hashes differ in every process, so no engine would find the blocks of another engine; "
            "kvtier's connector stores nothing for this engine"
        )
    return fail(
        f"{engine.name}: hash algorithm {engine.algorithm}, {seed}",
        why,
        f"start the engine with {_FLAG} sha256 (the default); PYTHONHASHSEED alone is not enough",
    )


def _running(proc: Path = _PROC) -> Iterator[Engine]:
    """Yields the running vLLM servers whose command line and environment can be read."""
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if not _is_vllm(arguments):
                continue
            environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            seeds = [text.partition("=")[2] for text in environ if text.startswith("PYTHONHASHSEED=")]
            yield Engine(f"vLLM, process {entry.name}", _algorithm(arguments), seeds[0] if seeds else None)


def _is_vllm(arguments: Sequence[str]) -> bool:
    """Returns whether this is a command line of `vllm serve` or of vLLM's server module."""
    names = [Path(argument).name for argument in arguments[:4]]
    return ("vllm" in names and "serve" in names) or any(
        argument.startswith("vllm.entrypoints") for argument in arguments[:8]
    )


def _algorithm(arguments: Sequence[str]) -> str:
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") != _FLAG:  # vLLM accepts the flag with "_" and with "-"
            continue
        if equals:
            return value
        if number + 1 < len(arguments):
            return arguments[number + 1]
    return _DEFAULT


def cuda_ipc(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that the server can copy to and from the GPU memory of engines."""
    allocator = context.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + context.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in allocator.lower():
        yield warn(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator}",
            "expandable segments cannot be shared between processes: these engines copy through host memory",
            "start engines without expandable_segments:True",
        )
    if not machine.has_gpu():
        yield ok("no NVIDIA GPU here: engines copy between their memory and the region themselves")
        return
    reason = unavailable_reason(context.config.devices.driver if context.config else "auto")
    if reason:
        yield warn(
            reason,
            "the server does not copy to and from GPUs; each engine makes its own copies, which is slower",
            "remove the cause that the message names",
        )
        return
    if context.endpoint.path is not None and context.status is not None and _peer_pid(context.endpoint.path) == 0:
        yield warn(
            "the server is in another PID namespace",
            "the driver shares GPU memory only between processes that can see each other's process ids",
            "share the PID namespace: docker --pid, Kubernetes shareProcessNamespace or hostPID",
        )
        return
    yield ok("an NVIDIA device and cuda-bindings are present (no copy was tried)")


def _peer_pid(path: str) -> int | None:
    """Returns the server's pid; 0 if this PID namespace does not show it; None without a server."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
