"""Identity of a model's KV that is equal in each process: weights, settings, code and hardware."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
import xxhash

from ..identity import SCHEME, WEIGHTS
from ..settings import NeutralSettings, digest_of_settings, plain_settings
from .model_state import Snapshot, TensorState, read_samples

__all__ = ["NEUTRAL", "ChangedWeights", "WeightsDigest", "engine_attributes", "model_attributes"]
__all__ += ["run_obstacles", "run_settings", "state_digest"]

_CHUNK_BYTES = 1 << 22
"""Bytes of a tensor that are copied at a time."""

_CODE_DEPTH = 8

NEUTRAL = NeutralSettings(
    {
        "part of the namespace in another form": ("config.dtype", "config.torch_dtype", "config.transformers_version"),
        "origin of the model": (
            *("name_or_path", "config._name_or_path", "config._commit_hash", "config.architectures"),
        ),
        "who has chosen the attention implementation": ("config._attn_implementation_autoset",),
        "whether KV is kept": ("config.use_cache",),
    }
)
"""Settings of configurations that do not change the KV of tokens. All others count."""


class ChangedWeights(Exception):
    """The weights have changed while their digest was computed."""


def model_attributes(
    snapshot: Snapshot, own_paths: Collection[str], *, weights: bool, is_stopped: Callable[[], bool]
) -> Callable[[], dict[str, str]]:
    """Returns a function that returns the attributes of a model for its namespace.

    The function takes long, may run on another thread, and raises `ChangedWeights` and OSError.
    The snapshot must be current now, but not later. Raises Unsupported for settings that cannot be
    compared. `own_paths`: see `StateTracker`. `weights`: whether to read them.
    """
    own = frozenset(own_paths)
    plain = {path: plain_settings(_table(value), NEUTRAL, "config") for path, value in snapshot.configurations.items()}
    digest = WeightsDigest(snapshot, own) if weights else None

    def attributes() -> dict[str, str]:
        known = {"settings": digest_of_settings(plain), "state": state_digest(snapshot, own)}
        return known | ({WEIGHTS: digest.compute(is_stopped)} if digest is not None else {})

    return attributes


def _table(value: Any) -> Any:
    """Returns all attributes and the class of a configuration and of its inner configurations.

    `to_dict` lacks attributes, for example the attention implementation and the experts' one. The
    class counts, because models take values from it, for example `model_type`.
    """
    if isinstance(value, Mapping):
        return {name: _table(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_table(part) for part in value]
    if not callable(getattr(value, "to_dict", None)) or isinstance(value, type):
        return value
    attributes = {name: _table(part) for name, part in vars(value).items()}
    return {"attributes of": type(value), **attributes} if attributes else value


class WeightsDigest:
    """Digest of all bytes of all tensors of a model: parameters, buffers, others.

    It is the digest of the tensors of the snapshot, although the model may change while it is
    computed: a replaced tensor does not count, and a tensor with other samples than in the snapshot
    is an error. The samples are compared in the bytes that are hashed. So a change that is undone
    before the next comparison cannot enter the digest unseen. Tensors stay in memory until then.
    """

    def __init__(self, snapshot: Snapshot, own_paths: Container[str] = ()) -> None:
        self._tensors = [
            _Tensor(path, _plain_tensor(state.tensor()), state, b"".join(read_samples([state.tensor()], [state])))
            for path, state in sorted(snapshot.values.items())
            if isinstance(state, TensorState) and path not in own_paths
        ]

    @torch.no_grad()
    def compute(self, is_stopped: Callable[[], bool] = lambda: False) -> str:
        """Returns the digest in hex. Raises `ChangedWeights`, also if `is_stopped` returns True."""
        digest = xxhash.xxh3_128()
        tensors, self._tensors = self._tensors, []
        while tensors:
            each = tensors.pop(0)
            tensor = each.tensor
            digest.update(f"{each.path}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
            if tensor.is_contiguous():
                for chunk in each.checked_chunks(is_stopped):
                    digest.update(chunk.data)
            else:
                memory = np.concatenate([*each.checked_chunks(is_stopped)])
                copy = torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
                digest.update(copy.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same memory. It keeps this memory if `tensor` gets another."""
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class _Tensor:
    def __init__(self, path: str, tensor: torch.Tensor, state: TensorState, samples: bytes) -> None:
        self.path, self.tensor, self._places, self._samples = path, tensor, state.samples, samples
        self._memory = self._place()

    def checked_chunks(self, is_stopped: Callable[[], bool]) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Yields copies of the memory of a tensor, after a comparison of the samples in them.

        The copies are NumPy's: torch would start threads, which a fork loses.
        """
        tensor, size, (count, step) = self.tensor, self.tensor.element_size(), self._places
        length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        length = size * length if tensor.numel() else 0
        for start in range(0, length, _CHUNK_BYTES):
            if is_stopped() or self._place() != self._memory:
                raise ChangedWeights(f"{self.path} has other memory")
            stop = min(start + _CHUNK_BYTES, length)
            part = tensor.as_strided(((stop - start) // size,), (1,), tensor.storage_offset() + start // size)
            chunk = np.array(part.view(torch.uint8).cpu().numpy())
            first = -(-start // (size * step))  # number of the first sample in this chunk
            found = chunk.reshape(-1, size)[first * step - start // size :: step][: max(0, count - first)].tobytes()
            if found != self._samples[first * size : first * size + len(found)]:
                raise ChangedWeights(f"{self.path} has changed")
            yield chunk

    def _place(self) -> tuple[int, int]:
        storage = self.tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()


def state_digest(snapshot: Snapshot, own_paths: Container[str] = ()) -> str:
    """Returns a hex digest of modules, their attributes, classes and functions, without weights.

    Configurations are not in it, because they are settings.
    """
    lines = [
        f"{path}={_text(value, _CODE_DEPTH)}"
        for path, value in sorted(snapshot.values.items())
        if path not in own_paths and not snapshot.is_setting(path) and not NEUTRAL.has(*_owner_and_name(path))
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _owner_and_name(path: str) -> tuple[str, str]:
    owner, _, name = path.removesuffix(" type").rpartition(".")
    return owner.rpartition(".")[2], name


def _text(value: Any, depth: int) -> str:
    """Returns a text without addresses and versions of tensors, which differ between processes."""
    if isinstance(value, TensorState):
        _, _, shape, _, dtype = value.mark
        return f"{tuple(shape)} {dtype}"
    if isinstance(value, types.FunctionType) and depth:
        return f"{value.__module__}.{value.__qualname__} {_function_text(value, depth - 1)}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | int | float | complex | bytes | range | slice | None):
        return repr(value)
    return str(value) if type(value).__module__ == "torch" else type(value).__qualname__ + repr(value)


def _function_text(function: types.FunctionType, depth: int) -> str:
    """Returns the code of a function, and the simple values that it has from its definition."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            cells.append(None)
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return _code_text(function.__code__) + repr([_value_text(value, depth) for value in values])


def _value_text(value: Any, depth: int) -> str:
    if isinstance(value, tuple | list) and depth:
        return repr([_value_text(part, depth - 1) for part in value])
    if isinstance(value, str | int | float | complex | bytes | None | types.FunctionType):
        return _text(value, depth)
    return type(value).__qualname__


def _code_text(code: types.CodeType) -> str:
    constants = [
        _code_text(part)
        if isinstance(part, types.CodeType)
        else repr(sorted(map(repr, part)) if isinstance(part, frozenset) else part)
        for part in code.co_consts
    ]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def engine_attributes(device: torch.device) -> dict[str, str]:
    """Returns attributes of the software and the kind of device. Both may change kernels."""
    capability = (
        torch.cuda.get_device_capability(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    )
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "device": f"{device.type} {capability}",
        **SCHEME,
    }


def run_settings(device: torch.device) -> str:
    """Returns torch's settings at this moment that may change the KV. Takes microseconds."""
    kind, cuda = device.type, torch.backends.cuda
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = [
        *(torch.get_default_dtype(), autocast, *_precisions()),
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


def _precisions() -> list[str]:
    """Returns the precision of products of float32, for which torch has two kinds of settings."""
    try:
        precisions = [torch.get_float32_matmul_precision()]
    except RuntimeError:  # the program has used the newer one
        precisions = []
    cuda, cpu = torch.backends.cuda, torch.backends.mkldnn
    backends = (torch.backends, cuda.matmul, torch.backends.cudnn.conv, cpu, cpu.matmul, cpu.conv)
    return precisions + [str(getattr(backend, "fp32_precision", "")) for backend in backends]


def run_obstacles() -> list[str]:
    """Returns why torch may compute something else at this moment than what the model says."""
    modes = [
        *torch.overrides._get_current_function_mode_stack(),  # noqa: SLF001 - no public function
        *torch.utils._python_dispatch._get_current_dispatch_mode_stack(),  # noqa: SLF001 - as above
    ]
    return [f"the mode {type(mode).__name__} is active" for mode in modes if type(mode).__name__ != "DeviceContext"]
