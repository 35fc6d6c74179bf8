"""One adapter config from TRL's `lora_*` keys and the `lora_config` mapping, which reaches everything PEFT has."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependencyError, PackingError
from .values import fit_fields

if TYPE_CHECKING:
    from peft import PeftConfig
    from trl import ModelConfig

# The names that TRL gives to PEFT's fields, for a message that meets the user where he is.
_TRL_NAMES = {
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
}


def build_lora(model_args: ModelConfig, lora_config: Mapping[str, Any] | None = None) -> PeftConfig | None:
    """
    Build the adapter config: TRL's, overlaid with `lora_config`.

    Args:
        model_args (`trl.ModelConfig`):
            TRL's `use_peft` and `lora_*` settings.
        lora_config (`Mapping[str, Any]`, *optional*):
            Fields of `peft.LoraConfig` by PEFT's own names. They win over TRL's, and an empty mapping already switches
            adapters on.

    Returns:
        `peft.PeftConfig` or `None`: `None` if neither `use_peft` nor `lora_config` is given.

    Raises:
        [`PackingError`]: If PEFT does not know a key, with the nearest one, or refuses a value, or if `lora_dropout`
            is set together with `target_parameters`, which PEFT would refuse only after the model is loaded.
        [`MissingDependencyError`]: If the initialisation asked for needs a package that is not installed.
    """
    if lora_config is None and not model_args.use_peft:
        return None
    from peft import LoraConfig
    from trl import get_peft_config

    for ours, theirs in _TRL_NAMES.items():
        if ours in (lora_config or {}):
            raise PackingError(f"`lora_config` takes PEFT's names: write `{theirs}` in place of `{ours}`.")
    changes = fit_fields(LoraConfig, lora_config or {}, "`lora_config`")
    switched_on = copy.copy(model_args)
    switched_on.use_peft = True
    switched_on.lora_target_modules = _as_names(model_args.lora_target_modules)
    try:
        config = dataclasses.replace(get_peft_config(switched_on), **changes)
    except (ValueError, TypeError) as error:
        raise PackingError(f"PEFT refuses the adapter settings: {' '.join(str(error).split())}") from error
    except ImportError as error:
        # Some initialisations need a package of their own, which PEFT names.
        raise MissingDependencyError(f"The adapter settings need a package: {error}") from error
    if config.r < 1:
        raise PackingError(f"The rank of an adapter is at least 1, but `r` is {config.r}.")
    if config.target_parameters and config.lora_dropout:
        raise PackingError(
            f"PEFT has no dropout for `target_parameters`, but `lora_dropout` is {config.lora_dropout}. Set it to 0.0."
        )
    return config


def _as_names(targets: list[str] | str | None) -> list[str] | str | None:
    """
    Undo what TRL makes of a list with one name: a text, which PEFT takes for a regular expression over whole names.

    As such an expression, a bare name would match no module of any model.
    """
    if isinstance(targets, str) and targets != "auto" and re.fullmatch(r"[\w.]+", targets):
        return [targets]
    return targets
