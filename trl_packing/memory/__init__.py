"""How much memory a run needs on each GPU: an estimate by formula, before a weight is loaded."""

from .estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
