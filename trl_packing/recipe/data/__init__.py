"""Load the samples that a recipe names, and check them before a model is loaded."""

from .load import load_data
from .samples import validate_samples

__all__ = ["load_data", "validate_samples"]
