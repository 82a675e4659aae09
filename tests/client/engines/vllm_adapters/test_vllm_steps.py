"""Cost of the connector in decode steps that fill no block, as counts of function calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_rig import Server
from harness.function_counts import functions_of
from harness.polling import wait_until
from step_rig import BLOCK_TOKENS, PROMPT_TOKENS, StepRig

from kvtier.client.engines.vllm import connector
from kvtier.client.engines.vllm.step_metadata import IDLE_WITHOUT_JOBS, NO_JOBS, StepMetadata

BATCHES = (1, 32, 256)
MOST_OF_SCHEDULER, MOST_OF_WORKER = 30, 15
"""Function calls of a step, for any number of requests."""
STEPS = 40


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[Callable[..., StepRig]]:
    """Creates an engine whose requests have been computed and registered."""
    monkeypatch.setattr(connector, "Client", Server)
    made: list[StepRig] = []

    def make(batch: int, drafts: int = 0) -> StepRig:
        rig = StepRig(str(model), batch, drafts)
        made.append(rig)
        side: Any = rig.scheduler._scheduler
        wait_until(lambda: not any(request.registration.voting for request in side._requests.values()))
        rig.step()  # the first step after the registration looks at each request
        return rig

    yield make
    for rig in made:
        rig.close()


def _counted(counts: list[int]) -> Callable[[Callable[[], Any]], None]:
    """Returns a caller of functions that appends the number of Python functions they call."""
    return lambda act: counts.append(functions_of(act))


def test_a_step_without_a_full_block_costs_the_same_for_all_batches(make_rig: Callable[..., StepRig]) -> None:
    for batch in BATCHES:
        rig, of_scheduler, of_worker = make_rig(batch), list[int](), list[int]()
        for _ in range(STEPS):
            rig.step(_counted(of_scheduler), _counted(of_worker))
        assert max(of_scheduler) <= MOST_OF_SCHEDULER
        assert max(of_worker) <= MOST_OF_WORKER


def test_most_steps_with_drafts_do_not_look_at_the_requests(make_rig: Callable[..., StepRig]) -> None:
    """If all drafts are rejected, a request is looked at more often than its blocks become full."""
    rig, of_scheduler = make_rig(max(BATCHES), drafts=3), list[int]()
    for _ in range(STEPS):
        rig.step(_counted(of_scheduler))
    assert sum(count <= MOST_OF_SCHEDULER for count in of_scheduler) >= STEPS - 3


def test_a_step_that_fills_blocks_saves_all_of_them(make_rig: Callable[..., StepRig]) -> None:
    """B4.6 In this step, not in the one before or after."""
    rig = make_rig(32)
    for request in rig.requests.values():
        request.block_hashes.append(request.request_id.encode() * 16)
    for tokens in range(PROMPT_TOKENS + 2, BLOCK_TOKENS + 3):
        rig.step()
        saved = [key for job in rig.metadata.saves for key in job.keys]
        assert len(saved) == len(set(saved)) == (32 if tokens == BLOCK_TOKENS else 0), tokens


def test_a_step_without_news_is_one_shared_object(make_rig: Callable[..., StepRig]) -> None:
    """Its pickled form is only a name, so that workers read it fast."""
    rig = make_rig(1)
    rig.step()
    assert rig.metadata is NO_JOBS
    assert pickle.loads(pickle.dumps(IDLE_WITHOUT_JOBS)) is IDLE_WITHOUT_JOBS  # noqa: S301
    assert len(pickle.dumps(NO_JOBS)) < 100
    other = StepMetadata(namespace_digest="d", idle=True)
    assert pickle.loads(pickle.dumps(other)) == other  # noqa: S301


def test_the_namespace_is_sent_with_jobs_and_after_a_change(make_rig: Callable[..., StepRig]) -> None:
    rig = make_rig(1)
    side: Any = rig.scheduler._scheduler
    side._digest = "another"
    rig.step()
    assert (rig.metadata.namespace_digest, rig.metadata.namespace) == ("another", side._namespace)
    rig.step()
    assert rig.metadata is NO_JOBS


def test_after_a_failed_plan_each_request_is_looked_at(
    make_rig: Callable[..., StepRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core does not know the tokens of the failed step."""
    rig = make_rig(1)
    side: Any = rig.scheduler._scheduler
    rig.requests["0"].block_hashes.append(b"0" * 32)
    rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(side._core, "due", lambda *_: 1 / 0)
        while rig.requests["0"].num_computed_tokens < BLOCK_TOKENS - 1:
            rig.step()
    rig.step()
    assert [len(job.keys) for job in rig.metadata.saves] == [1]
