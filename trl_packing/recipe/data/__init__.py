"""Load the samples that a recipe names, and check them before a model is loaded."""

from .load import load_data

__all__ = ["load_data"]
