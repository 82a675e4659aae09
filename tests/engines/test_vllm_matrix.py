"""Pairs of models, ranks, modes and transports that test_vllm_dense and _hybrid do not cover."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens, wait_until_durable
from server_process import ServerProcess

BASE = [tokens(81, 12 * BLOCK + 5), tokens(82, 9 * BLOCK)]
FLOOD = [tokens(90 + number, 16 * BLOCK) for number in range(5)]
STEPS = [
    generate("base", BASE),
    {"op": "reset"},
    generate("crowd", [*BASE, BASE[0][: 5 * BLOCK] + FLOOD[0]], at_once=True),
]
POOL_BLOCKS = {"dense": 48, "hybrid": 160}
"""Blocks of a lazy engine: few enough for the flood to evict all, enough for the crowd."""


class Cell(NamedTuple):
    """One configuration of an engine."""

    model: str
    ranks: int
    mode: str
    transport: str

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `run_engine`."""
        settings: dict[str, Any] = {
            "model": self.model,
            "extra": {"transport": self.transport, "lazy_offload": self.mode == "lazy"},
        }
        if self.ranks > 1:
            settings |= {"tensor_parallel_size": self.ranks, "bind": "|".join(map(str, range(self.ranks)))}
        return settings


CELLS = [
    Cell("dense", 1, "lazy", "shm"),
    Cell("dense", 2, "eager", "shm"),
    Cell("hybrid", 2, "lazy", "grpc"),
]


@pytest.fixture(params=CELLS, ids=lambda cell: "-".join(map(str, cell)), scope="module")
def cell(request: pytest.FixtureRequest) -> Cell:
    return Cell(*request.param)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """Answers of engines without a connector, added per model on demand."""
    return {}


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, long_timeout=True)
    server.start()
    yield server
    server.kill()


def test_what_one_engine_stores_another_finds(
    run_engine: RunEngine, references: dict[str, dict[str, Any]], cell: Cell, fresh_server: ServerProcess
) -> None:
    """B4.5 B4.6 B4.7 B4.10 Ranks store, and find all after a SIGKILL of the server; same answers.

    A lazy engine stores what it evicts: a flood of other prompts has it evict the first ones, and
    then it finds them again itself.
    """
    if cell.model not in references:
        references[cell.model] = run_engine(STEPS, model=cell.model)
    reference, server, lazy = references[cell.model], fresh_server, cell.mode == "lazy"
    length = {"max_model_len": 32 * BLOCK}  # part of the namespace
    pool = {"num_gpu_blocks_override": POOL_BLOCKS[cell.model]} if lazy else {}
    steps = [STEPS[0], generate("flood", FLOOD), generate("again", BASE)] if lazy else STEPS[:1]
    afresh = cell.ranks > 1 and not lazy  # ranks are spawned and bound to cores
    first = run_engine(steps, endpoint=server.endpoint, afresh=afresh, **cell.settings, **pool, **length)
    assert f"transport {cell.transport}" in first["log"]
    assert_same(reference["base"], first["base"])
    assert first["base"]["external_hits"] == 0
    if lazy:
        assert_same(reference["base"], first["again"])
        assert first["again"]["external_hits"] >= hit_limit(BASE) // 2
    wait_until_durable(server)
    server.kill()
    server.start()
    second = run_engine(STEPS, endpoint=server.endpoint, **cell.settings, **length)
    assert_same(reference["base"], second["base"])
    assert_same(reference["crowd"], second["crowd"])
    expected = hit_limit(BASE)
    assert second["base"]["external_hits"] == expected or (lazy and second["base"]["external_hits"] >= expected // 2)
