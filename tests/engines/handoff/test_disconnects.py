"""Disconnecting clients and refused requests leave no held blocks."""

from __future__ import annotations

from typing import Any

import pytest
from calls import CallError, Stream, ask, question, row
from conversation_client import ConversationClient
from conversations import FIRST, LONG, SAID, ExpectedAnswers
from deployment import Deployment, eventually
from engine_server import Sources


@pytest.fixture
def held_before(deployment: Deployment) -> int:
    """D's holds before: each is the end of a conversation."""
    return deployment.totals("to_prefill")["open"]


def _prefilled(deployment: Deployment, reference: ExpectedAnswers, name: str) -> dict[str, Any]:
    """Lets P compute a first turn; returns its parameters for D."""
    body = question(reference.prompt(name, 1), 1, kv_transfer_params={"do_remote_decode": True})
    with deployment.watch(d=0, published=1) as moved:
        params: dict[str, Any] = ask(deployment.p.port, body)["kv_transfer_params"]
    assert moved.holds("to_decode") == {"open": 1, "published": 1}
    return params


def _released(deployment: Deployment, before: dict[str, int]) -> bool:
    """Whether one of P's holds was released since, and did not expire."""
    return deployment.totals("to_decode")["released"] == before["released"] + 1


def test_leaving_in_the_middle_of_an_answer(
    deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient
) -> None:
    """B2.16 The proxy aborts D, D holds nothing of an incomplete answer, and P's hold has ended."""
    body = question(reference.prompt("left decoding", 1), LONG, conversation_id="left decoding")
    deployment.abort_answer(body)
    talk.turn("left decoding", 1)


def test_leaving_while_the_decode_engine_is_busy(
    deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient, held_before: int
) -> None:
    """B2.14 A request that never reached D: P's hold is released."""
    params = _prefilled(deployment, reference, "left waiting")
    before = deployment.totals("to_decode")
    body = question(reference.prompt("left waiting", 1), SAID, kv_transfer_params=params)
    known = deployment.d.log.count("Added request")
    deployment.d.pause()
    try:
        with Stream(deployment.d.port, body) as stream:
            stream.send()
            deployment.d.wait_logged("Added request", known + 1)
        eventually(lambda: _released(deployment, before), "P's request is still held")
    finally:
        deployment.d.resume()
    assert deployment.totals("to_decode")["claimed"] == before["claimed"]
    deployment.assert_idle(to_prefill=held_before)
    talk.turn("left waiting", 1)


def test_leaving_while_the_prefill_engine_is_busy(
    deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient, held_before: int
) -> None:
    """B2.14, B2.21 A second turn that never reached P: D's hold is released."""
    name = "left before prefill"
    talk.turn(name, 1)
    known = deployment.p.log.count("Added request")
    deployment.p.pause()
    try:
        with Stream(deployment.proxy.port, question(reference.prompt(name, 2), SAID, conversation_id=name)) as stream:
            stream.send()
            deployment.p.wait_logged("Added request", known + 1)
        eventually(lambda: deployment.totals("to_prefill")["open"] == held_before, "D's request is still held")
    finally:
        deployment.p.resume()
    deployment.assert_idle(to_prefill=held_before)
    talk.turn(name, 2, reuses=False)


def test_leaving_while_a_claim_waits(deployment: Deployment, reference: ExpectedAnswers, held_before: int) -> None:
    """B2.14 A request that was never published is waited for, then computed."""
    name, own = "never published", {"do_remote_prefill": True, "do_remote_decode": False}
    remote = {"block_ids": [[0]], "engine_id": "unknown", "request_id": "never", "num_tokens": FIRST, "port": 0}
    host = {"remote_host": deployment.server.endpoint}
    params = {**own, **host, **{f"remote_{part}": value for part, value in remote.items()}}
    known = deployment.d.log.count("Added request")
    with Stream(deployment.d.port, question(reference.prompt(name, 1), LONG, kv_transfer_params=params)) as stream:
        stream.send()
        deployment.d.wait_logged("Added request", known + 1)
    with deployment.watch(p=0, published=1) as moved:
        answer = ask(deployment.d.port, question(reference.prompt(name, 1), SAID, kv_transfer_params=params))
    reference.check(name, 1, row(answer))
    assert moved.holds("to_decode") == {}
    assert moved.d == Sources(FIRST, 0, 0)
    deployment.assert_idle(to_prefill=held_before + 1)


def test_a_request_that_is_refused(deployment: Deployment, reference: ExpectedAnswers, held_before: int) -> None:
    """B2.14 A decode engine that refuses a request with 400 releases P's hold."""
    params = _prefilled(deployment, reference, "refused")
    before = deployment.totals("to_decode")
    with pytest.raises(CallError) as refusal:
        ask(deployment.d.port, question(reference.prompt("refused", 1), 100_000, kv_transfer_params=params))
    assert refusal.value.status == 400
    eventually(lambda: _released(deployment, before), "P's request is still held")
    deployment.assert_idle(to_prefill=held_before)
