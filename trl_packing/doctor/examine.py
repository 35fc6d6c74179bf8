"""One model: what each of its layers will run for a packed row, and whether its samples stay apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from trl import ModelConfig, get_quantization_config

from ..config import PackedSFTConfig
from ..errors import LeakError, MissingDependencyError, PackingError
from ..isolation import IsolationReport, check_isolation
from ..preflight import check_model, choose_attention
from ..quickstart import resolve_model
from ..quickstart.tiny import tiny_config
from ..recipe.build import check_model_name, model_errors
from ..recipe.config import RecipeArguments, build_lora
from ..register import register_ops
from ..register.dispatch import LayerChoice, describe_layers
from .load import load_model


@dataclass(frozen=True, eq=False)
class ModelReport:
    """
    What was found on one model.

    Args:
        name (`str`):
            As the user gave it, or the architecture of a tiny one.
        dtype (`str`), device (`str`):
            Of the weights.
        attention (`str`), attention_reason (`str`):
            The implementation, and why it is this one.
        model (`str`):
            Its class.
        weights (`str`):
            Whether they are real, and of which layers.
        layers (`tuple[LayerChoice, ...]`):
            For each kind of layer with operations of its own, what they will run and why.
        adapters (`str`):
            What is trained, or nothing without adapters.
        isolation ([`IsolationReport`], *optional*):
            The proof. `None` if it could not be run.
        problem (`str`, *optional*):
            Why the model would not be trained on packed rows, in one sentence.
    """

    name: str
    dtype: str
    device: str
    attention: str
    attention_reason: str
    model: str = ""
    weights: str = ""
    layers: tuple[LayerChoice, ...] = ()
    adapters: str = ""
    isolation: IsolationReport | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether samples are proven to stay apart."""
        return self.problem is None and self.isolation is not None and self.isolation.ok

    def to_dict(self) -> dict[str, Any]:
        """Give everything as JSON values."""
        plain = replace(self, isolation=None)
        return {
            **asdict(plain),
            "ok": self.ok,
            "isolation": None if self.isolation is None else self.isolation.to_dict(),
        }


def examine_tiny(architecture: str, *, influence: bool = False) -> ModelReport:
    """
    Check a tiny random model of an architecture.

    Args:
        architecture (`str`):
            A name that [`tiny_config`] takes.
        influence (`bool`, *optional*, defaults to `False`):
            Whether to measure what the picture needs.

    Returns:
        [`ModelReport`]: Of the device that trains here, in bfloat16 on a GPU and float32 elsewhere.
    """
    device, config = _device(), tiny_config(architecture)
    dtype = _usual_dtype(device)

    def load(attention: str) -> tuple[nn.Module, str]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        return model.to(device), "tiny, random weights"

    return _examine(architecture, config, load, dtype=dtype, device=device, influence=influence)


def examine_model(name: str, *, influence: bool = False) -> ModelReport:
    """
    Check a model as it would be trained with the defaults.

    Args:
        name (`str`):
            Hub id, folder, or a name of the quickstart.
        influence (`bool`, *optional*, defaults to `False`):
            Whether to measure what the picture needs.

    Returns:
        [`ModelReport`]: In bfloat16 on a GPU and float32 elsewhere.

    Raises:
        [`PackingError`]: If there is no such model.
    """
    device, folder = _device(), resolve_model(name)
    config, dtype = _read_config(folder), _usual_dtype(device)

    def load(attention: str) -> tuple[nn.Module, str]:
        return load_model(folder, config, device, dtype=dtype, attn_implementation=attention)

    return _examine(name, config, load, dtype=dtype, device=device, influence=influence)


def examine_run(
    script_args: RecipeArguments, training_args: PackedSFTConfig, model_args: ModelConfig, *, influence: bool = False
) -> ModelReport:
    """
    Check the model of a run with the run's settings: dtype, autocast, attention, operations and adapters.

    Args:
        script_args ([`RecipeArguments`]), training_args ([`PackedSFTConfig`]), model_args ([`~trl.ModelConfig`]):
            The run's settings.
        influence (`bool`, *optional*, defaults to `False`):
            Whether to measure what the picture needs.

    Returns:
        [`ModelReport`]: As the run would start on this machine.

    Raises:
        [`PackingError`]: If there is no such model, or a setting cannot be used.
    """
    if not model_args.model_name_or_path:
        raise PackingError("There is nothing to check, because `model_name_or_path` is not set.")
    device, folder = training_args.device, resolve_model(model_args.model_name_or_path)
    origin = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
    config = _read_config(folder, **origin)
    lora = script_args.lora_config
    assert not isinstance(lora, str)
    peft_config = build_lora(model_args, lora)
    dtype = config.dtype if model_args.dtype in ("auto", None) else getattr(torch, str(model_args.dtype))
    extra = (
        origin | {"quantization_config": get_quantization_config(model_args)} | (training_args.model_init_kwargs or {})
    )
    wanted = extra.pop("attn_implementation", None) or model_args.attn_implementation

    def load(attention: str) -> tuple[nn.Module, str]:
        return load_model(folder, config, device, **{"dtype": dtype, "attn_implementation": attention, **extra})

    half = torch.bfloat16 if training_args.bf16 else torch.float16 if training_args.fp16 else None
    return _examine(
        model_args.model_name_or_path,
        config,
        load,
        dtype=dtype,
        device=device,
        influence=influence,
        attention=None if wanted == "auto" else wanted,
        ops=training_args.ops,
        peft_config=peft_config,
        autocast=nullcontext() if half is None else torch.autocast(device.type, half),
    )


def _examine(
    name: str,
    config: PretrainedConfig,
    load: Callable[[str], tuple[nn.Module, str]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    influence: bool,
    attention: str | None = None,
    ops: str = "auto",
    peft_config: Any = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> ModelReport:
    register_ops()
    choice, reason = (attention, "as set") if attention else choose_attention(config, dtype, device)
    report = ModelReport(name, str(dtype).removeprefix("torch."), device.type, choice, reason)
    try:
        model, weights = load(choice)
        report = replace(report, model=type(model).__name__, weights=weights)
        register_ops(model, ops=ops)
        report = replace(report, layers=tuple(describe_layers(model, ops)))
        peft_config = check_model(model, peft_config)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
            trained, total = model.get_nb_trainable_parameters()
            report = replace(report, adapters=f"{trained:,} of {total:,} parameters are trained")
        with autocast or nullcontext():
            return replace(report, isolation=check_isolation(model, influence=influence, host_offsets=True))
    except (PackingError, LeakError, MissingDependencyError) as error:
        return replace(report, problem=str(error))
    # A kernel that fails on this machine, too little memory: the doctor is there to say so.
    except Exception as error:
        return replace(report, problem=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _read_config(folder: str, **origin: Any) -> PretrainedConfig:
    check_model_name(folder)
    with model_errors(folder):
        return AutoConfig.from_pretrained(folder, **origin)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
