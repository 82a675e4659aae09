"""Versions of vLLM: the API of 0.32, live, that of 0.33, by name, and messages for others."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm_stand_in
from connector_api import HOOKS, IMPORTS, METRICS_CLASSES
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvtier.client.engines.vllm import KVTierConnector, compat
from kvtier.client.engines.vllm.compat import SUPPORTED, release_of
from kvtier.client.engines.vllm.stats import ConnectorStats, KVTierPromMetrics

INSTALLED = "{}.{}".format(*(release_of(vllm.__version__) or ()))


def _parameters(function: Any) -> str:
    function = getattr(function, "__func__", function)
    signs = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return " ".join(signs.get(parameter.kind, "") + parameter.name for parameter in parameters)


def _methods(*classes: type) -> dict[str, str]:
    return {
        name: _parameters(value)
        for owner in classes
        for name, value in vars(owner).items()
        if callable(getattr(value, "__func__", value)) and not name.startswith("_")
    }


def _ours() -> Iterator[tuple[str, Any]]:
    for owner in KVTierConnector.__mro__:
        if owner.__module__.startswith("kvtier."):
            for name, value in vars(owner).items():
                if callable(getattr(value, "__func__", value)) and not name.startswith("_"):
                    yield name, getattr(value, "__func__", value)


def test_the_table_is_what_is_installed() -> None:
    """The names in the other tests are those of the installed vLLM."""
    assert _methods(KVConnectorBase_V1, SupportsHMA) == HOOKS[INSTALLED]
    for name, methods in METRICS_CLASSES.items():
        here = vars(getattr(vllm_metrics, name))
        assert {method: _parameters(here[method]) for method in methods} == methods


@pytest.mark.parametrize("release", list(HOOKS))
def test_every_hook_takes_what_vllm_gives_it(release: str) -> None:
    """Each override takes the base class's parameters, and vLLM calls every override."""
    overridden = set()
    for name, function in _ours():
        if name not in HOOKS[release]:
            continue
        overridden.add(name)
        names = [part for part in HOOKS[release][name].split() if not part.startswith("*")]
        further = {"request_ids": []} if "**kwargs" in HOOKS[release][name] else {}
        signature = inspect.signature(function)
        signature.bind("self", *names, **further)
        signature.bind("self", **dict.fromkeys(names), **further)
    called_by_kvtier = {"weights_named", "loading_adapter"}  # see `compat.watch_engine_core`
    ours = {name for name, _ in _ours()} - called_by_kvtier
    assert ours - overridden <= HOOKS["0.33"].keys() - HOOKS["0.32"].keys()
    assert {"start_load_kv", "build_prom_metrics", "request_finished_all_groups"} <= overridden


def test_the_sleep_hooks_are_those_of_033() -> None:
    """0.32 does not call them; 0.33 has them under these names."""
    ours = {name for name, _ in _ours()}
    assert {"unregister_kv_caches", "restore_kv_caches"} <= ours & HOOKS["0.33"].keys() - HOOKS["0.32"].keys()


def test_the_metrics_classes_take_what_vllm_gives_them() -> None:
    """The same for the statistics classes."""
    for ours, name in ((ConnectorStats, "KVConnectorStats"), (KVTierPromMetrics, "KVConnectorPromMetrics")):
        for method, names in METRICS_CLASSES[name].items():
            inspect.signature(getattr(ours, method)).bind("self", **dict.fromkeys(names.split()))


def test_nothing_is_imported_that_a_supported_release_lacks() -> None:
    """All names that the adapter takes from vLLM exist in both releases."""
    known = {f"{module}.{name}" for module, names in IMPORTS.items() for name in names.split()}
    found = {
        f"{node.module}.{alias.name}"
        for path in Path(inspect.getfile(compat)).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert found <= known
    assert "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1" in found


# ---- the stand-in for environments without vLLM


@pytest.mark.parametrize("name", [name for name in vllm_stand_in.MODULES if name != "vllm"])
def test_the_stand_in_has_names_fields_and_members_of_vllm(name: str) -> None:
    """What the tests without vLLM use exists in vLLM in the same form."""
    module = importlib.import_module(name)
    for item, ours in vllm_stand_in.MODULES[name].items():
        theirs = getattr(module, item)
        if dataclasses.is_dataclass(ours):
            fields = {field.name for field in dataclasses.fields(ours) if not field.name.startswith("_")}
            assert fields <= {field.name for field in dataclasses.fields(theirs)}, item
        elif hasattr(ours, "__members__"):
            assert {member.value for member in ours} <= {member.value for member in theirs}, item
        elif inspect.isfunction(ours):
            inspect.signature(theirs).bind(*inspect.signature(ours).parameters)


def test_the_stand_in_computes_what_vllm_computes() -> None:
    """Hashes of blocks, and the keys of multi-modal inputs, are those of vLLM."""
    module: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hashes = [bytes([number]) * 32 for number in range(5)]
    for block_tokens in (4, 8):
        expected = list(module.resolve_block_hashes(hashes, 4, block_tokens))
        assert vllm_stand_in.resolve_block_hashes(hashes, 4, block_tokens) == expected
    key = module.make_block_hash_with_group_id(hashes[1], 3)
    assert vllm_stand_in.get_block_hash(key) == module.get_block_hash(key) == hashes[1]
    assert vllm_stand_in.get_group_id(key) == module.get_group_id(key) == 3
    assert vllm_stand_in.maybe_convert_block_hash(hashes[1]) == module.maybe_convert_block_hash(hashes[1])
    image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=6, length=4))
    request = SimpleNamespace(mm_features=[image], cache_salt="salt", lora_request=None, prompt_embeds=None)
    for start, end in ((0, 4), (4, 8), (8, 12), (12, 16)):
        extra, _ = module.generate_block_hash_extra_keys(request, start, end, 0)
        assert vllm_stand_in.generate_block_hash_extra_keys(request, start, end, 0)[0] == extra


# ---- other releases


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning", lambda _, text, *values, **__: texts.append(text % values))
    return texts


def _import_in(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """Imports the adapter's compat module as if this were another vLLM."""
    monkeypatch.setattr(vllm, "__version__", version)
    spec = importlib.util.spec_from_file_location("kvtier.client.engines.vllm.compat_again", inspect.getfile(compat))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2rc1"])
def test_a_known_release_is_not_talked_about(monkeypatch: pytest.MonkeyPatch, said: list[str], version: str) -> None:
    """Tested versions log nothing."""
    _import_in(monkeypatch, version)
    assert not said


@pytest.mark.parametrize("version", ["0.31.2", "0.9.1", "0.8.5.post1"])
def test_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """One error, which names the supported versions and this one."""
    with pytest.raises(ImportError, match=f"works with {SUPPORTED}; this is vLLM {version}$"):
        _import_in(monkeypatch, version)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev7+gabcdef", "dev"])
def test_an_unknown_release_is_one_warning(monkeypatch: pytest.MonkeyPatch, said: list[str], version: str) -> None:
    """A newer version, or a build without a version, is accepted with a warning."""
    _import_in(monkeypatch, version)
    (text,) = said
    assert version in text
    assert SUPPORTED in text


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0"])
def test_a_release_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The same error, with the missing name."""
    monkeypatch.delattr("vllm.v1.kv_cache_interface.group_kernel_blocks")
    with pytest.raises(ImportError, match=f"works with {SUPPORTED}; this is vLLM {version} .*group_kernel_blocks"):
        _import_in(monkeypatch, version)
