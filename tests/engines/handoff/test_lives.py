"""Restarts between two turns: answers stay right, and holds outlive the engines that made them."""

from __future__ import annotations

import pytest
from calls import CallError, Stream, question
from conversation_client import ConversationClient
from conversations import LONG, ExpectedAnswers, held_by_decode, local_blocks, prompt_tokens
from deployment import Deployment
from engine_server import Sources

PULLED = Sources(prompt_tokens(2) - held_by_decode(1), 0, held_by_decode(1))


def test_engines_that_are_killed(deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient) -> None:
    """D is killed between two turns, then P: P still pulls D's hold, also after its own restart.

    A client that reads an answer at that moment sees the connection end.
    """
    talk.turn("decode killed", 1)
    talk.turn("prefill killed", 1)
    deployment.p.empty()
    body = question(reference.prompt("decode interrupted", 1), LONG, conversation_id="decode interrupted")
    with Stream(deployment.proxy.port, body) as stream:
        pieces = stream.pieces()
        next(pieces)
        deployment.d.kill()
        with pytest.raises(CallError, match="502"):
            list(pieces)
    with deployment.watch(d=0, published=1, ended=1) as moved, pytest.raises(CallError, match="502"):
        talk.ask_proxy("decode killed", 2)
    assert moved.p == PULLED
    assert moved.to_prefill["claimed"] == 1
    with deployment.proxy_of([deployment.p], [deployment.d, deployment.p]) as proxy:
        talk.ask_proxy("not decoded", 1, proxy=proxy)
        talk.ask_proxy("not decoded", 2, proxy=proxy)
    deployment.p.kill()
    deployment.restart_stopped()
    moved = talk.turn("prefill killed", 2)
    assert moved.p == PULLED
    assert moved.d == Sources(0, 0, prompt_tokens(2))
    talk.turn("decode killed", 2, reuses=False)
    deployment.wait_for_decodes()
    deployment.assert_idle()


def test_a_proxy_that_is_killed(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.24 A new proxy has no holds: P loads the previous turn, but its last block."""
    talk.turn("proxy killed", 1)
    deployment.proxy.kill()
    deployment.restart_stopped()
    deployment.empty()
    moved = talk.turn("proxy killed", 2, reuses=False)
    cached = local_blocks(held_by_decode(1))
    assert moved.p == Sources(prompt_tokens(2) - cached, 0, cached)
    deployment.empty()
    moved = talk.turn("proxy killed", 3)
    assert moved.p == Sources(prompt_tokens(3) - held_by_decode(2), 0, held_by_decode(2))


def test_a_server_that_is_killed(deployment: Deployment, talk: ConversationClient) -> None:
    """Without a server all engines compute. A new server has no holds, and is used at once."""
    talk.turn("server killed", 1)
    deployment.server.kill()
    talk.ask_proxy("server killed", 2)
    deployment.restart_server()
    talk.ask_proxy("server killed", 3)
    assert deployment.totals("to_prefill")["claimed"] == 0, "the second turn was not published"
    for turn in (1, 2):
        deployment.empty()
        moved = talk.turn("after the server", turn)
    assert moved.p == PULLED
    deployment.assert_idle()
