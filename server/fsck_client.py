"""`kvtier fsck --online`: asks a running server to check its tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines would stand beside ours

import grpc

from ..protos.endpoint import Endpoint
from ..protos.v1 import admin_pb2, admin_pb2_grpc
from ..tiers.fsck import Finding
from .fsck import TierReport
from .inquiry import explain
from .status import fetch

__all__ = ["check_by_server"]

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # A host that vanishes is noticed, however long the check takes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


def check_by_server(
    endpoint: Endpoint, tiers: Sequence[str], *, repair: bool, rate: int, timeout: float
) -> Iterator[tuple[TierReport, int, list[Finding]]]:
    """Yields, step after step, the report of the tier so far, about how many blocks it has, and what the step found.

    `timeout` seconds are waited for the server to answer at all. A check that ends early says so in the last report.

    Raises:
        InquiryError: the server refuses, or none answers.
    """
    request = admin_pb2.FsckRequest(repair=repair, tiers=tiers, max_rate_bytes=rate)
    fetch(endpoint, timeout)
    with grpc.insecure_channel(endpoint.target, options=_OPTIONS) as channel:
        report = None
        try:
            for step in admin_pb2_grpc.AdminServiceStub(channel).Fsck(request):
                if report is None or report.name != step.tier:
                    report = TierReport(step.tier, step.tier_type)
                found = _take_in(report, step)
                yield report, step.total_blocks, found
        except grpc.RpcError as error:
            explained = explain(error, endpoint, timeout)
            if report is None:
                raise explained from None
            report.error = f"{explained}"
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
