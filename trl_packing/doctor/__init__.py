"""
`trl-packing doctor`: what is installed here, what the layers of a model will run, and the proof that samples stay
apart.
"""

from .command import main
from .environment import Entry, read_environment
from .report import DoctorReport

__all__ = ["DoctorReport", "Entry", "main", "read_environment"]
