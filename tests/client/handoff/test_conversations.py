"""Conversations between engines that hand over requests: computed tokens, and never wrong KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.server_process import MIB, ServerProcess
from peers import FULL, WINDOW
from toy_engine import NAMESPACE, WINDOWED, ToyEngine

from kvtier.client import Client, Timeouts
from kvtier.client.handoff import FinishReason
from kvtier.client.testing import FakeServer

FIRST_TURN = {"do_remote_decode": True, "remote_block_ids": None, "remote_engine_id": None, "remote_request_id": None}


@pytest.fixture(params=["fake", "shm", "grpc"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ToyEngine]]:
    """Creates engines of one server, a fake or a real one."""
    clients: list[Client] = []

    def make(engine_id: str, **options: Any) -> ToyEngine:
        clients.append(connect(engine_id))
        return ToyEngine(clients[-1], **options)

    if request.param == "fake":
        fake = FakeServer()

        def connect(engine_id: str) -> Client:
            return fake.client(NAMESPACE, engine_id=engine_id)

        yield make
        assert not fake._leases
    else:
        with ServerProcess(tmp_path, region=64 * MIB).start() as server:

            def connect(engine_id: str) -> Client:
                client = Client(
                    server.endpoint,
                    namespace=NAMESPACE,
                    engine_id=engine_id,
                    transport=request.param,
                    timeouts=Timeouts(connect=60, call=60),
                )
                client.wait_until_connected()
                return client

            yield make
            status = server.status()
            assert (status.leases, status.stores) == (0, 0)
    for client in clients:
        client.close()


def test_a_conversation_of_three_turns(engine: Callable[..., ToyEngine]) -> None:
    """B2.2 B2.3 B2.18: decode computes its output, and prefill only the user's new tokens."""
    prefill, decode = engine("prefill"), engine("decode")
    tokens, params = list(range(200)), FIRST_TURN
    computed = []
    for turn in range(3):
        first = prefill.run(tokens, params, 0)
        assert first.params is not None
        second = decode.run(tokens, first.params, 50)
        assert second.params is not None
        computed.append((first.computed, second.computed))
        # The last token of the answer was not computed: prefill computes it too.
        tokens, params = second.tokens + list(range(1000 * turn, 1000 * turn + 30)), second.params
    assert computed == [(200, 49), (31, 49), (31, 49)]
    assert prefill.server.log == decode.server.log == []


@pytest.mark.parametrize("tokens", range(97, 113))
def test_a_prompt_of_any_length_is_handed_over(tokens: int) -> None:
    """B2.2: with windows too: whole, or without the last block if its token needs more context."""
    server = FakeServer()
    prefill = ToyEngine(server.client(WINDOWED, engine_id="prefill"), WINDOW)
    decode = ToyEngine(server.client(WINDOWED, engine_id="decode"), WINDOW)
    first = prefill.run(range(tokens), FIRST_TURN, 0)
    assert decode.run(range(tokens), first.params, 10).pulled == (96 if tokens == 104 else tokens)


def test_without_the_feature_only_prefill_to_decode_works(engine: Callable[..., ToyEngine]) -> None:
    """B2.7 B2.15: decode engines return no parameters."""
    prefill, decode = engine("prefill"), engine("decode")
    for side in (prefill, decode):
        object.__setattr__(side.core._options, "bidirectional_kv_xfer", False)
    first = prefill.run(range(100), FIRST_TURN, 0)
    second = decode.run(range(100), first.params, 10)
    assert (second.pulled, second.params) == (100, None)


def test_aborted_requests_leave_nothing_held() -> None:
    """B2.14 B2.16: on both sides, at any time."""
    server = FakeServer()
    prefill = ToyEngine(server.client(NAMESPACE, engine_id="prefill"))
    decode = ToyEngine(server.client(NAMESPACE, engine_id="decode"))
    for scheduled in (False, True):
        first = prefill.run(range(100), FIRST_TURN, 0)
        assert server._holds.pinned()
        assert decode.run(range(100), first.params, 10, reason=FinishReason.OTHER, scheduled=scheduled).params is None
        assert not server._holds.pinned()
    assert prefill.run(range(100), FIRST_TURN, 0, reason=FinishReason.OTHER).params is None
    assert not server._holds.pinned()
    assert not server._leases


def test_the_partial_last_block_ends_with_its_hold() -> None:
    """B2.6: after the next turn blocks without a hash are removed; others stay cached."""
    server = FakeServer()
    prefill = ToyEngine(server.client(NAMESPACE, engine_id="prefill"))
    decode = ToyEngine(server.client(NAMESPACE, engine_id="decode"))
    first = prefill.run(range(100), FIRST_TURN, 0)
    assert len(server._blocks) == 7
    second = decode.run(range(100), first.params, 1)
    assert len(server._blocks) == 7, "six full ones, and the tail of decode's"
    prefill.run([*second.tokens, *range(200)], second.params, 0, reason=FinishReason.OTHER)
    assert all(len(key) == 36 for _, key in server._blocks)


class Chaos:
    """Conversations with a failing server and a proxy that mixes up parameters."""

    def __init__(self, seed: int, *, windowed: bool = False) -> None:
        self.rng = random.Random(seed)
        self.server = FakeServer()
        threshold = self.rng.choice([0, 64])
        namespace, geometry = (WINDOWED, WINDOW) if windowed else (NAMESPACE, FULL)
        self.engines = [
            ToyEngine(self.server.client(namespace, engine_id=name), geometry, kv_recompute_threshold=threshold)
            for name in ("p1", "p2", "d1", "d2")
        ]
        self.answers: list[tuple[list[int], Any]] = [(self._words(), FIRST_TURN)]
        self.pulled = 0

    def step(self) -> None:
        """Runs one random turn, with or without a fault."""
        rng = self.rng
        self._disturb()
        tokens, params = rng.choice(self.answers[-6:])
        if rng.random() < 0.15:
            params = rng.choice(self.answers)[1]
        if isinstance(params, dict) and rng.random() < 0.1:
            params = {key: value for key, value in params.items() if rng.random() < 0.8}
        is_prefill = bool(params and params.get("do_remote_decode"))
        if is_prefill:
            tokens = tokens + self._words() if rng.random() < 0.9 else tokens[: rng.randrange(1, len(tokens) + 1)]
        engine = rng.choice(self.engines[:2] if is_prefill else self.engines[2:])
        turn = engine.run(
            tokens,
            params,
            0 if is_prefill else rng.randrange(1, 60),
            reason=rng.choice([FinishReason.STOPPED, FinishReason.LENGTH, FinishReason.STOPPED, FinishReason.OTHER]),
            saves=rng.random() < 0.9,
            scheduled=rng.random() < 0.9,
        )
        self.pulled += turn.pulled
        if turn.params is not None and len(turn.tokens) < 1500:
            self.answers.append((turn.tokens, turn.params))
        else:
            self.answers.append((self._words(), FIRST_TURN))

    def _words(self) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.choice([5, 40, 150]))]

    def _disturb(self) -> None:
        luck = self.rng.random()
        if luck < 0.05:
            self.server.forget()
        elif luck < 0.08:
            self.server.expire_holds()
        elif luck < 0.1:
            self.server.restart()
        self.server.decline_holds(0.1 < luck < 0.15)
        self.server.down = 0.15 < luck < 0.18


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("first", range(0, 40, 20))
def test_no_token_is_ever_computed_from_wrong_kv(first: int, *, windowed: bool) -> None:
    """B2.6 B2.10 B2.12 B2.19: under all failures; no lease is leaked."""
    pulled = 0
    for seed in range(first, first + 20):
        chaos = Chaos(seed, windowed=windowed)
        for _ in range(60):
            chaos.step()
        assert not chaos.server._leases
        cores = [engine.core for engine in chaos.engines]
        assert not any(core.pending or core._requests or core._claims._states for core in cores), seed
        pulled += chaos.pulled
    assert pulled > 20 * 100, "too few pulls to test anything"
