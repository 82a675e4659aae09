"""A decode engine that pulls blocks while the prefill engine computes the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Stream, ask, question, row, streamed_row
from deployment import SETTLE_SECONDS, SOON_SECONDS, Deployment, eventually
from engine_server import Sources
from harness.polling import polls, wait_until
from proxy_process import ProxyProcess
from scenario import BLOCK, assert_same, tokens
from tiny_models import make_dense, make_tokenizer

CHUNK = BLOCK
BLOCKS = 125
LONG = (BLOCKS - 1) * BLOCK + 7
"""Tokens of a prompt that P computes in many steps, so that a test can act in between."""

SAID = 8


@pytest.fixture(scope="module")
def _deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("overlap")
    make_dense(folder / "model")
    make_tokenizer(folder / "model")
    deployment = Deployment(folder, folder / "model", "--max-num-batched-tokens", str(CHUNK))
    try:
        yield deployment
    finally:
        deployment.end()


@pytest.fixture
def proxy(deployment: Deployment) -> Iterator[ProxyProcess]:
    """A proxy that knows P, so that it sends the next request to both engines at once."""
    with deployment.proxy_of([deployment.p], [deployment.d], "--overlap") as proxy:
        ask(proxy.port, question(tokens(500, 2 * BLOCK), 1))
        deployment.wait_for_decodes()
        deployment.empty()
        yield proxy


def _alone(deployment: Deployment, prompt: list[int]) -> dict[str, Any]:
    """Returns the answer of D alone, which loads and stores nothing."""
    params = {"kvtier": {"skip_load": True, "skip_save": True}}
    answer = row(ask(deployment.d.port, question(prompt, SAID, kv_transfer_params=params)))
    deployment.empty()
    return answer


class Asking:
    """A request in the background."""

    def __init__(self, port: int, prompt: list[int]) -> None:
        self.answer: dict[str, Any] | None = None
        self._body, self._port = question(prompt, SAID), port
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        self.answer = row(ask(self._port, self._body))

    def result(self) -> dict[str, Any]:
        self._thread.join()
        assert self.answer is not None
        return self.answer


def _claimed(deployment: Deployment) -> int:
    return deployment.totals("to_decode")["claimed"]


def _holds(deployment: Deployment) -> list[dict[str, Any]]:
    """Returns P's open holds of which blocks are stored."""
    holds = [hold for hold in deployment.open_holds() if hold["direction"] == "prefill_to_decode"]
    return [hold for hold in holds if hold["pending_blocks"] < BLOCKS]


def _pause_in_prefill(deployment: Deployment, claimed_before: int) -> dict[str, Any]:
    """Pauses P after it has stored a block, waits until D has claimed it, and returns the hold."""
    prefill = deployment.p
    wait_until(
        lambda: sum(prefill.metrics("num_requests_running").values()), otherwise="P runs no request", interval=0.002
    )

    def has_stored() -> bool:
        prefill.pause()  # before the check, which takes as long as many steps
        if any(_holds(deployment) for _ in polls(SOON_SECONDS, 0.1)):
            return True
        prefill.resume()
        return False

    wait_until(has_stored, SETTLE_SECONDS, otherwise="P stores no block")
    eventually(lambda: _claimed(deployment) > claimed_before, "D claims nothing")
    (hold,) = _holds(deployment)
    return hold


def test_blocks_are_pulled_during_the_prefill(deployment: Deployment, proxy: ProxyProcess) -> None:
    """P is stopped in the middle: D has pulled blocks, and gets the others when P goes on."""
    prompt = tokens(501, LONG)
    expected = _alone(deployment, prompt)
    with deployment.watch(ended=1) as moved:
        claimed = _claimed(deployment)
        asking = Asking(proxy.port, prompt)
        hold = _pause_in_prefill(deployment, claimed)
        try:
            assert hold["pending_blocks"] > 0, "P has computed a part"
        finally:
            deployment.p.resume()
        answer = asking.result()
    assert_same({"rows": [expected]}, {"name": "overlapped", "rows": [answer]})
    assert moved.p == Sources(LONG, 0, 0)
    assert moved.d == Sources(0, 0, LONG)
    assert moved.pulled == (0, LONG)
    assert moved.to_decode["published"] == moved.to_decode["released"] == 1
    deployment.assert_idle()


def test_an_aborted_prefill_leaves_nothing_held(deployment: Deployment, proxy: ProxyProcess) -> None:
    """The client disconnects in the middle of the prefill."""
    claimed = _claimed(deployment)
    with Stream(proxy.port, question(tokens(502, LONG), SAID)) as stream:
        stream.send()
        _pause_in_prefill(deployment, claimed)
        stream.disconnect()
        deployment.p.resume()
    eventually(lambda: not deployment.totals("to_decode")["open"], "P's blocks are still held")
    deployment.assert_idle()
    prompt = tokens(502, LONG)
    expected = _alone(deployment, prompt)
    with deployment.watch(ended=1), Stream(proxy.port, question(prompt, SAID)) as stream:
        answer = streamed_row(list(stream.pieces()))
    assert_same({"rows": [expected]}, {"name": "after the abort", "rows": [answer]})


def test_a_prefill_engine_that_is_killed(deployment: Deployment, proxy: ProxyProcess) -> None:
    """D computes what P has not stored, or the whole prompt."""
    prompt = tokens(503, LONG)
    expected = _alone(deployment, prompt)
    claimed = _claimed(deployment)
    asking = Asking(proxy.port, prompt)
    _pause_in_prefill(deployment, claimed)
    deployment.p.kill()
    assert_same({"rows": [expected]}, {"name": "P was killed", "rows": [asking.result()]})
    eventually(lambda: not deployment.totals("to_decode")["open"], "P's blocks are still held")
    deployment.restart_stopped()
    deployment.assert_idle()
