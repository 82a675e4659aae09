"""What engines beside the server are started with: do their hashes agree, can their GPUs' memory be shared."""

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
"""What kvtier's connector for vLLM takes; the same as `client/engines/vllm` has, which a test compares."""
_DEFAULT = "sha256"
_FLAG = "--prefix-caching-hash-algo"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, or one that is to be started."""

    name: str
    algorithm: str
    seed: str | None
    """Its PYTHONHASHSEED."""


def hashes(scene: CheckContext) -> Iterator[CheckResult]:
    """Do the engines' block hashes mean the same in every process."""
    engines = list(_running())
    if scene.hash_algo is not None:
        engines.append(Engine("an engine started from here", scene.hash_algo, scene.environ.get("PYTHONHASHSEED")))
    if not engines:
        yield ok("no vLLM of this user runs here; its default (sha256) agrees between processes")
    for engine in engines:
        yield _judge(engine)
    seeds = sorted({engine.seed for engine in engines if engine.algorithm in _REPRODUCIBLE}, key=str)
    if len(seeds) > 1:
        yield fail(
            f"engines have different PYTHONHASHSEED: {', '.join('unset' if seed is None else repr(seed) for seed in seeds)}",
            "vLLM hashes from it: no engine finds what another has stored, though their settings look alike",
            "set it alike in all engines, or in none",
        )


def _judge(engine: Engine) -> CheckResult:
    seed = "PYTHONHASHSEED is not set" if engine.seed in (None, "", "random") else f"PYTHONHASHSEED={engine.seed}"
    if engine.algorithm in _REPRODUCIBLE:
        return ok(f"{engine.name}: hashes by {engine.algorithm}, {seed}")
    why = "kvtier's connector stores and loads nothing for it, with one warning: such hashes may collide"
    if engine.seed in (None, "", "random"):
        why = (
            "its block hashes are other ones in every process, so no engine finds what another has stored; "
            "kvtier's connector stores nothing for it"
        )
    return fail(
        f"{engine.name}: hashes by {engine.algorithm}, {seed}",
        why,
        f"start it with {_FLAG} sha256 (the default); PYTHONHASHSEED alone is not enough",
    )


def _running(proc: Path = _PROC) -> Iterator[Engine]:
    """Yields the vLLM servers whose command line can be read."""
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
    """Whether a command line is that of a vLLM server: `vllm serve`, or its module."""
    names = [Path(argument).name for argument in arguments[:4]]
    return ("vllm" in names and "serve" in names) or any(
        argument.startswith("vllm.entrypoints") for argument in arguments[:8]
    )


def _algorithm(arguments: Sequence[str]) -> str:
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") != _FLAG:  # vLLM takes either
            continue
        if equals:
            return value
        if number + 1 < len(arguments):
            return arguments[number + 1]
    return _DEFAULT


def cuda_ipc(scene: CheckContext) -> Iterator[CheckResult]:
    """Can the server copy to and from the memory of engines' GPUs."""
    allocator = scene.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + scene.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in allocator.lower():
        yield warn(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator}",
            "memory of expandable segments cannot be shared between processes: engines with it copy by way of the host",
            "start engines without expandable_segments:True",
        )
    if not machine.has_gpu():
        yield ok("no NVIDIA GPU here: engines copy between their memory and the region themselves")
        return
    reason = unavailable_reason(scene.config.devices.driver if scene.config else "auto")
    if reason:
        yield warn(
            reason, "the server does not copy to and from GPUs; engines do it themselves, more slowly", "as it says"
        )
        return
    if scene.endpoint.path is not None and scene.status is not None and _peer_pid(scene.endpoint.path) == 0:
        yield warn(
            "the server is in another PID namespace",
            "the driver opens an engine's memory only where both see each other's processes",
            "share the PID namespace: docker --pid, Kubernetes shareProcessNamespace or hostPID",
        )
        return
    yield ok("an NVIDIA device and cuda-bindings are there (that copies work is unproven on a GPU)")


def _peer_pid(path: str) -> int | None:
    """Returns the process behind a socket: 0 where it is in a PID namespace that is not seen from here; None if nobody answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
