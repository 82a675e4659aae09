"""Engines share pages only if equal keys mean equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.server_process import ServerProcess
from rig import attach, hashes, kv_pool, rows

KEYS = hashes("prompt", 6)


class OrderedSet(set[str]):
    """A set with a fixed order. Otherwise each process has another one."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(order)
        self._order = order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)


def adapters(*folders: Path) -> dict[str, Any]:
    """Returns the arguments of an engine that loads these adapters when it starts."""
    paths = [{"lora_id": path.name, "lora_name": path.name, "lora_path": str(path)} for path in folders]
    return {"lora": {"enable_lora": True, "lora_paths": paths}}


def train(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def pages_found(server: ServerProcess, arguments: dict[str, Any]) -> int:
    with attach(server.endpoint, kv_pool(), arguments=arguments) as storage:
        return storage.batch_exists(KEYS)


def store_pages(server: ServerProcess, arguments: dict[str, Any]) -> None:
    with attach(server.endpoint, kv_pool(seed=1), arguments=arguments) as storage:
        assert all(storage.batch_set_v1(KEYS, rows(*range(6))))


def test_a_retrained_adapter_shares_no_pages(server: ServerProcess, tmp_path: Path) -> None:
    """SGLang's id of an adapter is its name and path, so its files are part of the namespace."""
    one, two = train(tmp_path / "one", b"1"), train(tmp_path / "two", b"2")
    store_pages(server, adapters(one, two))
    assert pages_found(server, adapters(two, one)) == 6
    assert pages_found(server, adapters(one)) == pages_found(server, {}) == 0
    train(one, b"3")
    assert pages_found(server, adapters(one, two)) == 0


def test_engines_of_other_weights_share_no_pages(server: ServerProcess, tmp_path: Path) -> None:
    """The content of a folder counts, and the commit of a model on a hub."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    local = {"model": {"model_path": str(model), "revision": None}}
    store_pages(server, local)
    assert pages_found(server, local) == 6
    (model / "model.safetensors").write_bytes(b"2")
    assert pages_found(server, local) == 0
    store_pages(server, {})
    assert pages_found(server, {"model": {"revision": "b" * 40}}) == 0


def test_arguments_that_change_the_kv(server: ServerProcess) -> None:
    """Each argument counts unless it is known to be neutral, also one of a later SGLang."""
    store_pages(server, {})
    for arguments in (
        {"model": {"dtype": "bfloat16"}},
        {"model": {"custom_weight_loader": ["package.loader"]}},
        {"model": {"model_loader_extra_config": '{"key": 1}'}},
        {"exec.moe": {"kt_method": "AMXINT4"}},
        {"exec.moe": {"enable_w4a4_mxfp4_megamoe": True}},
        {"exec.new": {"new": 1}},
        {"serving": {"weight_version": "2"}},
        {"device": {"device": "xpu"}},
    ):
        assert pages_found(server, arguments) == 0, arguments


def test_arguments_that_change_nothing(server: ServerProcess) -> None:
    """Ports, seeds and sizes can differ between engines, and the order of a set at each start."""
    modules = [OrderedSet(["q_proj", "k_proj"]), OrderedSet(["k_proj", "q_proj"])]
    store_pages(server, {"lora": {"lora_target_modules": modules[0]}})
    for arguments in (
        {"serving": {"port": 1}},
        {"device": {"random_seed": 7}},
        {"parallel": {"nccl_port": 5}},
        {"observability": {"log_level": "debug"}},
        {"memory": {"hicache_ratio": 3.0}},
        {"model": {"download_dir": "/elsewhere"}},
    ):
        assert pages_found(server, arguments | {"lora": {"lora_target_modules": modules[1]}}) == 6, arguments


def test_files_that_arguments_name(server: ServerProcess, tmp_path: Path) -> None:
    """A change of a file, or of weights in a folder, changes the namespace."""
    scales, experts = tmp_path / "scales.json", tmp_path / "experts"
    experts.mkdir()
    arguments = {"model": {"quantization_param_path": str(scales)}, "exec.moe": {"kt_weight_path": str(experts)}}
    for content in (b"1", b"2"):
        scales.write_bytes(content)
        assert pages_found(server, arguments) == 0
        (experts / "0.safetensors").write_bytes(content)
        assert pages_found(server, arguments) == 0
        store_pages(server, arguments)
        assert pages_found(server, arguments) == 6


def test_words_that_are_also_files(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the name of a value is no part of the namespace. Relative paths are."""
    monkeypatch.chdir(tmp_path)
    arguments = {
        "exec.mamba": {"mamba_backend": "triton"},
        "model": {"quantization_param_path": "scales.json"},
        "exec.moe": {"kt_weight_path": "experts"},
    }
    store_pages(server, arguments)
    Path("triton").mkdir()
    assert pages_found(server, arguments) == 6
    for path in (Path("scales.json"), Path("experts")):
        path.write_text("{}")
        assert pages_found(server, arguments) == 0
        path.unlink()


def test_a_value_of_an_unknown_type_disables_the_storage(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text could contain an address, which differs between processes."""
    assert pages_found(server, {"exec.new": {"path": Path("/a"), "dtype": torch.float16}}) == 0
    assert "the storage is disabled" not in caplog.text
    assert pages_found(server, {"exec.new": {"new": object()}}) == 0
    assert "the storage is disabled" in caplog.text
    assert "unknown type: object" in caplog.text


def test_adapters_that_sglang_ignores(server: ServerProcess, tmp_path: Path) -> None:
    """With `--enable-lora false` SGLang does not even parse the adapters."""
    store_pages(server, {"lora": {"enable_lora": False, "lora_paths": [f"one={tmp_path}"]}})
    assert pages_found(server, {}) == 6


def test_an_unreadable_adapter_disables_the_storage(
    server: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the adapter's files its content is unknown. The warning names the adapter."""
    assert pages_found(server, adapters(tmp_path / "absent")) == 0
    assert "the storage is disabled" in caplog.text
    assert "cannot identify the LoRA adapter 'absent'" in caplog.text
