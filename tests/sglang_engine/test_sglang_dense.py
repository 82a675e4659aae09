"""A dense model in SGLang: engines share pages through kvtier, as through SGLang's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK, assert_same, generate, tokens
from server_process import ServerProcess
from sglang_scenario import FORGET, RunSglang, file_storage, hits, kvtier_storage, opened, stored

PROMPTS = [tokens(11, 1000), tokens(12, 20 * BLOCK + 1), tokens(13, 12 * BLOCK)]
HALF = PROMPTS[0][: 16 * BLOCK] + tokens(21, 100)
PAGES = [len(prompt) // BLOCK for prompt in PROMPTS]
QUESTIONS = [generate("base", PROMPTS), FORGET, generate("half", [HALF])]


@pytest.fixture(scope="module")
def reference(run_sglang: RunSglang) -> dict[str, Any]:
    """Answers of an engine without HiCache."""
    return run_sglang(QUESTIONS)


@pytest.fixture(scope="module")
def first(run_sglang: RunSglang, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty server. It also clears the storage at its end."""
    server.start()
    steps = [
        opened(server),
        QUESTIONS[0],
        stored(server, sum(PAGES)),
        FORGET,
        generate("again", PROMPTS),
        {"op": "clear"},
        opened(server),
        FORGET,
        generate("cleared", PROMPTS[:1]),
        stored(server, sum(PAGES) + PAGES[0]),
        FORGET,
        generate("refilled", PROMPTS[:1]),
    ]
    return run_sglang(steps, kvtier_storage(server.endpoint))


@pytest.fixture(scope="module")
def second(run_sglang: RunSglang, server: ServerProcess, first: dict[str, Any]) -> dict[str, Any]:
    """Another engine, after a SIGKILL of the server."""
    assert first["again"]
    server.kill()
    server.start()
    return run_sglang([opened(server), *QUESTIONS], kvtier_storage(server.endpoint))


def test_storing_changes_no_answer(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """An engine with an empty server answers like one without HiCache, and finds nothing."""
    assert_same(reference["base"], first["base"])
    assert [row["storage"] for row in first["base"]["rows"]] == [0, 0, 0]
    assert "kvtier: namespace" in first["log"]


def test_the_same_engine_finds_its_pages(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """After SGLang has dropped its device and host caches, the pages come from kvtier."""
    assert_same(reference["base"], first["again"])
    assert [row["storage"] for row in first["again"]["rows"]] == list(map(hits, PROMPTS))


def test_another_engine_finds_all_after_a_sigkill_of_the_server(
    reference: dict[str, Any], second: dict[str, Any]
) -> None:
    """992 of 1,000 tokens are loaded from the disk of the server; the answers are the same."""
    assert_same(reference["base"], second["base"])
    assert [row["storage"] for row in second["base"]["rows"]] == list(map(hits, PROMPTS))
    assert second["base"]["rows"][0]["cached"] == 992


def test_a_common_prefix_is_found(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """Whole pages of a common prefix hit."""
    assert_same(reference["half"], second["half"])
    assert second["half"]["rows"][0]["storage"] == 16 * BLOCK


def test_clearing_the_storage(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """After `/clear_hicache_storage_backend` nothing is found, and what is stored then is found."""
    for name, storage in (("cleared", 0), ("refilled", hits(PROMPTS[0]))):
        assert_same({"rows": reference["base"]["rows"][:1]}, first[name])
        assert first[name]["rows"][0]["storage"] == storage


def test_as_sglangs_own_files(run_sglang: RunSglang, reference: dict[str, Any], tmp_path: Path) -> None:
    """SGLang's back end `file` finds as many tokens as kvtier in the same steps."""
    steps = [
        QUESTIONS[0],
        {"op": "files", "folder": str(tmp_path), "count": sum(PAGES)},
        FORGET,
        generate("again", PROMPTS),
    ]
    files = run_sglang(steps, file_storage(str(tmp_path)))
    assert_same(reference["base"], files["again"])
    assert [row["storage"] for row in files["again"]["rows"]] == list(map(hits, PROMPTS))
