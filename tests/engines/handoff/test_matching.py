"""How many of another engine's tokens a real engine pulls."""

from __future__ import annotations

import pytest
from calls import ask, question, row
from conversation_client import ConversationClient
from conversations import FIRST, SAID, ExpectedAnswers, held_by_decode, local_blocks, prompt_tokens
from deployment import Deployment
from engine_server import Sources
from scenario import assert_same

DECODES = {"do_remote_prefill": True}
"""For a D without parameters of P, which holds what it computes."""


@pytest.mark.parametrize(("held", "pulled"), [(63, 0), (64, 64)])
def test_few_tokens_are_computed(deployment: Deployment, talk: ConversationClient, held: int, pulled: int) -> None:
    """B2.3, B2.4 Below the threshold of 64 tokens P pulls nothing, and D's hold ends.

    Whole blocks are loaded from the cache in both cases.
    """
    name = str(held)
    with deployment.watch(p=0, published=1):
        of_d = talk.direct("D", name, 1, DECODES, max_tokens=1, cut=held)
    assert (of_d["do_remote_decode"], of_d["remote_num_tokens"]) == (True, held)
    with deployment.watch(d=0, published=1, ended=1) as moved:
        of_p = talk.direct("P", name, 1, of_d, max_tokens=1)
    assert moved.p == Sources(FIRST - local_blocks(held), 0, local_blocks(held))
    assert moved.pulled == (pulled, 0)
    assert (moved.to_prefill["claimed"], moved.to_prefill["released"]) == (int(pulled > 0), 1)
    assert (of_p["do_remote_prefill"], of_p["remote_num_tokens"]) == (True, FIRST)
    with deployment.watch(p=0, published=1, ended=1) as moved:
        talk.direct("D", name, 1, of_p)
    assert moved.d == Sources(0, local_blocks(held), FIRST - local_blocks(held))
    assert moved.pulled == (0, FIRST - local_blocks(held)), "a decode engine pulls any number"


def test_a_prompt_that_is_shorter_than_what_is_held(
    deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient
) -> None:
    """B2.6 If a hold is longer than the prompt, only whole blocks are pulled."""
    deployment.empty()
    with deployment.watch(p=0, published=1):
        params = talk.direct("D", "shorter", 1, DECODES)
    assert params is not None
    short = held_by_decode(1) - 20
    body = question(reference.prompt("shorter", 2)[:short], SAID)
    with deployment.watch(d=0, ended=1) as moved:
        taken = row(ask(deployment.p.port, body | {"kv_transfer_params": {**params, "kvtier": {"skip_save": True}}}))
    assert moved.p == Sources(short - local_blocks(short), 0, local_blocks(short))
    assert moved.pulled == (local_blocks(short), 0)
    computed = row(ask(deployment.p.port, body | {"cache_salt": "another one's"}))
    assert_same({"rows": [computed]}, {"name": "shorter", "rows": [taken]})


def test_parameters_of_another_conversation(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.6 A proxy that mixes up conversations wastes time only: P compares the tokens."""
    deployment.empty()
    with deployment.watch(p=0, published=1):
        params = talk.direct("D", "mixed up", 1, DECODES)
    assert params is not None
    with deployment.watch(d=0, ended=1) as moved:
        talk.direct("P", "another one", 2, {**params, "kvtier": {"hold": False}})
    assert moved.pulled == (0, 0)
    assert moved.p == Sources(prompt_tokens(2), 0, 0)
    assert moved.to_prefill["released"] == 1


def test_conversations_of_different_salts(deployment: Deployment, talk: ConversationClient) -> None:
    """A salt separates conversations, also in the last block."""
    for turn, computed in ((1, FIRST), (2, prompt_tokens(2) - held_by_decode(1))):
        deployment.empty()
        moved = talk.turn("salted", turn, cache_salt="tenant-x")
        assert moved.p.computed == computed
        assert moved.pulled == (moved.p.external, moved.d.external)
    deployment.empty()
    moved = talk.turn("salted", 3, cache_salt="tenant-y")
    assert moved.p == Sources(prompt_tokens(3), 0, 0)
