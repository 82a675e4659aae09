"""Settings of engines: each counts unless it is listed as neutral."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.client import engines
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.settings import (
    NeutralSettings,
    digest_of_settings,
    plain_settings,
    settings_of_environment,
)

NEUTRAL = NeutralSettings(
    {"names": ("model_config.served_name", "anywhere"), "logs": ("log_config.*", "environment.ENGINE_LOG")},
    counted=("log_to_model",),
)


class Mode(enum.IntEnum):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class ModelConfig:
    served_name: str = "a"
    rope: dict[str, Any] = dataclasses.field(default_factory=lambda: {"theta": 1e4})
    dtype: torch.dtype = torch.float16
    mode: Mode = Mode.FAST
    layers: set[str] = dataclasses.field(default_factory=set)
    overrides: Any = None


REVIEWED = {
    ("file_digests.py", "_NEUTRAL_NAMES"): "d537fd92",
    ("file_digests.py", "_NEUTRAL_SUFFIXES"): "72141f71",
    ("sglang/layout.py", "_FORMAT"): "5344a5c4",
    ("sglang/namespace.py", "NEUTRAL"): "5e6d168b",
    ("transformers/generate_settings.py", "_NEUTRAL"): "7ba022d6",
    ("transformers/generate_settings.py", "_PLAIN"): "7910d1f9",
    ("transformers/model_identity.py", "NEUTRAL"): "0dda3681",
    ("transformers/model_state.py", "_IGNORED"): "e7a4e2f7",
    ("transformers/model_state.py", "_NEUTRAL_HOOKS"): "a61167e4",
    ("transformers/model_state.py", "_PLAIN"): "3e7bb0c1",
    ("transformers/model_state.py", "_SKIPPED"): "1310976f",
    ("vllm/namespace.py", "NEUTRAL"): "94e2e68f",
    ("vllm_tier/namespace.py", "_PROCESS_FIELDS"): "56c45874",
    ("vllm_tier/namespace.py", "_REPLICA_FIELDS"): "efe84350",
}
"""Digests of the lists of what does not change the KV, after a review of each entry."""


@pytest.mark.parametrize(("file", "name"), REVIEWED)
def test_each_entry_of_the_lists_is_reviewed(file: str, name: str) -> None:
    """A wrong neutral entry gives wrong KV.

    If you change a list, check in the engine's code that the KV of equal tokens is equal for all
    values of the setting. Then change the digest here.
    """
    tree = ast.parse((Path(engines.__file__).parent / file).read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith((f"{name} =", f"{name}: "))
    )
    assert value is not None
    leaves = [node for node in ast.walk(value) if isinstance(node, ast.Constant | ast.Name | ast.Attribute)]
    leaves.sort(key=lambda node: (node.lineno, node.col_offset))
    entries = repr([ast.unparse(node) for node in leaves])
    assert hashlib.sha256(entries.encode()).hexdigest()[:8] == REVIEWED[file, name]


def digest(settings: Any) -> str:
    return digest_of_settings(plain_settings(settings, NEUTRAL))


def make_override(scale: float) -> Callable[[Any], Any]:
    def override(config: Any) -> Any:
        return config * scale

    return override


def make_keyword(default: float) -> Callable[[Any], Any]:
    def override(config: Any, *, scale: float = default) -> Any:
        return config * scale

    return override


def with_default(config: Any, scale: float = 1.0) -> Any:
    return config * scale


BASE: dict[str, Any] = {"model_config": ModelConfig(), "log_config": {"level": "info"}, "other": 1}
DIFFERENT: dict[str, dict[str, Any]] = {
    "value": {"model_config": ModelConfig(rope={"theta": 1e6})},
    "type of a value": {"other": "1"},
    "number or truth value": {"other": True},
    "dtype": {"model_config": ModelConfig(dtype=torch.bfloat16)},
    "enum": {"model_config": ModelConfig(mode=Mode.EXACT)},
    "set": {"model_config": ModelConfig(layers={"q"})},
    "function": {"model_config": ModelConfig(overrides=with_default)},
    "closure": {"model_config": ModelConfig(overrides=make_override(2.0))},
    "class": {"model_config": ModelConfig(overrides=ModelConfig)},
    "new option": {"new": None},
    "new option of a part": {"model_config": SimpleNamespace(**vars(ModelConfig()), new=0)},
    "counted option of neutral ones": {"log_config": {"level": "info", "log_to_model": 1}},
    "key that is a number": {"other": {1: 2}},
    "key that is a text": {"other": {"1": 2}},
    "list": {"other": [1]},
    "bytes": {"other": b"1"},
}


def test_each_setting_counts() -> None:
    """Also one that the adapter does not know. No two of these sets of settings have one digest."""
    digests = [digest(BASE)] + [digest(BASE | change) for change in DIFFERENT.values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "change",
    [
        {"model_config": ModelConfig(served_name="b")},
        {"log_config": {"level": "debug", "new": 7}},
        {"log_config": {}},
        {"log_config": None},
        {"other": 1, "anywhere": 5},
    ],
)
def test_neutral_settings_do_not_count(change: dict[str, Any]) -> None:
    assert digest(BASE | change) == digest(BASE)


def test_parts_with_a_longer_name() -> None:
    """`draft_model_config` has the neutral settings of `model_config`; `remodel_config` has not."""
    for name, equal in (("draft_model_config", True), ("remodel_config", False)):
        digests = {digest({name: ModelConfig(served_name=served)}) for served in "ab"}
        assert (len(digests) == 1) is equal


def test_values_of_functions_count() -> None:
    """Two functions of one definition differ by the values that they keep."""
    assert digest({"f": make_override(1.0)}) == digest({"f": make_override(1.0)}) != digest({"f": make_override(2.0)})
    assert digest({"f": make_keyword(1.0)}) == digest({"f": make_keyword(1.0)}) != digest({"f": make_keyword(2.0)})


def test_the_source_of_functions_counts(tmp_path: Path) -> None:
    """A plug-in can change under its name."""
    source = tmp_path / "plugin.py"
    digests = []
    for text in ("def override(config): return config", "def override(config): return config * 2"):
        source.write_text(text)
        scope: dict[str, Any] = {"__name__": "plugin"}
        exec(compile(text, str(source), "exec"), scope)  # noqa: S102 - as an import
        digests.append(digest({"f": scope["override"]}))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("value", [object(), functools.partial(with_default, scale=2.0), make_override(object())])  # type: ignore[arg-type]
def test_values_of_unknown_types_are_refused(value: Any) -> None:
    """Their text could have an address, or leave something out."""
    with pytest.raises(Unsupported, match="'new' has a value of an unknown type"):
        plain_settings({"new": [value]}, NEUTRAL)


def test_settings_that_contain_themselves_are_refused() -> None:
    settings: dict[str, Any] = {}
    settings["self"] = settings
    with pytest.raises(Unsupported, match="nested too deeply"):
        plain_settings(settings, NEUTRAL)


def test_the_content_of_named_files_counts(tmp_path: Path) -> None:
    """A file or folder can change in place. It is read when the digest is computed."""
    scales, listed, folder = tmp_path / "scales.json", tmp_path / "plugin.py", tmp_path / "draft"
    folder.mkdir()
    plain = plain_settings({"scales": str(scales), "plugins": ["a", str(listed)], "draft": folder}, NEUTRAL)
    digests = [digest_of_settings(plain)]
    for content in (b"1", b"2"):
        for file in (scales, listed):
            file.write_bytes(content)
            digests.append(digest_of_settings(plain))
        (folder / "model.safetensors").write_bytes(content)
        digests.append(digest_of_settings(plain))
    assert len(set(digests)) == 7


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        *((f"own_{kind}", "word", True) for kind in ("path", "dir", "file", "folder")),
        *(
            ("path_of_own", "word", False),
            ("mode", "word", False),
            ("mode", "./word", True),
            ("mode", "word.json", True),
        ),
    ],
)
def test_a_setting_names_a_file_by_its_name_or_by_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, *, counts: bool
) -> None:
    """A word such as "auto" can also be a file of the current directory."""
    monkeypatch.chdir(tmp_path)
    digests = []
    for content in ("1", "2"):
        Path(value).write_text(content)
        digests.append(digest({name: value}))
    assert (digests[0] != digests[1]) is counts


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables with the prefix of the engine that are set, and not neutral."""
    monkeypatch.setenv("ENGINE_LOG", "debug")
    monkeypatch.setenv("ENGINE_NEW", "1")
    monkeypatch.setenv("OTHER", "1")
    assert settings_of_environment("ENGINE_", NEUTRAL) == {"ENGINE_NEW": "1"}


def test_digests_are_equal_in_each_process() -> None:
    """Sets have another order in each process. Torch, which takes seconds, has no setting here."""
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(dtype=types.ModuleType, device=types.ModuleType)\n"
        "from kvtier.client.engines.settings import *\n"
        "settings = {'s': {'a', 'b', 'c', ('d', 1)}, 'f': NeutralSettings, 'n': float('nan')}\n"
        "print(digest_of_settings(plain_settings(settings, NeutralSettings({}))))"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    }
    assert len(found) == 1
