"""`kvtier fsck --online`: asks a running server to check its tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...protos.endpoint import Endpoint
from ...protos.v1 import admin_pb2
from ...tiers.storage.fsck import Finding
from ..tier_host.offline_fsck import TierReport
from .admin_client import InquiryError, follow

__all__ = ["check_by_server"]


def check_by_server(
    endpoint: Endpoint, tiers: Sequence[str], *, repair: bool, rate: int, timeout: float
) -> Iterator[tuple[TierReport, int, list[Finding]]]:
    """Yields, step after step, the report of the tier so far, about how many blocks it has, and what the step found.

    `timeout` seconds are waited for the server to answer at all. A check that ends early says so in the last report.

    Raises:
        InquiryError: the server refuses, or none answers.
    """
    request = admin_pb2.FsckRequest(repair=repair, tiers=tiers, max_rate_bytes=rate)
    report = None
    try:
        for step in follow(endpoint, "Fsck", request, timeout):
            if report is None or report.name != step.tier:
                report = TierReport(step.tier, step.tier_type)
            found = _take_in(report, step)
            yield report, step.total_blocks, found
    except InquiryError as error:
        if report is None:
            raise
        report.error = f"{error}"
        yield report, 0, []


def _take_in(report: TierReport, step: admin_pb2.FsckResponse) -> list[Finding]:
    found = [
        Finding(finding.namespace_id + finding.key, finding.size_bytes, finding.problem, finding.repaired)
        for finding in step.findings
    ]
    report.blocks, report.nbytes = step.blocks, step.checked_bytes
    report.findings += found
    report.note, report.error = step.note or None, step.error or None
    return found
