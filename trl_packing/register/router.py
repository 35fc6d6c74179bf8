"""
The load-balancing loss of experts, over real tokens only.

TRL reads from `attention_mask` which tokens count. Packed rows have none, so it would count alignment tokens and
filler rows, and read the device once per layer to do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.mixtral import modeling_mixtral

from ..boundaries import Boundaries


@contextmanager
def balancing_tokens(config: Any, boundaries: Boundaries | None, *, is_filler: bool = False) -> Iterator[None]:
    """
    Let forwards with `fused_lm_head=True` balance experts over a batch's real tokens, inside this context.

    Args:
        config (`transformers.PretrainedConfig`):
            The model's text configuration. TRL reads the number of experts from it, under one of the names in use.
        boundaries ([`Boundaries`], *optional*):
            Of the packed row, whose alignment tokens do not count. Without them TRL's attention mask decides.
        is_filler (`bool`, *optional*, defaults to `False`):
            Whether the batch has no sample at all: its loss is 0.
    """
    # TRL's fused head looks this function up in every call, for all kinds of experts.
    balancing_loss = modeling_mixtral.load_balancing_loss_func

    def over_real_tokens(
        router_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        # A model of this kind without a single layer of experts.
        if not router_logits:
            return 0.0
        logits = router_logits[0]
        if boundaries is not None:
            attention_mask = torch.ones(logits.shape[0], device=logits.device)
            attention_mask[boundaries.num_real_tokens :] = 0.0
        # Routers may have more to choose from than experts: a token can also skip them.
        loss = balancing_loss(router_logits, logits.shape[-1], top_k, attention_mask)
        return loss * 0.0 if is_filler else loss

    modeling_mixtral.load_balancing_loss_func = over_real_tokens
    lent = {name: value for name, value in _names_of_trl(config).items() if not hasattr(config, name)}
    for name, value in lent.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        modeling_mixtral.load_balancing_loss_func = balancing_loss
        for name in lent:
            delattr(config, name)


def has_routers(model: nn.Module) -> bool:
    """
    Say whether a model has a layer whose router's logits it would return. Some sizes of a family of experts are dense.

    Args:
        model (`nn.Module`):
            Loaded, with or without adapters.

    Returns:
        `bool`: Also true for a model that does not declare which layers those are.
    """
    kinds = {type(module) for module in model.modules()}
    recorders: list[Any] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        recorders += recorded if isinstance(recorded, list | tuple) else [recorded]
    targets = [getattr(recorder, "target_class", recorder) for recorder in recorders]
    if not targets or not all(isinstance(target, type) for target in targets):
        return True
    return any(issubclass(kind, target) for kind in kinds for target in targets)


def _names_of_trl(config: Any) -> dict[str, Any]:
    # The number of experts is only read: the router's logits tell how many there are.
    return {
        "num_experts": None,
        "num_experts_per_tok": getattr(getattr(config, "ffn_config", None), "moe_top_k", None),
    }
