"""Choice of the engine for a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from disagg_proxy.fleet import Instance

from .block_index import BlockIndex

__all__ = ["Engine", "Policy", "Route", "Router", "prompt_of", "tokenize_body"]

SLACK = 4
"""If an engine has this many requests more than the least loaded one, it gets no request for its
blocks: waiting would take longer than computing."""

_TOKENIZE_FIELDS = (
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
)
"""Fields of a request that decide on its tokens."""


class Policy(Enum):
    PREFIX = "prefix"
    """The engine whose host has the most leading tokens of the prompt."""
    ROUND_ROBIN = "round_robin"


@dataclass(eq=False)
class Engine:
    """One engine, and the blocks of its host. Engines of one host share the index.

    `routed`: number of requests. `prompt_tokens`, `known_tokens`: their tokens, and how many of
    these the host had.
    """

    instance: Instance
    index: BlockIndex
    routed: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0

    def is_usable(self, now: float) -> bool:
        return self.instance.is_up or now >= self.instance.retry_at

    def takes(self, prompt_tokens: int, known_tokens: int) -> None:
        """Records a request that the engine gets."""
        self.routed += 1
        self.prompt_tokens += prompt_tokens
        self.known_tokens += known_tokens


@dataclass(frozen=True)
class Route:
    """The engine for a request, and how many leading tokens of the prompt its host has."""

    engine: Engine
    known_tokens: int


class Router:
    def __init__(self, engines: Sequence[Engine], policy: Policy) -> None:
        self.engines = tuple(engines)
        self._policy = policy
        self._turn = 0

    def choose(self, tokens: Sequence[int], model: str, now: float, tried: Collection[Engine] = ()) -> Route | None:
        """Returns the route of a request, or None if every engine is in `tried`."""
        candidates = self._candidates(now, tried)
        if not candidates:
            return None
        known = {engine: engine.index.match(tokens, model) for engine in candidates}
        if self._policy is Policy.ROUND_ROBIN:
            engine = candidates[self._turn % len(candidates)]
            self._turn += 1
        else:
            idlest = min(candidates, key=_load)
            engine = max(candidates, key=lambda each: (known[each], [-part for part in _load(each)]))
            if engine.instance.outstanding - idlest.instance.outstanding >= SLACK:
                engine = idlest
        return Route(engine, known[engine])

    def idlest(self, now: float) -> Engine:
        """Returns the least loaded engine, for calls that compute nothing."""
        return min(self._candidates(now), key=_load)

    def _candidates(self, now: float, tried: Collection[Engine] = ()) -> list[Engine]:
        left = [engine for engine in self.engines if engine not in tried]
        return [engine for engine in left if engine.is_usable(now)] or left


def _load(engine: Engine) -> tuple[int, int]:
    return engine.instance.outstanding, engine.routed


def prompt_of(body: dict[str, Any]) -> list[int] | None:
    """Returns the prompt if the client has sent it as token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    return None


def tokenize_body(body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a request to an engine's `/tokenize`; None for several prompts or none."""
    if not isinstance(body.get("prompt"), str) and not isinstance(body.get("messages"), list):
        return None
    return {name: body[name] for name in _TOKENIZE_FIELDS if name in body}
