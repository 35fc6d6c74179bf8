"""Before training: is what PEFT would adapt what was asked for, and would every adapter train?"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import PackingError
from .targets import is_linear, is_quantized, is_router, output_head_name
from .weights import passed_by

_WAY_OUT = "Set `lora_target_modules: auto`, which `safe_lora_targets(model)` resolves."


@dataclass(frozen=True)
class LoraReport:
    """
    What a PEFT config adapts, after [`check_lora_targets`] found nothing wrong with it.

    Args:
        adapters (`dict[str, int]`):
            Adapters by layer class and projection, such as `"LlamaAttention.q_proj"`.
        num_trainable (`int`):
            Trainable parameters.
        num_parameters (`int`):
            All parameters, adapters included.
        notes (`tuple[str, ...]`):
            What a user may not expect, one sentence each.
    """

    adapters: dict[str, int]
    num_trainable: int
    num_parameters: int
    notes: tuple[str, ...] = ()

    @property
    def trainable_share(self) -> float:
        """Trainable parameters over all parameters, in [0, 1]."""
        return self.num_trainable / max(1, self.num_parameters)

    def to_text(self) -> str:
        """Give the report as lines of at most 80 columns, notes apart."""
        lines = [f"{kind:<60}{count:>8,} adapters" for kind, count in self.adapters.items()]
        lines.append(f"{self.num_trainable:,} trainable parameters, {self.trainable_share:.3%} of all.")
        return "\n".join([*lines, *self.notes])


def check_lora_targets(model: nn.Module, peft_config: PeftConfig | None = None) -> LoraReport:
    """
    Refuse adapters that would train nothing, and targets that PEFT would change without a word.

    The adapters are built by PEFT itself, on a copy of the model that has no weights; the model is left alone.

    Args:
        model (`nn.Module`):
            A loaded transformers model after [`register_ops`], without adapters; or a [`~peft.PeftModel`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            What to adapt. Leave it out for a [`~peft.PeftModel`], which has one.

    Returns:
        [`LoraReport`]: What would be adapted.

    Raises:
        [`PackingError`]: For prompt and prefix tuning and aLoRA, whose tokens count per row; for an adapter on the
            output head or on a projection whose weight a kernel reads; for targets that PEFT refuses or would change;
            and for a router that `all-linear` drags in.

    Example:

    ```python
    >>> from peft import LoraConfig
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from trl_packing import check_lora_targets
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> report = check_lora_targets(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    >>> report.adapters
    {'LlamaAttention.q_proj': 1, 'LlamaAttention.o_proj': 1}

    ```
    """
    if isinstance(model, PeftModel):
        peft_config = peft_config or model.active_peft_config
        _refuse_virtual_tokens(peft_config)
        base, adapted = model.get_base_model(), model
    elif peft_config is None:
        raise PackingError("`check_lora_targets` needs a `peft_config` for a model without adapters. Pass one.")
    else:
        _refuse_virtual_tokens(peft_config)
        base, adapted = model, _adapt(without_weights(model), peft_config)
        _refuse_changed_targets(base, peft_config, adapted)
    modules = adapted.base_model.targeted_module_names
    _refuse_head(base, adapted, modules)
    _refuse_dead(base, modules)
    if peft_config.target_modules == "all-linear":
        _refuse_routers(base, modules)
    return _report(base, peft_config, adapted)


def without_weights(model: nn.Module) -> nn.Module:
    """
    Copy a model's structure on the meta device.

    Args:
        model (`nn.Module`):
            Any model. Quantised linear layers become plain ones of the same shape.

    Returns:
        `nn.Module`: Without data; a few MB for any size of model.
    """
    if isinstance(model, FSDPModule):
        # What `from_pretrained` has divided refuses to be copied, so it is built once more.
        model_class = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
        with torch.device("meta"):
            return model_class(copy.deepcopy(model.config))
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        # A parameter that ZeRO-3 has partitioned is empty and knows its shape by another name.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    for module in model.modules():
        if is_linear(module) and is_quantized(module):
            bias = getattr(module, "bias", None) is not None
            memo[id(module)] = nn.Linear(module.in_features, module.out_features, bias=bias, device="meta")
    return copy.deepcopy(model, memo)


def _adapt(skeleton: nn.Module, peft_config: PeftConfig) -> PeftModel:
    """Let PEFT build the adapters on a model without weights."""
    config = copy.deepcopy(peft_config)
    if hasattr(config, "init_lora_weights"):
        # Initialisations such as PiSSA decompose the weights, which are not here.
        config.init_lora_weights = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(skeleton, config, low_cpu_mem_usage=True)
    except (ValueError, NotImplementedError) as error:
        raise PackingError(
            f"PEFT cannot adapt {_model_name(skeleton)} with `target_modules` {_shown(peft_config)}: {error} "
            f"{_WAY_OUT}"
        ) from error


def _refuse_virtual_tokens(peft_config: PeftConfig) -> None:
    if peft_config.is_prompt_learning or peft_config.is_adaption_prompt:
        raise PackingError(
            f"{type(peft_config).__name__} adds virtual tokens once per row, and a packed row holds many samples, so "
            "all but the first would go without. Use LoRA."
        )
    if getattr(peft_config, "alora_invocation_tokens", None):
        raise PackingError(
            "`alora_invocation_tokens` (aLoRA) switches the adapter on at one position per row, and a packed row "
            "holds many samples. Remove it from the LoRA config."
        )


def _refuse_changed_targets(base: nn.Module, peft_config: PeftConfig, adapted: PeftModel) -> None:
    """Compare what PEFT built with what the config says, read the way PEFT documents it."""
    asked = _asked_modules(base, peft_config)
    if asked is None:
        return
    modules = set(adapted.base_model.targeted_module_names)
    parameters = adapted.base_model.targeted_parameter_names
    endings = getattr(peft_config, "target_parameters", None) or []
    unasked = [name for name in parameters if not any(_ends_with(name, ending) for ending in endings)]
    added, dropped = sorted(modules - asked) + unasked, sorted(asked - modules)
    if not added and not dropped:
        return
    changes = [f"adapt {_some(added)}"] * bool(added) + [f"leave out {_some(dropped)}"] * bool(dropped)
    raise PackingError(
        f"PEFT would not adapt what `target_modules` {_shown(peft_config)} asks for on {_model_name(base)}: it would "
        f"{' and '.join(changes)} (peft#3711). {_WAY_OUT} To adapt experts, name their parameters in "
        "`target_parameters`, with `lora_dropout: 0`."
    )


def _asked_modules(base: nn.Module, peft_config: PeftConfig) -> set[str] | None:
    """The modules that the config names, or None where it leaves the choice to PEFT."""
    if peft_config.target_modules is None:
        return set() if getattr(peft_config, "target_parameters", None) else None
    modules = dict(base.named_modules())
    if peft_config.target_modules == "all-linear":
        head = output_head_name(base)
        excluded = copy.copy(peft_config)
        excluded.target_modules = r".*"
        return {
            name
            for name, module in modules.items()
            if is_linear(module) and name != head and check_target_module_exists(excluded, name)
        }
    return {name for name in modules if name and check_target_module_exists(peft_config, name)}


def _refuse_head(base: nn.Module, adapted: PeftModel, modules: Collection[str]) -> None:
    head = output_head_name(base)
    if head in modules:
        raise PackingError(
            f"An adapter on the output head `{head}` would train nothing: the loss is computed from its weight "
            f"directly. Remove `{head}` from `target_modules`, or train it whole with `modules_to_save: [{head}]`."
        )
    embeddings = adapted.get_base_model().get_output_embeddings() if head else None
    if isinstance(embeddings, AuxiliaryTrainingWrapper) and not hasattr(embeddings, "bias"):
        raise PackingError(
            f"`trainable_token_indices` on embeddings that are tied to `{head}` wraps the head in a layer without a "
            "bias, which TRL's loss reads. Train both whole instead, with `modules_to_save: [embed_tokens]` and "
            "`ensure_weight_tying: true`."
        )


def _refuse_dead(base: nn.Module, modules: Collection[str]) -> None:
    readers = passed_by(base)
    dead = [name for name in modules if name in readers]
    if dead:
        leaves = ", ".join(f"`{leaf}`" for leaf in sorted({name.rsplit(".", 1)[-1] for name in dead}))
        raise PackingError(
            f"An adapter on {_some(dead)} would train nothing: {readers[dead[0]]}. Remove {leaves} from "
            f"`target_modules`, or list it in `exclude_modules`. {_WAY_OUT}"
        )


def _refuse_routers(base: nn.Module, modules: Collection[str]) -> None:
    routers = [name for name in modules if is_router(name, base.get_submodule(name))]
    if routers:
        raise PackingError(
            f"`all-linear` also adapts what chooses experts: {_some(routers)}. {_WAY_OUT} To adapt a router on "
            "purpose, name it in `target_modules`."
        )


def _report(base: nn.Module, peft_config: PeftConfig, adapted: PeftModel) -> LoraReport:
    tuner = adapted.base_model
    names = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    num_trainable, num_parameters = adapted.get_nb_trainable_parameters()
    notes = []
    if isinstance(peft_config.target_modules, list | set):
        module_names = [name for name, _ in base.named_modules()]
        unmatched = [t for t in peft_config.target_modules if not any(_ends_with(name, t) for name in module_names)]
        if unmatched:
            notes.append(
                f"No module of {_model_name(base)} is called {_some(sorted(unmatched))}: nothing is adapted there."
            )
    elif peft_config.target_modules is None and tuner.targeted_module_names:
        num_linear = sum(is_linear(module) for module in base.modules())
        notes.append(
            "`target_modules` is not set: PEFT's own choice adapts "
            f"{len(tuner.targeted_module_names)} of {num_linear} linear layers."
        )
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return LoraReport(
        dict(Counter(kind_of(base, name) for name in names)), num_trainable, num_parameters, tuple(notes)
    )


def kind_of(model: nn.Module, name: str) -> str:
    """Give layer class and projection of an adapter, such as `LlamaAttention.q_proj`."""
    parent, _, leaf = name.rpartition(".")
    return f"{type(model.get_submodule(parent)).__name__}.{leaf}"


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(f"`{name}`" for name in shown[:3]) + rest


def _shown(peft_config: PeftConfig) -> str:
    targets = peft_config.target_modules
    return f"`{targets}`" if isinstance(targets, str | None) else str(sorted(targets))


def _model_name(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} (`{model.config.model_type}`)" if hasattr(model, "config") else type(model).__name__
    )
