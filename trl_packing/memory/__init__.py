"""How much memory a run needs on each GPU: an estimate by formula, before a weight is loaded."""

from .estimate import MemoryEstimate, estimate_memory
from .measure import measured_peak

__all__ = ["MemoryEstimate", "estimate_memory", "measured_peak"]
