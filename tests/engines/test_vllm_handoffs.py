"""Requests that vLLM's connector hands on, and goes on with: both its halves over real servers, without an engine (BEHAVIOUR B2)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handoff_engine import BLOCK, FIRST_TURN, ToyEngine, ToyRequest
from server_process import ServerProcess

from kvtier.client.engines.vllm.config import ConnectorConfig

PROMPT = list(range(100, 100 + 6 * BLOCK + 3))
BOTH_WAYS = ConnectorConfig(bidirectional_kv_xfer=True, kv_recompute_threshold=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "64MiB")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def engines(server: ServerProcess) -> Iterator[tuple[ToyEngine, ToyEngine]]:
    """A prefill and a decode engine of one server; at the end nothing is left of their requests."""
    prefill = ToyEngine(server.endpoint, "P", BOTH_WAYS)
    decode = ToyEngine(server.endpoint, "D", BOTH_WAYS)
    yield prefill, decode
    prefill.close()
    decode.close()


def holds_of(server: ServerProcess) -> list[str]:
    """Returns the names of what is held."""
    command = [Path(sys.executable).with_name("kvtier"), "handoffs", "--json", "--endpoint", server.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [hold["request_id"] for hold in json.loads(done.stdout)["handoffs"]]


def test_a_conversation_of_three_turns(server: ServerProcess, engines: tuple[ToyEngine, ToyEngine]) -> None:
    """B2.2, B2.3, B2.6, B2.10, B2.18: each engine computes only what no one has computed, parts of blocks included."""
    prefill, decode = engines
    tokens, params = list(PROMPT), dict(FIRST_TURN)
    for number in range(3):
        first = prefill.run(tokens, params)
        assert first.computed == len(tokens) - (0 if number == 0 else len(tokens) - 5 - 1)
        assert first.params is not None
        second = decode.run(tokens, first.params, 10)
        assert second.computed == 9, "the last token has no KV yet"
        assert second.params is not None
        params, tokens = second.params, second.tokens + [7, 7, 7, 7, 7]
    counts = prefill.counts()
    assert (counts["claims:granted"], counts["publications:published"]) == (2, 3)
    assert counts["pull_tokens"] == sum(len(PROMPT) + 9 + 15 * turn for turn in range(2))
    assert counts["pull_blocks:pulled"] == sum(-(-(len(PROMPT) + 9 + 15 * turn) // BLOCK) for turn in range(2))
    assert holds_of(server) == [params["remote_request_id"]], "the others were released by who pulled them"
