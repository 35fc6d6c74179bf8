"""The pack plan on plain integers: best fit, shuffled best fit, splitting and streaming. Needs numpy only, no torch."""

from .plan import Bins, PackPlan, epoch_generator, plan_batches, plan_packs, split_bins

__all__ = [
    "Bins",
    "PackPlan",
    "epoch_generator",
    "plan_batches",
    "plan_packs",
    "split_bins",
]
