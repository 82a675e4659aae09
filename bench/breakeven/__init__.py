"""Break-even measurement: prompt length from which a KV transfer is faster than recomputation.

Run it with `python -m bench.breakeven`. `measure` acts as an engine of a running server
(`transfer`), times new prompts on a prefill engine (`compute`) and proposes a threshold (`fit`).
All blocks that it stores on the server are removed with their hold.
"""

from .compute import PrefillEngine
from .errors import BreakEvenError, PeerUnreachable
from .fit import Proposal, RegressionLine, Samples, fit, propose, worst_miss
from .geometry import Geometry, geometry_of_engines, lengths_up_to
from .measure import ComputeTimes, MeasurementPlan, Report, TransferTimes, measure
from .transfer import TransferRig

__all__ = [
    "BreakEvenError",
    "ComputeTimes",
    "Geometry",
    "MeasurementPlan",
    "PeerUnreachable",
    "PrefillEngine",
    "Proposal",
    "RegressionLine",
    "Report",
    "Samples",
    "TransferRig",
    "TransferTimes",
    "fit",
    "geometry_of_engines",
    "lengths_up_to",
    "measure",
    "propose",
    "worst_miss",
]
