"""`kvtier evict`: makes a running server evict blocks, and prints how many it evicted."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from typing import TypeVar

from ...client.errors import KVTierError
from ...protos.durations import duration_of
from ...protos.endpoint import EndpointError, client_endpoint
from ...protos.v1.admin_pb2 import EvictRequest, EvictResponse
from ..config.units import human_size, parse_duration, parse_size
from .admin_client import follow, plain_console, refuse_error
from .console import EXIT_FAILURE, EXIT_USAGE, print_line, refuse
from .progress import progress_bar
from .tables import ResponsiveTable

__all__ = ["FIGURES", "run"]

Number = TypeVar("Number", int, float)

_CONDITIONS = ("tier", "tenant", "namespace", "older_than", "bytes")
FIGURES = ("tier", "blocks", "bytes", "kept_blocks", "kept_bytes")
"""Fields in the JSON output for each tier."""


def run(options: argparse.Namespace) -> int:
    conditions = [name for name in _CONDITIONS if getattr(options, name) not in (None, [])]
    if conditions and options.all:
        flag = conditions[0].replace("_", "-")
        return refuse([f"--all cannot be combined with --{flag}"], EXIT_USAGE)
    if not conditions and not options.all:
        return refuse(["give at least one condition, or --all"], EXIT_USAGE)
    try:
        request = _request(options)
    except ValueError as error:
        return refuse([f"{error}"], EXIT_USAGE)
    try:
        result = _evict(options, request)
    except (EndpointError, KVTierError) as error:
        return refuse_error(error)
    if result is None:
        return EXIT_FAILURE
    if options.json:
        tiers = [{name: getattr(tier, name) for name in FIGURES} for tier in result.tiers]
        print_line(json.dumps({"dry_run": options.dry_run, "done": result.done, "tiers": tiers}, indent=2))
    else:
        plain_console().print(_table(result, dry_run=options.dry_run))
    return 0 if result.done else refuse(["interrupted; the blocks counted above were evicted"], EXIT_FAILURE)


def _evict(options: argparse.Namespace, request: EvictRequest) -> EvictResponse | None:
    """Returns the last answer. After Ctrl-C its field `done` is False."""
    result = None
    steps = follow(client_endpoint(options.endpoint), "Evict", request, options.timeout)
    with progress_bar("evict") as progress, contextlib.closing(steps), contextlib.suppress(KeyboardInterrupt):
        for result in steps:
            if progress:
                progress(sum(tier.looked_at for tier in result.tiers), sum(tier.total for tier in result.tiers))
    return result


def _request(options: argparse.Namespace) -> EvictRequest:
    """Returns the request for these options. Raises `ValueError` if a flag is invalid."""
    request = EvictRequest(
        tiers=options.tier, tenant=options.tenant, include_retained=options.retained, dry_run=options.dry_run
    )
    if options.namespace is not None:
        try:
            request.namespace_id = bytes.fromhex(options.namespace)
        except ValueError:
            raise ValueError(f"--namespace {options.namespace}: must be 32 hexadecimal digits") from None
    if options.older_than is not None:
        request.unused_for.CopyFrom(duration_of(_positive("--older-than", options.older_than, parse_duration)))
    if options.bytes is not None:
        request.max_bytes = _positive("--bytes", options.bytes, parse_size)
    return request


def _positive(flag: str, text: str, read: Callable[[str], Number]) -> Number:
    try:
        value = read(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from None
    if not value:
        raise ValueError(f"{flag} {text}: must be more than 0")
    return value


def _table(result: EvictResponse, *, dry_run: bool) -> ResponsiveTable:
    title = "to evict" if dry_run else "evicted"
    table = ResponsiveTable("tier", numbers=(title, "size", "kept (pinned, in transfer, retained)", "size"))
    for tier in result.tiers:
        table.add_row(
            tier.tier,
            f"{tier.blocks:,} blocks",
            human_size(tier.bytes),
            f"{tier.kept_blocks:,} blocks",
            human_size(tier.kept_bytes),
        )
    return table
