"""Engines share pages only if equal keys mean equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.server_process import ServerProcess
from rig import attach, hashes, kv_pool, rows

KEYS = hashes("prompt", 6)


def adapters(*folders: Path) -> dict[str, Any]:
    """Returns the arguments of an engine that loads these adapters when it starts."""
    paths = [{"lora_id": path.name, "lora_name": path.name, "lora_path": str(path)} for path in folders]
    return {"lora": {"lora_paths": paths}}


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


def test_an_unreadable_adapter_disables_the_storage(
    server: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the adapter's files its content is unknown. The warning names the adapter."""
    assert pages_found(server, adapters(tmp_path / "absent")) == 0
    assert "the storage is disabled" in caplog.text
    assert "cannot identify the LoRA adapter 'absent'" in caplog.text
