"""The other side of the estimate: what PyTorch's CPU allocator really hands out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured_peak(function: Callable[[], Any]) -> int:
    """
    Measure the most memory that a call holds at a time, by every allocation and release on the CPU.

    Args:
        function (`Callable`):
            What to run. Memory that it takes over from before doesn't count, so it should build its own model.

    Returns:
        `int`: Bytes. The same on every run: no clock and no sampling is involved.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in results if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak
