"""One break-even measurement: timings of transfers and prompts, and the proposed threshold."""

from __future__ import annotations

import statistics
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.client.errors import KVTierError, Unavailable
from kvtier.client.session.reconnect import TransportName
from kvtier.client.sync import Client
from kvtier.client.timeouts import Timeouts
from kvtier.protos.v1 import admin_pb2

from .compute import PrefillEngine
from .errors import BreakEvenError, PeerUnreachable
from .fit import Proposal, RegressionLine, Samples, fit, propose, worst_miss
from .geometry import CLIENT_NAME, Geometry, geometry_of_engines, lengths_up_to
from .transfer import TransferRig

__all__ = ["ComputeTimes", "MeasurementPlan", "Report", "TransferTimes", "measure"]

_CPU_TIER_PART = 8
"""The measurement uses at most this fraction, an eighth, of the CPU tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Parameters of a measurement.

    Attributes:
        endpoint: endpoint of the server.
        status: status of the server.
        compute: the engine to measure, or its known seconds per token.
        transport: as for `Client`.
        timeout: seconds to wait for the server.
        geometry: block geometry; None: that of the connected engines.
        model: model of the engine, if engines of several are connected.
        max_bytes: maximum bytes on the server at once.
        max_tokens: maximum length of prefix and prompt.
        rounds: number of measurements per length.
    """

    endpoint: str
    status: admin_pb2.GetStatusResponse
    compute: PrefillEngine | float
    transport: TransportName = "auto"
    timeout: float = 5.0
    geometry: Geometry | None = None
    model: str | None = None
    max_bytes: int = 256 << 20
    max_tokens: int = 4096
    rounds: int = 7


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Timings of transfers. `memcpy` is the limit of any transfer, in bytes per second."""

    transport: str
    geometry: Geometry
    samples: Samples
    line: RegressionLine
    miss: float
    memcpy: float

    @property
    def bytes_per_second(self) -> float | None:
        """Rate without the fixed costs of a transfer; None if the noise is too large."""
        return self.geometry.bytes_per_token / self.line.per_token if self.line.per_token > 0 else None


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Timings of prompts. There are no samples if the engine's rate was given."""

    samples: Samples
    line: RegressionLine
    miss: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a measurement."""

    transferred: TransferTimes
    computed: ComputeTimes
    proposal: Proposal

    @property
    def longest(self) -> int:
        """Maximum length in tokens for which both transfers and prompts were measured."""
        lengths = [max(self.transferred.samples), *([max(self.computed.samples)] if self.computed.samples else [])]
        return min(lengths)


def measure(plan: MeasurementPlan) -> Report:
    """Measures and proposes a threshold. Removes its blocks from the server.

    Raises:
        BreakEvenError: the measurement is impossible.
        PeerUnreachable: the server or the engine does not respond.
    """
    try:
        return _measure(plan)
    except Unavailable as error:
        raise PeerUnreachable(f"{plan.endpoint} does not answer (any more): {error}") from None
    except KVTierError as error:
        raise BreakEvenError(f"{plan.endpoint} refuses: {error}") from None


def _measure(plan: MeasurementPlan) -> Report:
    # The engine first: if it does not respond, the server gets no load.
    most = plan.compute.find_model() if isinstance(plan.compute, PrefillEngine) else None
    transferred = _transfers(plan)
    step = transferred.geometry.step_tokens
    if isinstance(plan.compute, PrefillEngine):
        computed = _prompts(plan.compute, min(plan.max_tokens, (most or plan.max_tokens + 1) - 1), step, plan.rounds)
        proposal = propose(transferred.samples, computed.samples, step)
    else:
        computed = ComputeTimes({}, RegressionLine(0.0, plan.compute))
        proposal = propose(transferred.samples, plan.compute, step)
    return Report(transferred, computed, proposal)


def _transfers(plan: MeasurementPlan) -> TransferTimes:
    geometry = plan.geometry or geometry_of_engines(plan.status, plan.model)
    with _client(plan, geometry) as client, TransferRig(client, geometry) as rig:
        rig.fill(plan.max_tokens, min(plan.max_bytes, plan.status.tiers[0].capacity_bytes // _CPU_TIER_PART))
        copies: list[float] = []
        samples = _interleaved(rig.lengths, plan.rounds, rig.read, lambda: copies.append(rig.copy()))
        line = fit(samples)
        memcpy = 1 / max(statistics.median(copies[1:]), 1e-15)
        return TransferTimes(client.transport or "none", geometry, samples, line, worst_miss(line, samples), memcpy)


def _client(plan: MeasurementPlan, geometry: Geometry) -> Client:
    client = Client(
        plan.endpoint,
        namespace=TransferRig.namespace(geometry),
        name=CLIENT_NAME,
        engine_id=f"kvtier-bench-{uuid.uuid4().hex[:8]}",
        transport=plan.transport,
        timeouts=Timeouts(connect=plan.timeout, call=plan.timeout),
    )
    try:
        client.wait_until_connected()
    except BaseException:
        client.close()
        raise
    return client


def _prompts(engine: PrefillEngine, max_tokens: int, step: int, rounds: int) -> ComputeTimes:
    lengths = lengths_up_to(max_tokens, step)
    if len(lengths) < 2:
        raise BreakEvenError(f"{engine.url} takes prompts of {max_tokens} tokens at most: too few to measure")
    samples = _interleaved(lengths, rounds, engine.prefill)
    line = fit(samples)
    if line.per_token <= 0:
        raise BreakEvenError(
            "what a token costs to compute is lost in the noise: measure longer prompts (--max-tokens), or more --rounds"
        )
    return ComputeTimes(samples, line, worst_miss(line, samples))


def _interleaved(
    lengths: list[int], rounds: int, action: Callable[[int], float], between: Callable[[], object] = lambda: None
) -> Samples:
    """Times each length once per round, so disturbances affect all equally. Round 0 warms up."""
    samples: dict[int, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        between()
        for tokens in lengths:
            seconds = action(tokens)
            if number:
                samples[tokens].append(seconds)
    return dict(samples)
