"""Hand-offs of a model with state-space layers: an engine continues from the last held state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import question
from conversation_client import ConversationClient
from conversations import LONG, TURNS, ExpectedAnswers, held_by_decode, prompt_tokens
from deployment import Deployment
from engine_server import Sources
from memory_pressure import fill_server_memory
from scenario import BLOCK, RunEngine
from tiny_models import make_state, make_tokenizer

SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": BLOCK, "max_num_seqs": 4}
"""A step of Mamba2 covers at most one block, as in test_vllm_state."""

NAMES = ("emptied caches", "under pressure", "left decoding")


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> ExpectedAnswers:
    """Answers of an engine of this model without a connector."""
    return ExpectedAnswers(run_engine, NAMES, model="state", **SETTINGS)


@pytest.fixture(scope="module")
def _deployment(reference: ExpectedAnswers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    del reference  # its engine has ended by now
    folder = tmp_path_factory.mktemp("state")
    make_state(folder / "model")
    make_tokenizer(folder / "model")
    flags = (part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value)))
    deployment = Deployment(folder, folder / "model", *flags)
    try:
        yield deployment
    finally:
        deployment.end()


def _state_before(tokens: int) -> int:
    """Returns after how many tokens the last state of whole blocks before a prompt's end is."""
    return (tokens - 1) // BLOCK * BLOCK


def _assert_turn(talk: ConversationClient, name: str, turn: int) -> None:
    """Asks a turn. P computes the new tokens only, and D what follows the last state at a block."""
    moved = talk.turn(name, turn)
    prompt = prompt_tokens(turn)
    from_decode = held_by_decode(turn - 1) if turn > 1 else 0
    assert moved.p == Sources(prompt - from_decode, 0, from_decode), turn
    assert moved.d == Sources(prompt - _state_before(prompt), 0, _state_before(prompt)), turn
    assert moved.pulled == (moved.p.external, moved.d.external), "all of it comes from the holds"
    assert moved.to_decode["claimed"] == moved.to_decode["released"] == 1
    assert moved.to_prefill["published"] == 1
    assert moved.to_prefill["claimed"] == moved.to_prefill["released"] == int(turn > 1)


def test_both_directions(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.17 Three turns: the answers are those of one engine that computes all alone."""
    for turn in TURNS:
        deployment.empty()
        _assert_turn(talk, "emptied caches", turn)
    deployment.assert_idle()


def test_a_held_state_is_not_evicted(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.17 Other requests fill the server's memory between two turns."""
    talk.turn("under pressure", 1)
    deployment.empty()
    fill_server_memory(deployment.server)
    _assert_turn(talk, "under pressure", 2)


def test_an_aborted_answer_leaves_nothing_held(
    deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient
) -> None:
    """B2.16 P's hold has ended, and D holds nothing of an incomplete answer."""
    body = question(reference.prompt("left decoding", 1), LONG // 4, conversation_id="left decoding")
    deployment.abort_answer(body)
    talk.turn("left decoding", 1)
