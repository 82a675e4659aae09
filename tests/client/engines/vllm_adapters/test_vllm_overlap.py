"""A decode engine pulls blocks while the prefill engine computes others, over a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_engine import BLOCK, FIRST_TURN, ToyEngine, Turn, kv_of
from harness.polling import wait_until
from server_process import ServerProcess

from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.scheduler import hold_calls

PROMPT = list(range(100, 100 + 6 * BLOCK + 3))
NAME = "chosen"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "64MiB")
    process.start()
    yield process
    process.kill()


@pytest.fixture(params=[False, True])
def prefill(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[ToyEngine]:
    """A prefill engine, eager or lazy."""
    engine = ToyEngine(server.endpoint, "P", ConnectorConfig(lazy_offload=request.param))
    yield engine
    engine.close()


class Prefill:
    """A request of the prefill engine that is computed in parts."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        params = FIRST_TURN | {"remote_overlap": True, "kvtier": {"hold_as": NAME}}
        self.request = engine.arrive(PROMPT, params)
        assert engine.match(self.request) == 0
        self.table = [next(engine._blocks) for _ in range(-(-len(PROMPT) // BLOCK))]
        engine.scheduler.blocks_allocated(self.request, [self.table], 0)

    def compute(self, tokens: int) -> None:
        """Computes up to this number of tokens, and stores the full blocks."""
        engine, request = self._engine, self.request
        engine._write(self.table, kv_of(PROMPT[:tokens]))
        engine._tables = {request.request_id: [self.table]}
        engine.step(**{request.request_id: tokens - request.num_computed_tokens})
        request.num_computed_tokens = tokens
        engine._tables = {}

        def is_stored() -> bool:
            engine.step()
            return not engine.scheduler.has_pending_work()

        wait_until(is_stored)

    def end(self, how: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any] | None:
        params = self._engine.end(self.request, self.table, how)
        self._engine.settle()
        return params


class Decode:
    """A decode engine that runs the request in the background."""

    def __init__(self, server: ServerProcess, host: tuple[str, int]) -> None:
        self.engine = ToyEngine(server.endpoint, "D", ConnectorConfig())
        remote = {"engine_id": "P", "request_id": NAME, "host": host[0], "port": host[1], "block_ids": [[0]]}
        params = {"do_remote_prefill": True, "remote_overlap": True}
        params |= {f"remote_{name}": value for name, value in remote.items()}
        self._turns: list[Turn] = []
        self._thread = threading.Thread(target=lambda: self._turns.append(self.engine.run(PROMPT, params, 4)))
        self._thread.start()

    def result(self) -> Turn:
        self._thread.join()
        self.engine.close()
        (turn,) = self._turns
        return turn


@pytest.fixture
def decode(server: ServerProcess, prefill: ToyEngine) -> Decode:
    identity = prefill.scheduler._handoffs._core._identity
    return Decode(server, (identity.host, identity.port))


def _claimed(server: ServerProcess) -> int:
    return sum(row["claimed"] for row in server.handoffs()["totals"])


def test_blocks_are_pulled_while_others_are_computed(server: ServerProcess, prefill: ToyEngine, decode: Decode) -> None:
    """The decode engine claims blocks before the last ones are stored."""
    request = Prefill(prefill)
    assert server.handoffs()["handoffs"][0]["pending_blocks"] == 7
    request.compute(2 * BLOCK)
    wait_until(lambda: _claimed(server) >= 1)
    request.compute(5 * BLOCK + 1)
    wait_until(lambda: _claimed(server) >= 2)
    request.compute(len(PROMPT))
    params = request.end()
    assert params is not None
    assert (params["remote_request_id"], params["remote_num_tokens"]) == (NAME, len(PROMPT))
    assert decode.result().computed == 3, "the answer without its last token"
    assert server.handoffs()["handoffs"] == []
    status = server.status()
    assert (status["leases"], status["stores"]) == (0, 0)


def test_an_aborted_prefill_ends_the_pull(server: ServerProcess, prefill: ToyEngine, decode: Decode) -> None:
    """The decode engine loads the stored blocks and computes the others."""
    request = Prefill(prefill)
    request.compute(3 * BLOCK)
    wait_until(lambda: _claimed(server) >= 1)
    assert request.end("FINISHED_ABORTED") is None
    assert decode.result().computed == len(PROMPT) + 3 - 3 * BLOCK
    assert server.handoffs()["handoffs"] == []
    assert server.status()["leases"] == 0


def test_a_prefill_engine_that_ends(server: ServerProcess, prefill: ToyEngine, decode: Decode) -> None:
    """Its stored blocks stay, and the missing ones are misses at once."""
    request = Prefill(prefill)
    request.compute(3 * BLOCK)
    wait_until(lambda: _claimed(server) >= 1)
    prefill.close()
    assert decode.result().computed == len(PROMPT) + 3 - 3 * BLOCK
    assert server.handoffs()["handoffs"] == []


def test_a_malformed_answer_in_the_middle_of_a_pull(
    server: ServerProcess, prefill: ToyEngine, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull fails, and the decode engine loads the stored blocks."""
    request = Prefill(prefill)
    request.compute(3 * BLOCK)
    wait_until(lambda: _claimed(server) >= 1)

    def fail(lease: object) -> None:
        raise ValueError(f"{lease} is malformed")

    monkeypatch.setattr(hold_calls, "_claimed", fail)
    request.compute(4 * BLOCK)
    assert decode.result().computed < len(PROMPT) + 3
    request.end()


def test_an_answer_that_cannot_be_used(prefill: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core gets the other answers of the step."""
    handoffs, used = prefill.scheduler._handoffs, []

    def claim_ended(number: int, *_: object) -> None:
        if number == 1:
            raise KeyError("usable")
        used.append(number)

    monkeypatch.setattr(handoffs._core, "claim_ended", claim_ended)
    monkeypatch.setattr(handoffs._calls, "answers", lambda: [(number, None, 0.0) for number in (1, 2)])
    handoffs.match("unknown", 0)
    assert used == [2]
