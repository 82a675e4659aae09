"""Makes SGLang 0.5.23 run on a CPU with HiCache, for tests and for the demo.

SGLang has no wheel with kernels for CPUs. With this folder on `PYTHONPATH`, every Python process of
the engine starts with these replacements, and SGLang's files stay as they are:

- `sgl_kernel` and `timm` are empty modules. SGLang's torch code does not call them.
- `torch.cpu` gets events and streams that do nothing, because a CPU runs operations in order.
- Host pools and tensors of LoRA adapters are not pinned, because there is no CUDA runtime.
- Two copy kernels between device and host pools become torch copies.
- Attention with a sliding window reads the rows of the pool for windows. SGLang's torch code reads
  the rows with the numbers of the full pool, so an answer is wrong unless both have the same order.
- torchvision's part in C++ does not load with a CPU build of torch, so its registration is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

_EMPTY = ("sgl_kernel", "timm", "torchvision._meta_registrations")


class _Nothing:
    """A value that can be called, and that has any attribute."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, returns what it decorates."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _EmptyModule(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (object,), {}) if name[0].isupper() else _Nothing()
        setattr(self, name, value)
        return value


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in _EMPTY or name.partition(".")[0] in _EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _EmptyModule(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when the module has been imported."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if action else None
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                assert action is not None
                action(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _stream(_: Any) -> Iterator[None]:
    yield


def _give_cpu_streams(_: ModuleType) -> None:
    import torch

    cpu: Any = torch.cpu
    cpu.Event, cpu.Stream, cpu.stream = _Event, _Stream, _stream
    cpu.current_stream = lambda *_: _Stream()
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assignment]


def _pin_nothing(base: ModuleType) -> None:
    construct = base.HostKVCache.__init__

    def init(self: Any, **settings: Any) -> None:
        construct(self, **settings | {"pin_memory": False})

    base.HostKVCache.__init__ = init


class _UnpinnedTorch(ModuleType):
    """The module `torch` for modules that ask for pinned tensors."""

    def __getattr__(self, name: str) -> Any:
        import torch

        value = getattr(torch, name)
        return functools.partial(_call_unpinned, value) if name in {"empty", "tensor", "zeros"} else value


def _call_unpinned(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("pin_memory", None)
    return make(*args, **kwargs)


def _unpin(lora: ModuleType) -> None:
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    lora.torch = _UnpinnedTorch("torch")  # type: ignore[attr-defined]


def _copy_all_layers(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copies rows of the device pools into pages of the host pools, of which there is one or two.

    `src_ptrs`: one tensor per layer, for keys and then for values. `dst_ptrs`: keys, values.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = (dst_indices[::page_size] // page_size).tolist()
    for number, source in enumerate(src_ptrs):
        kind, layer = divmod(number, layers)
        for first, page in zip(range(0, len(src_indices), page_size), pages, strict=True):
            target = dst_ptrs[kind][page, layer]
            target.copy_(source[src_indices[first : first + page_size].to(source.device)].reshape(target.shape))


def _copy_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """Copies pages of the host pools into rows of one layer of the device pools."""
    pages = (src_indices[::page_size] // page_size).tolist()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for first, page in zip(range(0, len(dst_indices), page_size), pages, strict=True):
            rows = dst_indices[first : first + page_size]
            target[rows] = source[page, layer_id].reshape((page_size, *target.shape[1:]))


def _give_copies(pools: ModuleType) -> None:
    pools.transfer_kv_all_layer_direct_lf_pf = _copy_all_layers  # type: ignore[attr-defined]
    pools.transfer_kv_per_layer_direct_pf_lf = _copy_layer  # type: ignore[attr-defined]


def _read_windows(attention: ModuleType) -> None:
    backend = attention.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, _reading_windows(getattr(backend, name)))


def _reading_windows(run: Callable[..., Any]) -> Callable[..., Any]:
    def read(
        self: Any, query: Any, output: Any, keys: Any, values: Any, rows: Any, requests: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """`rows`: the row of each token, per request. `requests`: the requests of the batch."""
        if self.use_sliding_window_kv_pool and kwargs.get("sliding_window_size") is not None:
            rows = self.token_to_kv_pool.translate_loc_from_full_to_swa(rows[requests])
            requests = range(len(requests))
        return run(self, query, output, keys, values, rows, requests, *args, **kwargs)

    return read


_POOLS = "sglang.srt.mem_cache.pool_host"
sys.meta_path.insert(
    0,
    _AfterImport(
        {
            "sglang": _give_cpu_streams,
            f"{_POOLS}.base": _pin_nothing,
            f"{_POOLS}.mha": _give_copies,
            f"{_POOLS}.mamba": _give_copies,
            "sglang.srt.layers.attention.torch_native_backend": _read_windows,
            "sglang.srt.lora.layers": _unpin,
            "sglang.srt.lora.backend.torch_backend": _unpin,
        }
    ),
)
sys.meta_path.insert(0, _EmptyModules())
