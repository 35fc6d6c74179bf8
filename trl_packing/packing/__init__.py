"""The pack plan on plain integers: best fit, shuffled best fit, splitting and streaming. Needs numpy, not torch."""

from .cut import Fragments
from .plan import Bins, PackPlan, split_bins
from .planner import epoch_generator, plan_batches, plan_packs
from .stream import StreamPacker, stream_packs

__all__ = [
    "Bins",
    "Fragments",
    "PackPlan",
    "StreamPacker",
    "epoch_generator",
    "plan_batches",
    "plan_packs",
    "split_bins",
    "stream_packs",
]
