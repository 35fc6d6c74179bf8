"""Packed rows against the same samples alone: logits, gradients, and what one segment does to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trl_packing import Boundaries

IGNORED = -100


def token_ids(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 128) -> torch.Tensor:
    """Random token ids of shape `[1, T]`, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (1, sum(lengths)), generator=generator)


def packed_logits(model: nn.Module, ids: torch.Tensor, lengths: Sequence[int], **kwargs: Any) -> torch.Tensor:
    """Logits of shape `[1, T, V]` of one packed row with all boundary keywords."""
    boundaries = Boundaries.from_lengths(lengths).to_model_kwargs(host_offsets=kwargs.pop("host_offsets", False))
    return model(input_ids=ids, use_cache=False, **boundaries, **kwargs).logits


def alone_logits(model: nn.Module, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Logits of shape `[1, T, V]` of the same samples one by one, without any boundary keyword."""
    samples = ids.split(list(lengths), dim=1)
    return torch.cat([model(input_ids=sample, use_cache=False).logits for sample in samples], dim=1)


def summed_loss(logits: torch.Tensor, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sum of the next-token losses inside segments."""
    targets = ids.clone()
    targets[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = IGNORED
    return F.cross_entropy(logits[0, :-1].float(), targets[0, 1:], ignore_index=IGNORED, reduction="sum")


def gradients_of(model: nn.Module, forward: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of a scalar with respect to every trainable parameter, which are left without gradients."""
    model.zero_grad()
    forward().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of gradients, relative to the largest gradient of the second."""
    assert found.keys() == wanted.keys()
    scale = max(gradient.abs().max() for gradient in wanted.values())
    return max(((found[name] - wanted[name]).abs().max() / scale).item() for name in wanted)


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value of the second tensor."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def largest_influence(model: nn.Module, ids: torch.Tensor, lengths: Sequence[int]) -> float:
    """How far the logits of any segment move when the tokens of another one change, relative to the largest logit."""
    sizes = list(lengths)
    with torch.no_grad():
        before = packed_logits(model, ids, sizes).split(sizes, dim=1)
        largest = 0.0
        for changed in range(len(sizes)):
            samples = list(ids.split(sizes, dim=1))
            samples[changed] = 4 + (samples[changed] - 4 + 7) % 124
            after = packed_logits(model, torch.cat(samples, dim=1), sizes).split(sizes, dim=1)
            moved = [(new - old).abs().max().item() for new, old in zip(after, before, strict=True)]
            largest = max([largest, *moved[:changed], *moved[changed + 1 :]])
    return largest / max(segment.abs().max().item() for segment in before)


def largest_foreign_gradient(model: nn.Module, ids: torch.Tensor, lengths: Sequence[int]) -> float:
    """Largest gradient of a segment's logits at another segment's input embeddings."""
    sizes, embedded = list(lengths), []
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = packed_logits(model, ids, sizes)
    handle.remove()
    largest = 0.0
    for own, segment in enumerate(logits.split(sizes, dim=1)):
        weights = torch.linspace(-1, 1, segment.numel()).view_as(segment)
        (gradient,) = torch.autograd.grad((segment * weights).sum(), embedded[-1], retain_graph=True)
        parts = [part.abs().max().item() for part in gradient.split(sizes, dim=1)]
        assert parts[own] > 0
        largest = max([largest, *parts[:own], *parts[own + 1 :]])
    return largest
