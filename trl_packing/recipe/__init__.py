"""The recipe's parts: find and read a YAML, load the data, build the trainer, end the run."""

from .build import build_sft, finish_sft, parse_sft
from .config import usage_errors

__all__ = ["build_sft", "finish_sft", "parse_sft", "usage_errors"]
