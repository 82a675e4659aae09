"""Timing of prompts on an engine, over its OpenAI API. Random prompts are in no cache."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from .errors import BreakEvenError, PeerUnreachable

__all__ = ["PrefillEngine"]

_ANSWER_SECONDS = 600.0

_TOKEN_IDS = range(10, 256)
"""Token ids that every vocabulary has. An engine's cache block has at least 16 tokens, and 16
random ids do not repeat by chance: there are 246^16 = 10^38 combinations."""


class PrefillEngine:
    """Engine with an OpenAI completions API that accepts prompts of token ids.

    Raises:
        ValueError: the URL is not an HTTP URL.
    """

    def __init__(
        self, url: str, *, timeout: float = _ANSWER_SECONDS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an engine; write it like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._timeout = timeout
        self._clock = clock
        self._random = random.SystemRandom()
        # Without the HTTP proxies of the environment.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._model = ""

    def find_model(self) -> int | None:
        """Asks for the served model; returns its maximum number of tokens, if known. Call it first.

        Raises:
            BreakEvenError: the engine names no model, or does not respond (`PeerUnreachable`).
        """
        answer = self._ask("/v1/models")
        models = answer.get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise BreakEvenError(f"{self.url} does not say which model it serves")
        self._model = models[0]["id"]
        most = models[0].get("max_model_len")
        return most if isinstance(most, int) else None

    def prefill(self, tokens: int) -> float:
        """Sends a new prompt of this many tokens; returns the seconds until its first token.

        Raises:
            BreakEvenError: the engine refuses, had part of the prompt cached, or does not respond
                (`PeerUnreachable`).
        """
        prompt = self._random.choices(_TOKEN_IDS, k=tokens)
        question = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = self._clock()
        answer = self._ask("/v1/completions", question)
        seconds = self._clock() - began
        self._check(tokens, answer.get("usage") or {})
        return seconds

    def _check(self, tokens: int, usage: Mapping[str, Any]) -> None:
        counted = usage.get("prompt_tokens", tokens)
        if counted < tokens:
            raise BreakEvenError(f"{self.url} was given {tokens} tokens and computed {counted}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if cached:
            raise BreakEvenError(f"{self.url} had {cached} of {tokens} tokens cached, though the prompt was new")

    def _ask(self, path: str, question: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})  # noqa: S310 - checked
        try:
            with self._open(request, timeout=self._timeout) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace").replace("\n", " ")
            raise BreakEvenError(f"{self.url}{path} answers {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            why = (isinstance(cause, OSError) and cause.strerror) or cause
            raise PeerUnreachable(f"no engine answers at {self.url}: {why}") from None
        except ValueError as error:
            raise BreakEvenError(f"{self.url}{path} answers with something else than JSON: {error}") from None
        if not isinstance(found, dict):
            raise BreakEvenError(f"{self.url}{path} answers with something else than an object")
        return found
