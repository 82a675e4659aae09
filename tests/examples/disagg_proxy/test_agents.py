"""Which hints follow from requests and answers of agents."""

from __future__ import annotations

from typing import Any

import pytest
from disagg_proxy.agents import AgentRequest, Hint, HintAction, Retentions, calls_tools, prefetch
from disagg_proxy.conversations import MAX_SERVER_NAME, Conversation

ONE = Conversation("owner", "m", "c1")
TWO = Conversation("owner", "m", "c2")


def _release(server: str, conversation: Conversation = ONE) -> Hint:
    return Hint(server, HintAction.RELEASE, conversation.server_name)


def _retain(server: str, seconds: float, conversation: Conversation = ONE) -> Hint:
    return Hint(server, HintAction.RETAIN, conversation.server_name, seconds)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user"}, {"role": "assistant"}, {"role": "tool"}], True),
        ([{"role": "function"}], True),
        ([{"role": "tool"}, {"role": "user"}], False),
        ([], False),
        ("text", False),
        ([7], False),
        ([{"role": ["tool"]}], False),
    ],
)
def test_results_of_tools_are_at_the_end_of_the_prompt(messages: Any, *, expected: bool) -> None:
    assert AgentRequest.parse({"messages": messages}, {}).has_tool_results is expected


def test_headers_of_agents() -> None:
    headers = {"x-kv-cache-tool-seconds": "1.5", "x-kv-cache-conversation": "end"}
    assert AgentRequest.parse({}, headers) == AgentRequest(tool_s=1.5, is_last=True)
    assert AgentRequest.parse({}, {}) == AgentRequest()


@pytest.mark.parametrize("seconds", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
def test_invalid_durations_are_refused(seconds: str) -> None:
    with pytest.raises(ValueError, match="x-kv-cache-tool-seconds"):
        AgentRequest.parse({}, {"x-kv-cache-tool-seconds": seconds})


@pytest.mark.parametrize("last", ["", "begin"])
def test_an_unknown_event_of_the_conversation_is_refused(last: str) -> None:
    with pytest.raises(ValueError, match="x-kv-cache-conversation"):
        AgentRequest.parse({}, {"x-kv-cache-conversation": last})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"finish_reason": "tool_calls", "message": {"tool_calls": [{}]}}, True),
        ({"finish_reason": "function_call"}, True),
        ({"finish_reason": "stop", "message": {"tool_calls": [{}]}}, True),
        ({"finish_reason": None, "delta": {"tool_calls": [{}]}}, True),
        ({"finish_reason": "stop", "message": {"content": "x", "tool_calls": []}}, False),
        ({"finish_reason": "length", "text": "x"}, False),
        ({"finish_reason": ["tool_calls"], "message": 7}, False),
    ],
)
def test_answers_that_call_tools(choice: dict[str, Any], *, expected: bool) -> None:
    """Whole answers and chunks; a tool that the request chose ends with `stop`."""
    assert calls_tools(choice) is expected


def test_blocks_are_retained_until_an_answer_calls_no_tools() -> None:
    table = Retentions(10)
    assert table.retain(ONE, {"b", "a"}, 60, now=0) == [_retain("a", 60), _retain("b", 60)]
    assert table.retain(ONE, {"a", "b"}, 30, now=10) == [_retain("a", 30), _retain("b", 30)]
    assert table.release(ONE, now=20) == [_release("a"), _release("b")]
    assert table.release(ONE, now=20) == []


def test_nothing_is_released_after_the_retention_has_ended() -> None:
    table = Retentions(10)
    table.retain(ONE, {"a"}, 60, now=0)
    assert table.release(ONE, now=60) == []


def test_servers_that_a_conversation_has_left_release() -> None:
    table = Retentions(10)
    table.retain(ONE, {"a", "b"}, 60, now=0)
    assert table.retain(ONE, {"b", "c"}, 60, now=1) == [_release("a"), _retain("b", 60), _retain("c", 60)]
    assert table.retain(ONE, (), 60, now=2) == [_release("b"), _release("c")]
    assert len(table) == 0


def test_the_oldest_conversation_is_released_if_the_table_is_full() -> None:
    table = Retentions(1)
    table.retain(ONE, {"a"}, 60, now=0)
    assert table.retain(TWO, {"a"}, 60, now=1) == [_retain("a", 60, TWO), _release("a")]
    assert table.release(ONE, now=1) == []
    assert table.release(TWO, now=1) == [_release("a", TWO)]


def test_prefetched_blocks_are_retained_for_a_short_time() -> None:
    """Otherwise they could be evicted again before the request uses them."""
    [hint] = prefetch(ONE, ["a"])
    assert hint.action is HintAction.PREFETCH
    assert hint.retain_for_s is not None
    assert 0 < hint.retain_for_s <= 60


def test_servers_know_a_conversation_by_a_name_of_its_own() -> None:
    """It differs for each owner and model, ends with the client's name, and fits the server."""
    assert ONE.server_name.endswith(".c1")
    others = [Conversation("other", "m", "c1"), Conversation("owner", "n", "c1"), TWO]
    assert len({each.server_name for each in (ONE, *others)}) == 4
    odd = [Conversation("owner", "m", name) for name in ("x" * 256, "x" * 255, "\ud800", "é", "a\nb")]
    names = {each.server_name for each in odd}
    assert len(names) == len(odd)
    assert all(len(name) <= MAX_SERVER_NAME and name.isascii() and name.isprintable() for name in names)
