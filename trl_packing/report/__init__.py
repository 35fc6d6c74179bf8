"""What a plan does to the data, before a token is trained: as numbers, text, JSON and a picture."""

from .plan import PlanReport, padded_batches, simulated_steps

__all__ = ["PlanReport", "padded_batches", "simulated_steps"]
