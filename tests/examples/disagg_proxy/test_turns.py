"""Requests of clients, and the bodies for P and D."""

from __future__ import annotations

import json
from typing import Any

import pytest
from disagg_proxy.transfer import first_turn, hold_only
from disagg_proxy.turns import MAX_CONVERSATION_ID, BadRequestError, Turn


def _turn(**body: Any) -> Turn:
    return Turn.parse(json.dumps({"model": "m", "prompt": "hello", **body}).encode(), {})


def test_the_conversation_is_taken_out() -> None:
    """B2.20 `conversation_id` is removed before the request is forwarded, to P and to D."""
    turn = _turn(conversation_id="c1")
    assert turn.conversation_id == "c1"
    for body in (turn.prefill_body(first_turn()), turn.decode_body(None), turn.decode_body(hold_only(), "name")):
        assert "conversation_id" not in body
        assert body["prompt"] == "hello"


@pytest.mark.parametrize("given", [{}, {"conversation_id": None}, {"conversation_id": ""}])
def test_a_turn_may_be_of_no_conversation(given: dict[str, Any]) -> None:
    """B2.20 Missing: no reuse, and no error."""
    assert _turn(**given).conversation_id is None


@pytest.mark.parametrize("given", [7, ["c"], {"id": "c"}, True, "x" * (MAX_CONVERSATION_ID + 1)])
def test_a_conversation_is_named_by_short_text(given: object) -> None:
    """Anything else is the client's error; the length is limited."""
    with pytest.raises(BadRequestError, match="conversation_id"):
        _turn(conversation_id=given)
    assert _turn(conversation_id="x" * MAX_CONVERSATION_ID).conversation_id


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """A body that is not a JSON object is the client's error."""
    with pytest.raises(BadRequestError):
        Turn.parse(raw, {})


@pytest.mark.parametrize("given", [1, 0, "true", []])
def test_whether_to_stream_is_said_plainly(given: object) -> None:
    """Engines accept other values, and the proxy would misread a stream as one answer."""
    with pytest.raises(BadRequestError, match="stream"):
        _turn(stream=given)
    assert not _turn(stream=None).stream
    assert _turn(stream=True).stream


def test_prefill_is_one_token_and_no_stream() -> None:
    """B2.23 Stream off, `max_tokens` 1, and no other limits or `stream_options`."""
    turn = _turn(
        stream=True,
        max_tokens=100,
        max_completion_tokens=90,
        min_tokens=5,
        stream_options={"include_usage": True},
        temperature=0.5,
        stop=["."],
    )
    body = turn.prefill_body(first_turn())
    assert body == {
        "model": "m",
        "prompt": "hello",
        "stream": False,
        "max_tokens": 1,
        "temperature": 0.5,
        "stop": ["."],
        "kv_transfer_params": first_turn(),
    }


def test_decode_gets_what_the_client_wanted() -> None:
    """B2.23 D gets the request unchanged, with its own parameters."""
    turn = _turn(conversation_id="c", stream=True, max_tokens=100, min_tokens=5, max_completion_tokens=90)
    assert turn.decode_body(hold_only()) == {**turn.body, "kv_transfer_params": hold_only()}
    assert turn.decode_body(None) == turn.body


def test_decode_holds_nothing_without_a_conversation() -> None:
    """B2.20 Without a conversation there is no next turn, and a hold would waste memory."""
    turn = _turn(kv_transfer_params={"kvtier": {"retain_for_s": 5}})
    assert turn.decode_body(hold_only())["kv_transfer_params"]["kvtier"] == {"retain_for_s": 5, "hold": False}
    assert _turn().decode_body(None) == _turn().body


def test_a_stream_that_is_to_be_remembered_tells_its_tokens() -> None:
    """D gets the hold's name and must send the usage; other stream options are unchanged."""
    body = _turn(stream=True, stream_options={"continuous_usage_stats": False}).decode_body(hold_only(), "name")
    assert body["kv_transfer_params"]["kvtier"] == {"hold_as": "name"}
    assert body["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}
    assert _turn(stream=True).decode_body(hold_only(), "name")["stream_options"] == {"include_usage": True}


def test_bodies_do_not_share_what_they_change() -> None:
    """P's body is made first; its limit of one token must not appear in D's."""
    turn = _turn(max_tokens=100, stream=True, kv_transfer_params={"kvtier": {"retain_for_s": 5}})
    before = json.dumps(turn.body)
    turn.prefill_body(first_turn())
    turn.decode_body(hold_only(), "name")
    assert json.dumps(turn.body) == before
    assert turn.own == {"kvtier": {"retain_for_s": 5}}


def test_whether_the_client_wants_the_usage_is_its_own_word() -> None:
    """Only a client that asked for the usage gets its chunk."""
    assert _turn(stream=True, stream_options={"include_usage": True}).wants_usage
    assert not _turn(stream=True, stream_options={"include_usage": False}).wants_usage
    assert not _turn(stream=True, stream_options="odd").wants_usage
    assert not _turn(stream=True).wants_usage


def test_clients_do_not_say_whose_blocks_are_pulled() -> None:
    """A client's own parameters are forwarded, except those that name holds."""
    given = {
        "do_remote_decode": True,
        "do_remote_prefill": True,
        "remote_request_id": "other",
        "remote_host": "elsewhere",
        "tp_size": 8,
        "tier": "gold",
        "kvtier": {"hold_as": "other", "retain_for_s": 600},
    }
    turn = _turn(kv_transfer_params=given)
    own = {"tier": "gold", "kvtier": {"retain_for_s": 600}}
    assert turn.prefill_body(first_turn())["kv_transfer_params"] == {**own, **first_turn()}
    assert turn.decode_body(None)["kv_transfer_params"] == own
    named = turn.decode_body(hold_only(), "name")["kv_transfer_params"]
    assert named["kvtier"] == {"retain_for_s": 600, "hold_as": "name"}
    assert named["tier"] == "gold"


@pytest.mark.parametrize("given", ["text", 7, [], {"kvtier": "odd"}, None])
def test_odd_parameters_of_a_client_do_no_harm(given: object) -> None:
    """The engine handles them; the hold is named in any case."""
    body = _turn(kv_transfer_params=given).decode_body(hold_only(), "name")
    assert body["kv_transfer_params"]["kvtier"] == {"hold_as": "name"}


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        ({}, False),
        ({"n": 1}, False),
        ({"n": 2}, True),
        ({"use_beam_search": True}, True),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["one"]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": ["one", "two"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt_embeds": "AAAA"}, True),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True}, False),
        ({"logprobs": 3}, False),
        ({"messages": [{"role": "user", "content": "hi"}]}, False),
    ],
)
def test_one_hold_is_of_one_prompt_and_one_answer(body: dict[str, Any], alone: bool) -> None:  # noqa: FBT001
    """Several completions, or prompts that must be computed, are served by D alone."""
    assert _turn(**body).alone is alone


def test_there_is_no_other_way_to_name_blocks() -> None:
    """Engines read parameters from `vllm_xargs` too; its other entries are left unchanged."""
    turn = _turn(vllm_xargs={"kv_transfer_params": "x", "mine": 1})
    for body in (turn.prefill_body(first_turn()), turn.decode_body(None), turn.decode_body(hold_only(), "name")):
        assert body["vllm_xargs"] == {"mine": 1}
    assert _turn(vllm_xargs="odd").decode_body(None)["vllm_xargs"] == "odd", "engines say what is wrong with it"
