"""What a plan does to the data, before a token is trained: as numbers, text, JSON and a picture."""

from .plan import PlanReport, padded_batches, simulated_steps
from .text import fates_text

__all__ = ["PlanReport", "fates_text", "padded_batches", "simulated_steps"]
