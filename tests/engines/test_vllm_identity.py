"""Model files that change at the same path between two engines: no KV of the old files is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens, wait_until_durable
from server_process import ServerProcess

PROMPTS = [tokens(81, 8 * BLOCK), tokens(82, 5 * BLOCK + 3)]
STEPS = [{"op": "lookup"}, generate("answers", PROMPTS)]
"""A lookup shows that the engine has a namespace; before that, every request is a miss."""


@pytest.fixture(scope="module")
def model(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model at a path of its own, so that tests can change its files."""
    folder = tmp_path_factory.mktemp("identity") / "model"
    shutil.copytree(models / "dense", folder)
    return folder


def change_last_layer(model: Path) -> None:
    """Writes other weights of one layer into the file, with the old size and time."""
    path = model / "model.safetensors"
    status, weights = path.stat(), load_file(path)
    name = "model.layers.3.self_attn.k_proj.weight"
    weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, model / "new", metadata={"format": "pt"})
    content = (model / "new").read_bytes()
    (model / "new").unlink()
    assert len(content) == status.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_rotation(model: Path) -> None:
    """Changes how the model encodes positions, in a file without weights."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 90000.0}
    path.write_text(json.dumps(config))


def test_an_engine_finds_no_kv_of_other_files(run_engine: RunEngine, server: ServerProcess, model: Path) -> None:
    """One layer's weights, then the configuration; blocks of the old files are in LMDB."""
    server.start()
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for change in (lambda _: None, change_last_layer, change_rotation):
        change(model)
        first = run_engine(STEPS, endpoint=server.endpoint, model=str(model))["answers"]
        wait_until_durable(server)
        server.kill()
        server.start()
        found.append((first, run_engine(STEPS, endpoint=server.endpoint, model=str(model))["answers"]))
    for first, second in found:
        assert first["external_hits"] == 0
        assert second["external_hits"] == hit_limit(PROMPTS)
        assert_same(first, second)
    answers = [[row["logprobs"] for row in first["rows"]] for first, _ in found]
    assert answers[0] != answers[1] != answers[2]
