"""Turns of conversations with a deployment, compared with a plain engine's answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from calls import Stream, ask, chat_row, post, question, row, streamed_row
from conversations import MORE, SAID, ExpectedAnswers
from deployment import Deployment, Moved
from proxy_process import ProxyProcess
from scenario import tokens

__all__ = ["ConversationClient"]


class ConversationClient:
    """Asks the next turn of a conversation and compares the answer with a plain engine's."""

    def __init__(self, deployment: Deployment, reference: ExpectedAnswers) -> None:
        self._deployment, self._reference = deployment, reference

    def turn(self, name: str, turn: int, *, reuses: bool = True, **more: Any) -> Moved:
        """Asks the proxy for a whole answer; returns what moved.

        Without `reuses` there is nothing held of the turn before.
        """
        with self._watch(turn, reuses=reuses) as moved:
            self.ask_proxy(name, turn, **more)
        return moved

    def ask_proxy(self, name: str, turn: int, proxy: ProxyProcess | None = None, **more: Any) -> None:
        """Asks the proxy for a complete answer, without counts."""
        port = (proxy or self._deployment.proxy).port
        answer = ask(port, self._question(name, turn, **{"conversation_id": name, **more}))
        assert "kv_transfer_params" not in answer
        self._check(name, turn, row(answer))

    def at_once(self, names: Sequence[str], turn: int) -> None:
        """Asks the proxy for a turn of each of these conversations, without counts."""
        with ThreadPoolExecutor(len(names)) as threads:
            list(threads.map(lambda name: self.ask_proxy(name, turn), names))

    def branches(self, name: str, *seeds: int) -> None:
        """Continues the first turn of a conversation with different questions at once.

        Counts nothing, and compares no answers.
        """
        so_far = [*self._reference.prompt(name, 1), *self._reference.answer(name, 1)]
        bodies = [question([*so_far, *tokens(seed, MORE)], 4, conversation_id=name) for seed in seeds]
        with ThreadPoolExecutor(len(bodies)) as threads:
            list(threads.map(lambda body: ask(self._deployment.proxy.port, body), bodies))

    def streamed(self, name: str, turn: int) -> Moved:
        """Asks the proxy for a streamed answer; returns what moved."""
        with self._watch(turn) as moved:
            self.ask_streamed(name, turn)
        return moved

    def ask_streamed(self, name: str, turn: int, **more: Any) -> None:
        """Asks the proxy for a streamed answer, without counts."""
        body = self._question(name, turn, **{"conversation_id": name, **more})
        with Stream(self._deployment.proxy.port, body) as stream:
            self._check(name, turn, streamed_row(list(stream.pieces())))

    def ask_chat(self, name: str, turn: int) -> Moved:
        """Asks the proxy for a chat completion, in words."""
        messages = []
        for earlier in range(1, turn + 1):
            before = (
                [*self._reference.prompt(name, earlier - 1), *self._reference.answer(name, earlier - 1)]
                if earlier > 1
                else []
            )
            asked = self._reference.prompt(name, earlier)[len(before) :]
            messages.append({"role": "user", "content": _words(asked)})
            messages.append({"role": "assistant", "content": _words(self._reference.answer(name, earlier))})
        body = {
            **question([], SAID, conversation_id=name, logprobs=True, top_logprobs=3, skip_special_tokens=False),
            "messages": messages[:-1],
        }
        del body["prompt"]
        with self._watch(turn) as moved:
            self._check(name, turn, chat_row(post(self._deployment.proxy.port, "/v1/chat/completions", body)))
        return moved

    def direct(
        self, engine: str, name: str, turn: int, params: dict[str, Any], max_tokens: int = SAID, cut: int | None = None
    ) -> dict[str, Any] | None:
        """Asks an engine with these `kv_transfer_params`; returns those of its answer.

        `cut` limits the prompt's tokens if the answer is not compared.
        """
        body = self._question(name, turn, kv_transfer_params=params) | {"max_tokens": max_tokens}
        if cut is not None:
            body["prompt"] = body["prompt"][:cut]
        answer = ask({"P": self._deployment.p, "D": self._deployment.d}[engine].port, body)
        if cut is None:
            self._check(name, turn, row(answer))
        returned: dict[str, Any] | None = answer.get("kv_transfer_params")
        return returned

    def _watch(self, turn: int, *, reuses: bool = True) -> AbstractContextManager[Moved]:
        """Each engine holds its request at the end, and pulls what the other holds."""
        return self._deployment.watch(published=2, ended=2 if reuses and turn > 1 else 1)

    def _question(self, name: str, turn: int, **more: Any) -> dict[str, Any]:
        return question(self._reference.prompt(name, turn), SAID, **more)

    def _check(self, name: str, turn: int, answered: dict[str, Any]) -> None:
        self._reference.check(name, turn, answered)


def _words(tokens: list[int]) -> str:
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "<pad>"}
    return " ".join(names.get(token, f"w{token}") for token in tokens)
