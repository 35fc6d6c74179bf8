"""After the first optimiser step: how many adapters received a gradient, by layer kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..errors import PackingError


@dataclass(frozen=True)
class GradientRow:
    """
    The adapters of one kind of layer.

    Args:
        kind (`str`):
            Layer class and projection, such as `"LlamaAttention.q_proj"`.
        num_adapters (`int`):
            Adapters of this kind.
        num_trained (`int`):
            Those that received a gradient.
        num_trainable (`int`):
            Trainable parameters of these adapters.
        trainable_share (`float`):
            The same over all parameters of the model, in [0, 1].
    """

    kind: str
    num_adapters: int
    num_trained: int
    num_trainable: int
    trainable_share: float


@dataclass(frozen=True)
class AdapterGradients:
    """
    Which adapters train, by kind of layer. Made by [`adapter_gradients`].

    Args:
        rows (`tuple[GradientRow, ...]`):
            One for each kind of layer, in the model's order.
        dead (`tuple[str, ...]`):
            Names of the adapters that received no gradient.
    """

    rows: tuple[GradientRow, ...]
    dead: tuple[str, ...]

    def to_text(self) -> str:
        """Give the table as lines of at most 80 columns."""
        lines = [f"{'adapted layer':<44}{'adapters':>9}{'trained':>9}{'parameters':>18}"]
        for row in self.rows:
            parameters = f"{row.num_trainable:,} {row.trainable_share:.2%}"
            lines.append(f"{row.kind[:43]:<44}{row.num_adapters:>9,}{row.num_trained:>9,}{parameters:>18}")
        return "\n".join(lines)

    def raise_if_dead(self) -> None:
        """
        Stop a run in which an adapter trains nothing.

        Raises:
            [`PackingError`]: Naming the adapters.
        """
        if not self.dead:
            return
        names = ", ".join(f"`{name}`" for name in self.dead[:3])
        rest = f" and {len(self.dead) - 3} more" if len(self.dead) > 3 else ""
        raise PackingError(
            f"{len(self.dead)} adapters received no gradient in the first optimiser step: {names}{rest}. Nothing "
            "calls these modules in training, so they would be saved as they started. Set "
            "`lora_target_modules: auto`, or remove them from `target_modules`."
        )


def adapter_gradients(model: nn.Module) -> AdapterGradients:
    """
    Count the adapters that received a gradient.

    An adapter is judged by B: A has no gradient as long as B is zero. Once gradients have been set to `None`, an
    adapter counts as trained if its B is not zero, which tells nothing about adapters that do not start from zero.

    Args:
        model (`nn.Module`):
            With adapters, after the backward of the first optimiser step; best before gradients are cleared. Under
            distributed training every rank calls this, and an adapter counts that trained on any of them.

    Returns:
        [`AdapterGradients`]: Also for other tuners of PEFT, judged by all their parameters.

    Raises:
        [`PackingError`]: If the model has no adapters.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    layers = {name: layer for name, layer in layers.items() if any(p.requires_grad for p in _own_parameters(layer))}
    if not layers:
        raise PackingError(f"{type(model).__name__} has no trainable adapters. Wrap it with PEFT first.")
    judges = {name: _judged_by(layer) for name, layer in layers.items()}
    by_gradient = any(p.grad is not None for parameters in judges.values() for p in parameters)
    trained = _on_any_rank([any(_moved(p, by_gradient) for p in judges[name]) for name in layers], judges)
    total = sum(_numel(p) for p in model.parameters())
    kinds: dict[str, list[tuple[int, bool]]] = {}
    for (name, layer), is_trained in zip(layers.items(), trained, strict=True):
        size = sum(_numel(p) for p in _own_parameters(layer) if p.requires_grad)
        kinds.setdefault(_kind_of(model, name, layer), []).append((size, is_trained))
    rows = []
    for kind, entries in kinds.items():
        size = sum(size for size, _ in entries)
        num_trained = sum(is_trained for _, is_trained in entries)
        rows.append(GradientRow(kind, len(entries), num_trained, size, size / total))
    # Tokens that are trained one by one get a gradient in the steps in which they occur.
    dead = tuple(
        _plain(name, layers[name])
        for name, is_trained in zip(layers, trained, strict=True)
        if not is_trained and not isinstance(layers[name], TrainableTokensLayer)
    )
    return AdapterGradients(tuple(rows), dead)


def _own_parameters(layer: BaseTunerLayer, names: Iterable[str] | None = None) -> list[nn.Parameter]:
    """Parameters of the adapter itself: the layer below it, which may be another adapter, stays out."""
    parameters: list[nn.Parameter] = []
    for name in layer.adapter_layer_names if names is None else names:
        holder = getattr(layer, name, None)
        if isinstance(holder, nn.Module):
            parameters += holder.parameters()
    return parameters


def _judged_by(layer: BaseTunerLayer) -> list[nn.Parameter]:
    # An embedding's adapter starts with A at zero, every other one with B.
    b = [p for p in _own_parameters(layer, ("lora_B", "lora_embedding_A")) if p.requires_grad]
    return b or [p for p in _own_parameters(layer) if p.requires_grad]


def _moved(parameter: nn.Parameter, by_gradient: bool) -> bool:
    value = parameter.grad if by_gradient else parameter.detach()
    if value is None:
        return False
    # ZeRO-3 leaves an empty parameter and this rank's part beside it; FSDP2 a tensor that knows its part.
    value = getattr(parameter, "ds_tensor", value) if value.numel() == 0 else value
    value = value.to_local() if hasattr(value, "to_local") else value
    return bool(value.any())


def _on_any_rank(flags: list[bool], judges: dict[str, list[nn.Parameter]]) -> list[bool]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flags
    device = next(iter(judges.values()))[0].device
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _plain(name: str, layer: BaseTunerLayer) -> str:
    name = name.removeprefix("module.").removeprefix("base_model.model.").replace(".base_layer", "")
    parameter = getattr(layer, "parameter_name", None)
    return f"{name}.{parameter}" if parameter else name


def _kind_of(model: nn.Module, name: str, layer: BaseTunerLayer) -> str:
    parameter = getattr(layer, "parameter_name", None)
    if parameter:
        return f"{type(layer.get_base_layer()).__name__}.{parameter}"
    parent, _, leaf = name.rpartition(".")
    return f"{type(model.get_submodule(parent)).__name__}.{leaf}"
