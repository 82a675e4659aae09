"""Many conversations at once, with leaving clients and cache resets: right answers, no leaks."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from calls import Stream, post, question
from conversation_client import ConversationClient
from conversations import LONG, TURNS, ExpectedAnswers
from deployment import Deployment

SECONDS = float(os.environ.get("HANDOFF_CHURN_SECONDS", "20"))
SEED = int(os.environ.get("HANDOFF_CHURN_SEED", "1"))
CLIENTS = 4


class _Client:
    """Goes through conversations until the time is over.

    A salt makes each a new one, whose answers are known all the same.
    """

    def __init__(
        self, number: int, deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient
    ) -> None:
        self._random = random.Random(SEED * 1000 + number)
        self._number, self._deployment, self._reference, self._talk = number, deployment, reference, talk
        self.answered = self.left = 0

    def run(self, until: float) -> None:
        """Asks one turn after the other."""
        while time.monotonic() < until:
            name, salt = f"at once {self._random.randrange(4)}", f"{self._number}-{self._random.random()}"
            for turn in TURNS:
                if self._random.random() < 0.3:
                    self._leave(name, turn, salt)
                ask = self._talk.ask_proxy if self._random.random() < 0.5 else self._talk.ask_streamed
                ask(name, turn, cache_salt=salt, conversation_id=f"{name} {salt}")
                self.answered += 1

    def _leave(self, name: str, turn: int, salt: str) -> None:
        """Asks, and disconnects before the answer ends."""
        more = {"cache_salt": salt, "conversation_id": f"{name} {salt}"}
        with Stream(self._deployment.proxy.port, question(self._reference.prompt(name, turn), LONG, **more)) as stream:
            if self._random.random() < 0.5:
                stream.send()
                time.sleep(self._random.random() / 5)
            else:
                pieces = stream.pieces()
                for _ in range(self._random.randrange(1, 6)):
                    next(pieces)
        self.left += 1


def test_a_churn_of_conversations(deployment: Deployment, reference: ExpectedAnswers, talk: ConversationClient) -> None:
    """B2.10, B2.16, B2.19 Under load, blocks belong to the right tokens, and are released."""
    before = deployment.totals("to_prefill")
    clients = [_Client(number, deployment, reference, talk) for number in range(CLIENTS)]
    over = threading.Event()
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        forgetting = threads.submit(_forget, deployment, over)
        runs = [threads.submit(client.run, until) for client in clients]
        try:
            for run in runs:
                run.result()
        finally:
            over.set()
        forgetting.result()
    assert all(client.answered for client in clients)
    deployment.wait_for_decodes()
    assert deployment.totals("to_prefill")["claimed"] > before["claimed"]
    deployment.assert_idle()
    deployment.restart_server()  # D's holds would leave too little memory for other tests


def _forget(deployment: Deployment, over: threading.Event) -> None:
    """Empties the prefix cache of one of the engines now and then; busy engines refuse it."""
    source = random.Random(SEED)
    while not over.wait(source.random()):
        post(source.choice((deployment.p, deployment.d)).port, "/reset_prefix_cache")
