"""Report of the break-even benchmark: tables for a terminal, and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.server.commands.admin_client import plain_console
from kvtier.server.config.units import human_size

from .fit import Proposal, Samples
from .measure import ComputeTimes, Report, TransferTimes

__all__ = ["show", "to_json"]

_NOT_INCLUDED = (
    "load by other engines",
    "waiting in an engine's queue, and the scheduler steps until loaded blocks are noticed",
    "the copy between host memory and a device",
)


def to_json(report: Report) -> str:
    """Returns JSON with durations in seconds. Threshold null: no transfer is faster."""
    return json.dumps(
        {
            "kv_recompute_threshold": report.proposal.threshold,
            "verdict": _verdict(report.proposal),
            "interval": {"low": report.proposal.low, "high": report.proposal.high, "share": 0.9},
            "longest_tokens": report.longest,
            "transfer": _transfer_values(report.transferred),
            "compute": _compute_values(report.computed),
            "not_included": _NOT_INCLUDED,
        },
        indent=2,
    )


def show(report: Report, console: Console | None = None) -> None:
    console = console or plain_console()
    console.print(_samples_table(report))
    for line in (*_transfer_lines(report.transferred), *_compute_lines(report.computed), "", *_answer_lines(report)):
        console.print(line, markup=False)
    console.print(f"not in these figures: {'; '.join(_NOT_INCLUDED)}", markup=False)


def _verdict(proposal: Proposal) -> str:
    if proposal.threshold is None:
        return "never"
    return "from" if proposal.threshold else "always"


def _transfer_values(transferred: TransferTimes) -> dict[str, Any]:
    rate, geometry = transferred.bytes_per_second, transferred.geometry
    return {
        "transport": transferred.transport,
        "model": geometry.model or None,
        "kv_bytes_per_token": geometry.bytes_per_token,
        "block_tokens": geometry.step_tokens,
        "world_size": geometry.world_size,
        "fixed_seconds": transferred.line.fixed,
        "seconds_per_token": transferred.line.per_token,
        "tokens_per_second": _inverse(transferred.line.per_token),
        "bytes_per_second": rate,
        "memcpy_bytes_per_second": transferred.memcpy,
        "of_memcpy": None if rate is None else rate / transferred.memcpy,
        "worst_miss": transferred.miss,
        "samples": _sample_values(transferred.samples),
    }


def _compute_values(computed: ComputeTimes) -> dict[str, Any]:
    return {
        "measured": bool(computed.samples),
        "fixed_seconds": computed.line.fixed,
        "seconds_per_token": computed.line.per_token,
        "tokens_per_second": _inverse(computed.line.per_token),
        "worst_miss": computed.miss,
        "samples": _sample_values(computed.samples),
    }


def _sample_values(samples: Samples) -> list[dict[str, Any]]:
    return [{"tokens": tokens, "seconds": list(seconds)} for tokens, seconds in sorted(samples.items())]


def _inverse(seconds: float) -> float | None:
    return 1 / seconds if seconds > 0 else None


def _samples_table(report: Report) -> Table:
    table = Table("tokens", box=None, pad_edge=False, header_style="bold")
    for column in ("transfer", "fastest-slowest", "compute", "fastest-slowest"):
        table.add_column(column, justify="right")
    parts = (report.transferred.samples, report.computed.samples)
    for tokens in sorted(set(parts[0]) | set(parts[1])):
        table.add_row(f"{tokens:,}", *(cell for samples in parts for cell in _cells(samples.get(tokens, ()))))
    return table


def _cells(seconds: Any) -> tuple[str, str]:
    if not seconds:
        return "-", ""
    return f"{_ms(statistics.median(seconds))} ms", f"{_ms(min(seconds))}-{_ms(max(seconds))}"


def _transfer_lines(transferred: TransferTimes) -> Iterator[str]:
    geometry, rate, line = transferred.geometry, transferred.bytes_per_second, transferred.line
    whose = f"of {geometry.model}" if geometry.model else "as given"
    ranks = f", for each of {geometry.world_size} ranks" if geometry.world_size > 1 else ""
    yield f"KV {whose}: {human_size(geometry.bytes_per_token)} per token, {geometry.step_tokens} tokens per block{ranks}"
    if rate is None:
        speed = "no measurable time per token"
    else:
        part = rate / transferred.memcpy
        speed = f"{1 / line.per_token:,.0f} tokens/s, {rate / 1e9:.3g} GB/s ({part:.2f} of a copy in memory)"
    yield f"transfer over {transferred.transport}: {_ms(line.fixed)} ms and {speed}{_missed(transferred.miss)}"


def _compute_lines(computed: ComputeTimes) -> Iterator[str]:
    speed = f"{1 / computed.line.per_token:,.0f} tokens/s"
    if not computed.samples:
        yield f"compute: {speed}, as given"
        return
    fixed = f"{_ms(computed.line.fixed)} ms, a cost that each request has anyway,"
    yield f"compute: {fixed} and {speed}{_missed(computed.miss)}"


def _missed(miss: float) -> str:
    return f"; the fitted line deviates by up to {miss:.0%}"


def _answer_lines(report: Report) -> Iterator[str]:
    proposal = report.proposal
    match _verdict(proposal):
        case "never":
            yield "never worth it: computing a token takes less time than transferring it"
            yield "leave bidirectional_kv_xfer off"
        case "always":
            yield "always worth it: kv_recompute_threshold = 0"
        case _:
            yield f"worth it from {proposal.threshold:,} tokens on: kv_recompute_threshold = {proposal.threshold}"
    yield f"90 % interval, from the variation of the timings: {_tokens(proposal.low)} to {_tokens(proposal.high)}"
    beyond = [limit for limit in (proposal.threshold, proposal.low, proposal.high) if (limit or 0) > report.longest]
    if beyond:
        yield f"beyond {report.longest:,} tokens the result is extrapolated from the fitted lines"


def _tokens(limit: int | None) -> str:
    return "never" if limit is None else f"{limit:,}"


def _ms(seconds: float) -> str:
    """Formats milliseconds with three digits."""
    milliseconds = seconds * 1e3
    digits = 2 if milliseconds == 0 else max(0, 2 - math.floor(math.log10(abs(milliseconds))))
    return f"{milliseconds:,.{min(digits, 4)}f}"
