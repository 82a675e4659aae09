"""Prefill and decode engines of different tensor parallelism, with one server and `kv_parts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens
from server_process import ServerProcess

ASKED = [tokens(71, 10 * BLOCK + 13), tokens(72, 5 * BLOCK)]
DECODE = {"max_tokens": 24}
PREFILLS = [{"do_remote_decode": True}] * len(ASKED)
EXTRA = {"kv_parts": 2, "claim_timeout_s": 60.0, "kv_lease_duration": 900.0}
"""The first engine's holds last until the second engine has started."""


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, region="64MiB", long_timeout=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> dict[str, Any]:
    """The answers of an engine without a connector."""
    return run_engine([generate("alone", ASKED, **DECODE)])["alone"]  # type: ignore[no-any-return]


def _engine(server: ServerProcess, ranks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"endpoint": server.endpoint, "extra": EXTRA}
    if ranks > 1:
        # Ranks are spawned and bound to cores.
        settings |= {"tensor_parallel_size": ranks, "bind": "|".join(map(str, range(ranks))), "afresh": True}
    return settings


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_a_decode_engine_continues_a_prefill_engine_of_another_size(
    run_engine: RunEngine, fresh_server: ServerProcess, reference: dict[str, Any], prefill: int, decode: int
) -> None:
    """The decode engine pulls all tokens, and later finds the whole blocks in the cache."""
    of_p = run_engine([generate("P", ASKED, transfers=PREFILLS, max_tokens=1)], **_engine(fresh_server, prefill))
    assert of_p["P"]["external_hits"] == 0
    steps = [
        generate("D", ASKED, transfers=[row["transfer"] for row in of_p["P"]["rows"]], **DECODE),
        {"op": "reset"},
        generate("again", ASKED, **DECODE),
    ]
    of_d = run_engine(steps, **_engine(fresh_server, decode))
    assert of_d["D"]["external_hits"] == sum(map(len, ASKED))
    assert of_d["again"]["external_hits"] == hit_limit(ASKED)
    assert_same(reference, of_d["D"])
    assert_same(reference, of_d["again"])
