"""Offline, one thread per process, and registries as they were after every test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _undo_registrations():
    yield
    from trl_packing import unregister_ops

    unregister_ops()


@pytest.fixture
def varlen():
    """Register the `varlen` attention for a test."""
    from trl_packing import register_ops

    register_ops()
    return "varlen"
