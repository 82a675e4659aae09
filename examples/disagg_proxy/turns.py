"""A client's request, and its bodies for P and for D (B2.20, B2.23)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .agents import AgentRequest
from .transfer import Params, for_engine, own_params, with_conversation, with_source

__all__ = ["MAX_CONVERSATION_ID", "SOURCE_HEADER", "AgentHint", "BadRequestError", "Turn", "parse_hint"]

MAX_CONVERSATION_ID = 256
"""Maximum number of characters in the id of a conversation."""


SOURCE_HEADER = "x-kv-cache-source-host-port"
"""Header that names the kvtier server from which to load blocks that the engine's server lacks."""


class BadRequestError(Exception):
    """The request is invalid; the text is for the client."""


@dataclass(frozen=True)
class Turn:
    """A parsed request.

    `body`: as sent, without `conversation_id` and `kv_transfer_params`. `own`: the parameters that
    the client may set itself. `alone`: D serves the turn without P. `agent`: what the request tells
    about its agent.
    """

    body: dict[str, Any]
    own: Params
    conversation_id: str | None
    stream: bool
    wants_usage: bool
    alone: bool
    agent: AgentRequest

    @classmethod
    def parse(cls, raw: bytes, headers: Mapping[str, str]) -> Turn:
        """Parses a body and headers with lower-case names. Raises BadRequestError."""
        body = _object(raw)
        conversation_id = _conversation_id(body.pop("conversation_id", None))
        own = own_params(body.pop("kv_transfer_params", None))
        if source := headers.get(SOURCE_HEADER):
            try:
                own = with_source(own, source)
            except ValueError as error:
                raise BadRequestError(f"{SOURCE_HEADER}: {error}.") from None
        try:
            agent = AgentRequest.parse(body, headers)
        except ValueError as error:
            raise BadRequestError(f"{error}.") from None
        # vLLM also reads `kv_transfer_params` from here, and a client must not name blocks to pull.
        if isinstance(xargs := body.get("vllm_xargs"), dict):
            xargs.pop("kv_transfer_params", None)
        options, stream = body.get("stream_options"), body.get("stream")
        if not isinstance(stream, bool | None):  # engines also accept 1 and "true" and would stream
            raise BadRequestError("stream must be true or false.")
        return cls(
            body,
            own,
            conversation_id,
            stream=bool(stream),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            alone=not _is_one_answer(body) or _wants_whole_prompt(body),
            agent=agent,
        )

    def named(self, server_name: str) -> Turn:
        """Returns the turn with this name of the conversation for the engines' kvtier servers."""
        return replace(self, own=with_conversation(self.own, server_name))

    @property
    def prompt(self) -> bytes:
        """The prompt, in a form in which a later turn's prompt begins with that of this turn."""
        messages, prompt = self.body.get("messages"), self.body.get("prompt")
        if isinstance(messages, list):
            return b"".join(json.dumps(message, sort_keys=True).encode() + b"\n" for message in messages)
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if isinstance(prompt, list):
            return b"".join(b"%d " % token for token in prompt if isinstance(token, int))
        return prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else b""

    @property
    def model(self) -> str:
        """The model's name in the request. Empty if it is missing."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    def prefill_body(self, params: Params, hold_as: str | None = None) -> dict[str, Any]:
        """Returns P's body: one token, which is discarded (B2.23)."""
        given = for_engine(params, self.own, hold_as)
        body = {**self.body, "stream": False, "max_tokens": 1, "kv_transfer_params": given}
        for name in ("max_completion_tokens", "min_tokens", "stream_options"):
            body.pop(name, None)
        return body

    def decode_body(self, params: Params | None, hold_as: str | None = None) -> dict[str, Any]:
        """Returns D's body. With `hold_as` the body asks for the number of tokens (usage)."""
        body = dict(self.body)
        given = for_engine(params or {}, self.own, hold_as, holds=not params or self.conversation_id is not None)
        if given:
            body["kv_transfer_params"] = given
        if hold_as is not None:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return body


@dataclass(frozen=True)
class AgentHint:
    """A hint of an agent outside of a request: prefetch (`is_prefetch`) or release."""

    model: str
    conversation_id: str
    is_prefetch: bool


def parse_hint(raw: bytes) -> AgentHint:
    """Parses the body of a hint. Raises BadRequestError."""
    body = _object(raw)
    model, name, hint = body.get("model", ""), _conversation_id(body.get("conversation_id")), body.get("hint")
    if name is None or not isinstance(model, str):
        raise BadRequestError("conversation_id is missing, or model is not text.")
    if hint not in ("prefetch", "release"):
        raise BadRequestError("hint must be prefetch or release.")
    return AgentHint(model, name, hint == "prefetch")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequestError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    return body


def _conversation_id(given: object) -> str | None:
    if given is None or given == "":
        return None
    if not isinstance(given, str) or len(given) > MAX_CONVERSATION_ID:
        raise BadRequestError(f"conversation_id must be text of at most {MAX_CONVERSATION_ID} characters.")
    return given


def _is_one_answer(body: dict[str, Any]) -> bool:
    """Whether a hold can represent the request: one prompt of tokens, one completion."""
    if body.get("n") not in (None, 1) or body.get("use_beam_search") or body.get("prompt_embeds") is not None:
        return False
    prompt = body.get("prompt")
    return not (isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int))


def _wants_whole_prompt(body: dict[str, Any]) -> bool:
    """Whether D must compute the whole prompt, for the log probabilities of its tokens."""
    echoes = body.get("echo") and body.get("logprobs") is not None
    return bool(echoes) or body.get("prompt_logprobs") is not None
