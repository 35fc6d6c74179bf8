"""
LoRA that trains what it says: safe targets for `lora_target_modules: auto`, and no adapter that would train nothing.

- Before training, `check_lora_targets` builds the adapters on a copy without weights and compares with the request.
- After the first optimiser step, `adapter_gradients` counts the adapters that really received a gradient.
"""

from .check import LoraReport, check_lora_targets
from .gradients import AdapterGradients, GradientRow, adapter_gradients
from .targets import safe_lora_targets

__all__ = [
    "AdapterGradients",
    "GradientRow",
    "LoraReport",
    "adapter_gradients",
    "check_lora_targets",
    "safe_lora_targets",
]
