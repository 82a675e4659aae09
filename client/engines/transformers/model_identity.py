"""Identity of a model's KV that is equal in each process: weights, settings, code and hardware."""

from __future__ import annotations

import hashlib
import json
import logging
import types
from collections.abc import Container
from itertools import pairwise
from typing import Any

import torch
import transformers
import xxhash

from .model_state import Snapshot, TensorState

__all__ = ["engine_attributes", "run_obstacles", "run_settings", "state_digest", "weights_digest"]

_CHUNK = 1 << 24
"""Number of elements that are copied from a device at a time."""

_IRRELEVANT = {
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "dtype",
    "name_or_path",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Settings of a configuration that do not change the KV, such as its origin."""


@torch.no_grad()
def weights_digest(snapshot: Snapshot, own_paths: Container[str] = ()) -> str:
    """Returns a hex digest of all bytes of all tensors of a model: parameters, buffers, others.

    `own_paths`: see `StateTracker`.
    """
    digest = xxhash.xxh3_128()
    for path, state in sorted(snapshot.values.items()):
        if isinstance(state, TensorState) and path not in own_paths:
            tensor = state.tensor()
            digest.update(f"{path}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
            for part in tensor.reshape(-1).split(_CHUNK):
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_digest(snapshot: Snapshot, own_paths: Container[str] = ()) -> str:
    """Returns a hex digest of settings, modules, classes and functions, without the weights."""
    lines = [
        f"{path}={_text(value)}"
        for path, value in sorted(snapshot.values.items())
        if not _is_irrelevant(path) and path not in own_paths and not isinstance(value, logging.Logger)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_irrelevant(path: str) -> bool:
    names = path.removesuffix(" type").split(".")
    return names[-1] == "name_or_path" or any(
        parent.endswith("config") and name in _IRRELEVANT for parent, name in pairwise(names)
    )


def _text(value: Any) -> str:
    """Returns a text without addresses and versions of tensors, which differ between processes."""
    if isinstance(value, TensorState):
        _, _, shape, _, dtype = value.mark
        return f"{tuple(shape)} {dtype}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | int | float | complex | bytes | range | slice | None):
        return repr(value)
    return str(value) if type(value).__module__ == "torch" else type(value).__qualname__ + repr(value)


def engine_attributes(device: torch.device) -> dict[str, str]:
    """Returns attributes of the software and the kind of device. Both may change kernels."""
    capability = (
        torch.cuda.get_device_capability(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    )
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "device": f"{device.type} {capability}",
    }


def run_settings(device: torch.device) -> str:
    """Returns torch's settings at this moment that may change the KV. Takes microseconds."""
    kind, cuda = device.type, torch.backends.cuda
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = [
        *(torch.get_default_dtype(), autocast, torch.get_float32_matmul_precision()),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.backends.cudnn.allow_tf32),
        *(
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
    ]
    return json.dumps(list(map(str, settings)))


def run_obstacles() -> list[str]:
    """Returns why torch may compute something else at this moment than what the model says."""
    modes = [
        *torch.overrides._get_current_function_mode_stack(),  # noqa: SLF001 - no public function
        *torch.utils._python_dispatch._get_current_dispatch_mode_stack(),  # noqa: SLF001 - as above
    ]
    return [f"the mode {type(mode).__name__} is active" for mode in modes if type(mode).__name__ != "DeviceContext"]
