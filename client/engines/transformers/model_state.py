"""State of a model on which its KV depends: snapshots, and a cheap comparison at each call.

A snapshot covers what is reachable from the model: tensors (parameters, buffers, other attributes),
settings (configuration, flags and scales of modules and adapters), and the tree of modules. It also
covers the methods of the modules' classes, the functions of the Python modules that define these
classes, and the attention functions of transformers.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
import secrets
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

__all__ = ["Snapshot", "StateTracker", "TensorState", "read_samples"]

_log = logging.getLogger(__name__)

SAMPLES = 16
"""Number of elements of a large tensor that each comparison reads."""

_SMALL = 256
"""Up to this number of elements a comparison reads the whole tensor, for example frequencies."""

_MOST_MEMBERS = 4096
"""The content of a larger container, such as a vocabulary, is not compared."""

_KNOWN = 8
"""Number of earlier states that get their version again when they return."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, re.Pattern, PurePath),
    *(types.BuiltinFunctionType, type, torch.dtype, torch.device, torch.Size, torch.layout),
)
_LIBRARIES = ("torch.", "transformers.")
_IGNORED = (logging.Logger, torch.utils.hooks.RemovableHandle)
_SKIPPED = frozenset(
    {
        *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_is_hf_initialized"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
        *("_non_persistent_buffers_set", "generation_config", "training", "warnings_issued"),
    }
)
"""Attributes that do not change the KV. `generation_config` is checked at each `generate`."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_NEUTRAL_HOOKS = ("AlignDevicesHook", "SequentialHook")
"""Hooks of accelerate that only move tensors between devices."""

_REGISTRIES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)


@dataclass(slots=True)
class TensorState:
    """State of a tensor.

    The tensor is not referenced, so that replaced weights leave the memory. A weak reference to it
    would make `torch.utils.swap_tensors` fail.
    """

    container: Any
    """Dict, list or tuple that contains the tensor, as `container[name]`."""
    name: Any
    storage: weakref.ref[torch.UntypedStorage]
    mark: tuple[Any, ...]
    samples: tuple[int, int]
    """Number and distance of the elements that each comparison reads."""

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.container[self.name]
        return tensor


class Snapshot:
    """State of a model at one moment.

    Attributes:
        values: by path, a plain value, a function, or a `TensorState`.
        configurations: by path, configurations of transformers.
        obstacles: why the KV of the model cannot be identified. Usually empty.
    """

    def __init__(self, model: torch.nn.Module, observers: Collection[Callable[..., Any]] = ()) -> None:
        """`observers`: forward hooks that change nothing."""
        self.values: dict[str, Any] = {}
        self.configurations: dict[str, PretrainedConfig] = {}
        self.obstacles: dict[str, None] = {}
        self._observers = observers
        self._seen: dict[int, tuple[str, Any]] = {}
        self._tables: list[Any] = []
        self._lists: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._modules: list[torch.nn.Module] = []
        self._visit("model", {"model": model}, "model")
        for name in _HOOKS:
            self._visit_hooks("all modules", vars(torch.nn.modules.module)[f"_global{name}"])
        self._visit_code()
        self._seen = {}
        self._tensors = [value for value in self.values.values() if isinstance(value, TensorState)]
        self._alive: list[Any] = []
        self._identities = self._identify(self._alive)
        self._samples = read_samples([state.tensor() for state in self._tensors], self._tensors)

    def is_current(self) -> bool:
        """Whether the model still has this state."""
        if self._identify() != self._identities:
            return False
        tensors = [state.tensor() for state in self._tensors]
        try:
            same = all(
                _mark(tensor) == state.mark and tensor.untyped_storage() is state.storage()
                for tensor, state in zip(tensors, self._tensors, strict=True)
            )
        except RuntimeError:  # a tensor has become one without memory
            return False
        return same and read_samples(tensors, self._tensors) == self._samples

    def changes(self, before: Snapshot) -> list[str]:
        """Returns the paths at which this state differs from an earlier state of the same model."""
        paths = [path for path, value in self.values.items() if not _same(value, before.values.get(path, before))]
        paths += [path for path in before.values if path not in self.values]
        return paths or ([] if self._samples == before._samples else ["values of tensors"])

    def is_setting(self, path: str) -> bool:
        """Whether a value belongs to a configuration."""
        parts = path.removesuffix(" type").split(".")
        return any(".".join(parts[:end]) in self.configurations for end in range(1, len(parts) + 1))

    def forget_containers(self) -> None:
        """Releases the memory of modules that have left the model. `is_current` must not follow."""
        self._tables, self._lists, self._modules, self._functions, self._alive = [], [], [], [], []
        for state in self._tensors:
            state.container = None

    def _identify(self, alive: list[Any] | None = None) -> tuple[list[int], ...]:
        """Returns the identities of all members of all containers.

        The snapshot keeps these members in `alive`, so that no other object gets their identity. It
        does not keep tensors, but their storages are compared, too.
        """
        values = chain.from_iterable(_references(function).values() for function in self._functions)
        members = [*chain.from_iterable(map(methodcaller("values"), self._tables)), *values]
        names = [*chain.from_iterable(chain(self._tables, self._lists))]
        if alive is not None:
            alive += [each for each in chain(members, names) if not isinstance(each, torch.Tensor)]
        sizes = map(len, chain(self._tables, self._lists))
        return [*map(id, members)], [*map(id, names)], [*sizes], [*map(id, map(type, self._modules))]

    def _visit(self, path: str, container: Any, name: Any) -> None:
        value = container[name]
        if isinstance(value, _PLAIN):
            self.values[path] = value
        elif isinstance(value, _IGNORED):
            return
        elif id(value) in self._seen:
            self.values[path] = f"same as {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = path, value
            if isinstance(value, torch.Tensor):
                self._visit_tensor(path, container, name)
            elif isinstance(value, torch.nn.Module):
                self._visit_module(path, value)
            elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                self._visit_function(path, value)
            else:
                self._visit_object(path, value)

    def _visit_function(self, path: str, value: Any) -> None:
        """Visits a function that an attribute has, and the values that it refers to."""
        if isinstance(value, functools.partial):
            self._visit_members(path, {"function": value.func, "arguments": value.args, "keywords": value.keywords})
        elif isinstance(value, types.MethodType):
            self._visit_members(path, {"function": value.__func__, "object": value.__self__})
        else:
            self.values[path] = value
            self._visit_members(path, {"defaults": value.__defaults__, "keywords": value.__kwdefaults__})
            if not value.__module__.startswith(_LIBRARIES):
                self._functions.append(value)
                self._visit_members(path, _references(value))

    def _visit_object(self, path: str, value: Any) -> None:
        kind = type(value)
        self.values[f"{path} type"] = kind
        if isinstance(value, PretrainedConfig):
            self.configurations[path] = value
        is_container = isinstance(value, dict | list | tuple | set | frozenset | deque)
        if (is_container and len(value) > _MOST_MEMBERS) or not (is_container or _is_transparent(value)):
            self.obstacles[f"{path} is a {kind.__qualname__}, whose content kvtier cannot compare"] = None
        elif isinstance(value, dict):
            self._visit_table(path, value)
        elif is_container:
            self._lists.append(value)
            ordered = value if isinstance(value, list | tuple) else sorted(value, key=repr)
            for index in range(len(ordered)):
                self._visit(f"{path}.{index}", ordered, index)
        if attributes := getattr(value, "__dict__", None):
            self._visit_table(path, attributes)

    def _visit_table(self, path: str, table: Any) -> None:
        self._tables.append(table)
        self._visit_members(path, table)

    def _visit_members(self, path: str, members: Any) -> None:
        for name in members:
            if name not in _SKIPPED:
                self._visit(f"{path}.{name}", members, name)

    def _visit_module(self, path: str, module: torch.nn.Module) -> None:
        attributes = vars(module)
        self._modules.append(module)
        self._tables.append(attributes)
        self.values[f"{path} type"] = type(module)
        moves = _only_moves(attributes.get("_hf_hook"))
        if "forward" in attributes and not moves:
            self.obstacles[f"the method `forward` of {path} is replaced"] = None
        if module.training and type(module) not in {torch.nn.Linear, torch.nn.Embedding}:
            self.obstacles["the model is in training mode"] = None
        for name, value in attributes.items():
            if name in _HOOKS:
                self._visit_hooks(path, value)
            elif name in _MEMBERS:
                self._visit_table(path, value)
            elif name == "_compiled_call_impl":  # of `model.compile()`
                self.values[f"{path}.{name}"] = value
            elif name not in _SKIPPED and not (moves and name in {"forward", "_old_forward", "_hf_hook"}):
                self._visit(f"{path}.{name}", attributes, name)

    def _visit_hooks(self, path: str, hooks: dict[int, Any]) -> None:
        self._tables.append(hooks)
        for hook in hooks.values():
            origin = getattr(hook, "__module__", "")
            # transformers installs hooks that only record outputs
            if hook not in self._observers and origin != "transformers.utils.output_capturing":
                self.obstacles[f"{path} has the forward hook {getattr(hook, '__qualname__', hook)}"] = None

    def _visit_tensor(self, path: str, container: Any, place: Any) -> None:
        tensor = container[place]
        self.values[f"{path} type"] = type(tensor)
        if vars(tensor):  # for example, the scales of quantized weights
            self._visit_table(path, vars(tensor))
        if hasattr(tensor, "__tensor_flatten__"):  # it consists of other tensors
            if not vars(tensor).keys() >= set(tensor.__tensor_flatten__()[0]):
                self.obstacles[f"{path} has parts that kvtier cannot compare"] = None
            return
        if tensor.is_meta:
            self.obstacles[f"{path} is not in memory, for example because it is offloaded"] = None
            return
        if tensor.is_inference() and tensor.numel() > _SMALL:
            self.obstacles[f"{path} was created in inference mode, so torch does not count its changes"] = None
        if tensor.is_quantized:
            self.obstacles[f"{path} has no memory that kvtier can read"] = None
            return
        try:
            storage = weakref.ref(tensor.untyped_storage())
            self.values[path] = TensorState(container, place, storage, _mark(tensor), _places(tensor))
        except (NotImplementedError, RuntimeError):
            self.obstacles[f"{path} has no memory that kvtier can read"] = None

    def _visit_code(self) -> None:
        classes = {base: None for module in self._modules for base in type(module).__mro__ if base is not object}
        sources = {base.__module__: None for base in classes if not base.__module__.startswith(("torch.", "typing"))}
        tables: dict[str, Any] = {f"class {base.__module__}.{base.__qualname__}": vars(base) for base in classes}
        tables |= {name: vars(sys.modules[name]) for name in sources if name in sys.modules and name != "__main__"}
        for source, name in _REGISTRIES:
            registry = getattr(sys.modules.get(source), name, None)
            for part in ("_global_mapping", "_local_mapping"):
                if isinstance(table := getattr(registry, part, None), dict):
                    tables[f"{name}.{part}"] = table
        for path, table in tables.items():
            self._tables.append(table)
            self.values |= {
                f"{path}.{name}": member for name, member in table.items() if isinstance(member, _FUNCTIONS)
            }


def _references(function: types.FunctionType) -> dict[str, Any]:
    """Returns variables of outer functions that a function uses, and global ones with values."""
    code, empty = function.__code__, types.CellType()
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    references = {f"outer {name}": cell.cell_contents for name, cell in cells if cell != empty}
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, bool | int | float | str | dict | list | set | torch.Tensor | types.FunctionType):
            references[f"global {name}"] = value
    return references


def _is_transparent(value: Any) -> bool:
    """Whether the content of an object is that of its `__dict__`, as far as one can know."""
    kind = type(value)
    slots = chain.from_iterable(
        (slots,) if isinstance(slots := vars(base).get("__slots__", ()), str) else slots for base in kind.__mro__
    )
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, np.ndarray)
        and not kind.__module__.startswith(("torch.", "accelerate."))
        and {"__dict__", "__weakref__"}.issuperset(slots)
    )


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - the counter of changes in place
    return version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, TensorState):
        storage = value.storage()
        return (
            isinstance(other, TensorState)
            and storage is not None
            and storage is other.storage()
            and value.mark == other.mark
        )
    return value is other or (isinstance(value, _PLAIN) and type(value) is type(other) and bool(value == other))


def _only_moves(hook: Any) -> bool:
    """Whether accelerate replaced `forward` only to move the inputs and weights between devices."""
    kind = type(hook)
    return (
        kind.__module__ == "accelerate.hooks"
        and kind.__name__ in _NEUTRAL_HOOKS
        and all(map(_only_moves, getattr(hook, "hooks", ())))
    )


def _places(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns number and distance of the sampled elements. Odd distances reach all columns."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return 0, 1
    return (extent, 1) if extent <= _SMALL else (SAMPLES, extent // SAMPLES - 1 | 1)


@torch.no_grad()
def read_samples(tensors: list[torch.Tensor], states: list[TensorState]) -> list[bytes]:
    """Returns some elements of each tensor: one copy per element type and device."""
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor, state in zip(tensors, states, strict=True):
        count, step = state.samples
        part = tensor.as_strided((count,), (step,), tensor.storage_offset())
        dtype = _INTEGERS.get(part.element_size(), part.dtype)  # not all types can be concatenated
        groups.setdefault((dtype, tensor.device), []).append(part.view(dtype))
    return [torch.cat(parts).cpu().view(torch.uint8).numpy().tobytes() for parts in groups.values()]


class StateTracker:
    """Versions of a model's state: "" at the start, and a unique one after each change.

    No other process uses a unique version, because no digest proves that weights are equal after a
    change in place. A state that returns, such as the one without an adapter, gets its version
    again, if no tensor has changed in the meantime.
    """

    def __init__(self, model: torch.nn.Module, observers: Collection[Callable[..., Any]] = ()) -> None:
        self._model, self._observers = model, observers
        self.snapshot = Snapshot(model, observers)
        self.version = ""
        self._known = {self.version: self.snapshot}
        self.own_paths: set[str] = set()
        """Paths that the model itself changes when it runs, such as frequencies of a long RoPE."""
        self.structure = 0
        """Number of changes of anything but tensors."""

    def learn(self) -> None:
        """Called after each run of the probe: later runs may change what these runs changed."""
        if self.snapshot.is_current():
            return
        before, self.snapshot = self.snapshot, Snapshot(self._model, self._observers)
        self.own_paths.update(self.snapshot.changes(before))
        self._known[self.version] = self.snapshot

    def update(self, *, after_run: bool = False) -> bool:
        """Looks for changes since the last call. Returns whether the version is the same.

        `after_run`: the model has run since then, and may have changed its own frequencies or the
        like, if this is what it changed in its first runs.
        """
        if self.snapshot.is_current():
            return True
        snapshot, before = Snapshot(self._model, self._observers), self.version
        changes = snapshot.changes(self.snapshot)
        if not (after_run and self.own_paths.issuperset(changes)):
            known = [version for version, old in self._known.items() if not snapshot.changes(old)]
            self.version = known[0] if known else secrets.token_hex(8)
            self.structure += not all(isinstance(snapshot.values.get(path), TensorState) for path in changes)
        if self.version != before:
            _log.info("kvtier: the model has changed: %s", ", ".join(changes[:3]))
        self.snapshot.forget_containers()
        self.snapshot = self._known[self.version] = snapshot
        for version in [*self._known][:-_KNOWN]:
            del self._known[version]
        return self.version == before

    def knows(self, version: str) -> bool:
        """Whether the state with this version can return. May be called on any thread."""
        return version in self._known

    def renew(self) -> None:
        """Takes a new version for a change that the caller knows of."""
        self.version = secrets.token_hex(8)
        self._known = {self.version: self.snapshot}
