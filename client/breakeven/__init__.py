"""From how many tokens on it is worth having KV from another engine instead of computing it: ``kvtier bench --break-even``.

``measure`` is the door: it plays an engine against a running server (``transfer``), asks a prefill engine for prompts that nobody
knows (``compute``), and draws the conclusion (``fit``, which is pure). Everything that it puts on the server goes with its hold.
"""

from ..errors import BreakEvenError, NobodyAnswers
from .compute import PrefillEngine
from .fit import Proposal, RegressionLine, Samples, fit, propose, worst_miss
from .geometry import Geometry, geometry_of_engines, lengths_up_to
from .measure import ComputeTimes, MeasurementPlan, Report, TransferTimes, measure
from .transfer import TransferRig

__all__ = [
    "BreakEvenError",
    "ComputeTimes",
    "Geometry",
    "MeasurementPlan",
    "NobodyAnswers",
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
