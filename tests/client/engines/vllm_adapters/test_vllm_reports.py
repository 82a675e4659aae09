"""Reports of a worker: each load once, also if it has several jobs."""

from __future__ import annotations

import pytest

from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.reports import WorkerReports
from kvtier.client.offload import LoadJob


def _taken(reports: WorkerReports) -> tuple[set[str], set[str]]:
    results = reports.take_results(idle=True)
    return set(results.finished_recving or ()), set(results.failed_recving or ())


@pytest.mark.parametrize("failed", [None, 0, 1, 2])
def test_a_load_is_reported_after_its_last_job(failed: int | None) -> None:
    """It has failed if one of its jobs has failed, whichever."""
    reports = WorkerReports()
    for number in range(3):
        reports.load_begun(LoadJob("r", is_last=number == 2))
        assert _taken(reports) == (set(), set())
        reports.load_ended("r", failed=number == failed)
    assert _taken(reports) == ({"r"}, set() if failed is None else {"r"})
    assert _taken(reports) == (set(), set())


def test_a_refused_last_job_waits_for_jobs_that_run() -> None:
    """VLLM may reuse the blocks after the report, and an earlier job may still write to them."""
    reports = WorkerReports()
    reports.load_begun(LoadJob("r", is_last=False))
    reports.refuse_loads(StepMetadata([LoadJob("r"), LoadJob("other")]))
    assert _taken(reports) == ({"other"}, {"other"})
    reports.load_ended("r", failed=False)
    assert _taken(reports) == ({"r"}, {"r"})
