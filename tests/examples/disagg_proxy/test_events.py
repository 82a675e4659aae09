"""Forwarding and reading of D's streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from disagg_proxy import events
from disagg_proxy.events import EventSplitter, EventTooLargeError, StreamReader, without_params
from disagg_proxy.transfer import EngineIdentity
from hypothesis import given
from hypothesis import strategies as st

ENGINE = EngineIdentity("d0", "h", 7070, 1)
DONE = b"data: [DONE]\n\n"
END = {"choices": [{"index": 0, "text": "x", "finish_reason": "length", "stop_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}}
HELD = ENGINE.named_hold("d's own name", 21)


def _event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _read(*chunks: object, done: bool = True, strip_usage: bool = True) -> tuple[StreamReader, bytes]:
    reader = StreamReader(strip_usage=strip_usage)
    passed = [reader.read(_event(chunk)) for chunk in chunks]
    return reader, b"".join([*passed, reader.read(DONE)] if done else passed)


@given(
    st.lists(st.binary(max_size=20).filter(lambda text: b"\n" not in text and b"\r" not in text), max_size=8),
    st.lists(st.integers(1, 30), min_size=1),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_events_are_whole_however_they_arrive(texts: list[bytes], sizes: list[int], end: bytes) -> None:
    """Split anywhere by the network, each event comes out once, in order, unchanged."""
    wanted = [b"data: " + text + end for text in texts]
    stream, splitter, got, number = b"".join(wanted), EventSplitter(), list[bytes](), 0
    while stream:
        size = sizes[number % len(sizes)]
        got += splitter.feed(stream[:size])
        stream, number = stream[size:], number + 1
    assert got == wanted


def test_what_has_no_end_is_kept_apart() -> None:
    """The start of an event is not forwarded."""
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: 1\n\ndata: 2")) == [b"data: 1\n\n"]
    assert splitter.end() == []


@pytest.mark.parametrize("rest", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
def test_the_end_of_a_stream_ends_its_last_event(rest: bytes) -> None:
    """The blank line after `[DONE]` may be missing; the client gets it."""
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: 1\n\n" + rest)) == [b"data: 1\n\n"]
    assert splitter.end() == [rest.rstrip() + b"\n\n"]


def test_an_event_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sends one endless line does not fill the proxy's memory."""
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    assert list(splitter.feed(b"x" * 100)) == []
    with pytest.raises(EventTooLargeError):
        list(splitter.feed(b"x"))


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"index":0,"text":"\xc3\xa9","finish_reason":null}]}\n\n',
        b": ping\n\n",
        b"event: odd\ndata: 7\n\n",
        b"data: {broken\n\n",
        b"data: [1]\n\n",
        b"\n\n",
        b'data:{"choices":"odd","usage":{"total_tokens":"x"}}\n\n',
        b'data: {"choices":[7,{"finish_reason":"stop"}]}\r\n\r\n',
        DONE,
    ],
)
def test_events_pass_as_they_come(event: bytes) -> None:
    """Every byte is forwarded unchanged."""
    assert StreamReader(strip_usage=True).read(event) == event


CHOICE = st.fixed_dictionaries(
    {"index": st.just(0), "finish_reason": st.sampled_from([None, None, "stop", "length", "tool_calls"])},
    optional={
        "text": st.text(max_size=5) | st.sampled_from(['"finish_reason":null', "kv_transfer_params", '"error"']),
        "delta": st.sampled_from([{"content": "x"}, {"tool_calls": [{"id": 1}]}, {"tool_calls": []}]),
        "stop_reason": st.sampled_from([None, "###"]),
    },
)
CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2)},
    optional={
        "usage": st.sampled_from([None, {"total_tokens": 9}]),
        "error": st.just({"message": "x"}),
        "kv_transfer_params": st.sampled_from([None, HELD]),
    },
)


@given(st.lists(CHUNK, max_size=5), st.booleans())
def test_events_that_are_not_parsed_tell_nothing(chunks: list[dict[str, Any]], strip: bool) -> None:  # noqa: FBT001
    """A reader that parses each event forwards the same and knows the same."""
    lines = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks]
    found = []
    for plain in (events._PLAIN, b"never"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(events, "_PLAIN", plain)
            reader = StreamReader(strip_usage=strip)
            passed = [reader.read(line) for line in [*lines, DONE]]
        found.append((passed, reader.hold(ENGINE, "name"), reader.params, reader.has_failed, reader.calls_tools))
    assert found[0] == found[1]


def test_usage_is_forwarded_on_request() -> None:
    """The usage chunk is forwarded only if the client asked for it."""
    assert _read(END, USAGE)[1] == _event(END) + DONE
    assert _read(END, USAGE, strip_usage=False)[1] == _event(END) + _event(USAGE) + DONE


def test_a_chunk_with_text_is_never_stripped() -> None:
    """With usage in every chunk (`continuous_usage_stats`), only the last one is removed."""
    chunk = END | {"usage": USAGE["usage"]}
    assert _read(chunk, USAGE)[1] == _event(chunk) + DONE


def test_a_stream_records_its_named_hold() -> None:
    """B2.22 The entry of a stream: D's name for it, and all tokens but the last, without KV yet."""
    reader, _ = _read(END, USAGE)
    assert reader.hold(ENGINE, "name") == ENGINE.named_hold("name", 23)


def test_what_d_says_itself_counts() -> None:
    """B2.22 A final chunk's `kv_transfer_params` are D's report; the client does not get them."""
    chunk = {**END, "kv_transfer_params": HELD}
    reader, passed = _read(chunk, USAGE)
    assert reader.hold(ENGINE, "name") == HELD
    assert reader.hold(None, None) == HELD
    assert b"kv_transfer_params" not in passed
    assert json.loads(passed.split(b"\n\n")[0].removeprefix(b"data: ")) == END


def test_d_may_say_that_it_holds_nothing() -> None:
    """B2.15 Its report counts: no hold is recorded under the given name."""
    reader, _ = _read({**END, "kv_transfer_params": {**HELD, "remote_block_ids": [[]]}}, USAGE)
    assert reader.hold(ENGINE, "name") is None


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "function_call"])
def test_normal_ends_are_held(reason: str) -> None:
    """B2.16 Stopped and length-capped are normal ends; chat has more reasons for the former."""
    reader, _ = _read({"choices": [{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": 2}]}, USAGE)
    assert reader.hold(ENGINE, "name") is not None


@pytest.mark.parametrize(
    "end",
    [
        {"finish_reason": "abort"},
        {"finish_reason": "error"},
        {"finish_reason": "repetition"},
        {"finish_reason": None},
        {"finish_reason": "stop", "stop_reason": "\n\n"},
    ],
)
def test_other_ends_are_not(end: dict[str, Any]) -> None:
    """B2.16 Any other end frees the blocks; a stop string is an abort inside vLLM."""
    reader, _ = _read({"choices": [{"index": 0, "text": "", **end}]}, USAGE)
    assert reader.hold(ENGINE, "name") is None


def test_nothing_is_made_up() -> None:
    """Without end, usage, engine id or name there is no entry, and after an error neither."""
    assert _read(END, USAGE, done=False)[0].hold(ENGINE, "name") is None
    assert _read(END)[0].hold(ENGINE, "name") is None
    assert _read(END, USAGE)[0].hold(None, "name") is None
    assert _read(END, USAGE)[0].hold(ENGINE, None) is None
    assert _read(END, {"error": {"message": "dead", "code": 500}}, USAGE)[0].hold(ENGINE, "name") is None
    one_token = {"choices": [], "usage": {"total_tokens": 1}}
    assert _read(END, one_token)[0].hold(ENGINE, "name") is None


def test_an_error_is_noticed_and_passed_on() -> None:
    """A stream of vLLM reports its failure in an event."""
    error = {"error": {"message": "dead", "code": 500}}
    reader, passed = _read(error)
    assert reader.has_failed
    assert passed == _event(error) + DONE
    assert not _read(END)[0].has_failed


def test_whole_answers_keep_all_but_the_params() -> None:
    """The parameters between engines are removed."""
    answer = {"id": "1", "choices": [{"text": "é\ud800"}], "kv_transfer_params": HELD}
    assert json.loads(without_params(answer)) == {"id": "1", "choices": [{"text": "é\ud800"}]}
