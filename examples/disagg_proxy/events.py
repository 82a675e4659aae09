"""Reader of D's server-sent events. It finds D's hold while the proxy forwards the events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .agents import calls_tools
from .transfer import EngineIdentity, Params, is_usable

__all__ = ["EventSplitter", "EventTooLargeError", "StreamReader", "without_params"]

MAX_EVENT_BYTES = 16 << 20
_DONE = b"[DONE]"
_END = re.compile(rb"\r?\n\r?\n")
_PLAIN = b'"finish_reason":null'
_NOT_PLAIN = re.compile(rb'kv_transfer_params|"usage":\s*\{|"error"|tool_calls|function_call|\n.')
"""Words of events that `StreamReader` must parse. Quotes within a text are escaped in JSON."""

_KEPT_ENDINGS = {"stop", "length", "tool_calls", "function_call"}
"""Finish reasons after which D holds its blocks (B2.16): not `abort`, `error`, `repetition`."""


class EventTooLargeError(Exception):
    """An event exceeds the size limit."""


class EventSplitter:
    """Splits a stream into events, each with the blank line that ends it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the events that `chunk` completes. Raises EventTooLargeError."""
        text = self._rest + chunk
        start = 0
        for end in _END.finditer(text):
            yield text[start : end.end()]
            start = end.end()
        self._rest = text[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError

    def end(self) -> list[bytes]:
        """Returns the last event if it is `[DONE]`. Any other incomplete event is dropped."""
        return [self._rest.rstrip() + b"\n\n"] if _data(self._rest) == _DONE else []


class StreamReader:
    """Reader of one stream. `strip_usage`: the client did not ask for a usage chunk."""

    def __init__(self, *, strip_usage: bool) -> None:
        self._strip_usage = strip_usage
        self._total_tokens = 0
        self._is_kept = False
        self._params: Params | None = None
        self.calls_tools = False
        self.is_done = False
        self.has_failed = False

    def read(self, event: bytes) -> bytes:
        """Returns the event for the client: unchanged, without `kv_transfer_params`, or empty."""
        if event.count(b"finish_reason") == 1 and _PLAIN in event and _NOT_PLAIN.search(event.rstrip()) is None:
            return event  # most events have only text: parsing them takes most of the proxy's time
        data = _data(event)
        if data == _DONE:
            self.is_done = True
            return event
        chunk = _json(data) if data else None
        if not isinstance(chunk, dict):
            return event
        self._note(chunk)
        if self._strip_usage and chunk.get("usage") and chunk.get("choices") == []:
            return b""
        if "kv_transfer_params" not in chunk:
            return event
        del chunk["kv_transfer_params"]
        return b"data: " + _dump(chunk) + b"\n\n"

    @property
    def params(self) -> Params | None:
        """D's report of its hold, or None. Engines newer than vLLM 0.32 may send one."""
        return self._params

    def hold(self, engine: EngineIdentity | None, name: str | None) -> Params | None:
        """Returns D's hold as D reported it, or else under the name that the proxy chose."""
        if not self.is_done or self.has_failed:
            return None
        if self._params is not None:
            return self._params if is_usable(self._params) else None
        if engine is None or name is None or not self._is_kept or self._total_tokens < 2:
            return None
        return engine.named_hold(name, self._total_tokens - 1)  # the last token has no KV

    def _note(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk and not chunk.get("choices"):
            self.has_failed = True
        params, usage, choices = (chunk.get(name) for name in ("kv_transfer_params", "usage", "choices"))
        if isinstance(params, dict):
            self._params = params
        if isinstance(usage, dict) and isinstance(usage.get("total_tokens"), int):
            self._total_tokens = usage["total_tokens"]
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            self.calls_tools = self.calls_tools or calls_tools(choice)
            if choice.get("finish_reason") is not None:
                self._is_kept = _is_kept(choice)


def without_params(answer: dict[str, Any]) -> bytes:
    """Returns a complete response as JSON for the client."""
    return _dump({name: value for name, value in answer.items() if name != "kv_transfer_params"})


def _is_kept(choice: dict[str, Any]) -> bool:
    """Whether D holds a request with this end. vLLM treats a stop *string* as an abort."""
    return choice["finish_reason"] in _KEPT_ENDINGS and not isinstance(choice.get("stop_reason"), str)


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
