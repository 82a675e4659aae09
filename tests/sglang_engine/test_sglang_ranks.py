"""Two tensor parallel ranks in SGLang: each stores and loads its own part of each page."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, assert_same, generate, tokens
from server_process import ServerProcess
from sglang_scenario import FORGET, RunSglang, hits, kvtier_storage, opened, stored

PROMPTS = [tokens(11, 1000), tokens(12, 20 * BLOCK + 1)]
PAGES = [len(prompt) // BLOCK for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(run_sglang: RunSglang) -> dict[str, Any]:
    """Answers of an engine with one rank, without HiCache."""
    return run_sglang([generate("base", PROMPTS)])


@pytest.fixture(scope="module")
def first(run_sglang: RunSglang, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty server. It also clears the storage."""
    server.start()
    steps = [
        opened(server, 2),
        generate("base", PROMPTS),
        stored(server, sum(PAGES)),
        {"op": "clear"},
        opened(server, 2),
        FORGET,
        generate("cleared", PROMPTS[:1]),
        stored(server, sum(PAGES) + PAGES[0]),
        FORGET,
        generate("refilled", PROMPTS[:1]),
    ]
    return run_sglang(steps, kvtier_storage(server.endpoint), tp_size=2)


def test_another_engine_finds_all_parts(
    run_sglang: RunSglang, server: ServerProcess, reference: dict[str, Any], first: dict[str, Any]
) -> None:
    """After a SIGKILL of the server both ranks of another engine load their parts."""
    assert_same(reference["base"], first["base"])
    server.kill()
    server.start()
    second = run_sglang([opened(server, 2), generate("base", PROMPTS)], kvtier_storage(server.endpoint), tp_size=2)
    assert_same(reference["base"], second["base"])
    assert [row["storage"] for row in second["base"]["rows"]] == list(map(hits, PROMPTS))


def test_ranks_clear_into_the_same_namespace(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """After a clear nothing is found, and then the parts that both ranks have stored since."""
    for name, storage in (("cleared", 0), ("refilled", hits(PROMPTS[0]))):
        assert_same({"rows": reference["base"]["rows"][:1]}, first[name])
        assert first[name]["rows"][0]["storage"] == storage
