"""The trainer: TRL's, on packed rows."""

from .trainer import PackedSFTTrainer

__all__ = ["PackedSFTTrainer"]
