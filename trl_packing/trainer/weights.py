"""
A checkpoint's weights, put back whole.

The Trainer loads a checkpoint's tensors by name and ignores names that do not fit. `save_pretrained` renames and
splits tensors (experts one by one, Mixtral's old names), so a resumed run would go on with its initial weights.
"""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..errors import PackingError

_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_ADAPTER_WEIGHTS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)


def holds_weights(checkpoint: str | Path) -> bool:
    """Whether a checkpoint holds the weights of a whole model."""
    return _has_one_of(_WEIGHTS, Path(checkpoint))


def load_weights(model: PreTrainedModel, checkpoint: str | Path) -> None:
    """
    Load a checkpoint through the model class's own conversion.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Gets the weights in place, so that an optimiser keeps its parameters.
        checkpoint (`str` or `Path`):
            Folder that `save_pretrained` wrote.

    Raises:
        [`PackingError`]: If the checkpoint holds no tensor, or one of another shape, for a parameter of the model.
    """
    # The widest type that the model has, so that no parameter is rounded on its way.
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    loaded, info = type(model).from_pretrained(
        str(checkpoint),
        config=model.config,
        dtype=dtype,
        local_files_only=True,
        # Those are refused below, in words.
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    weights = {
        name: tensor
        for name, tensor in loaded.state_dict().items()
        if name not in info["missing_keys"] and name not in mismatched
    }
    parameters = {name for name, _ in model.named_parameters()}
    _refuse_missing([name for name in model.state_dict() if name in parameters and name not in weights], checkpoint)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor) and name in weights:
            # Divided by `distributed_config`. Every rank has read the file, so each takes its part.
            weights[name] = distribute_tensor(weights[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
    model.load_state_dict(weights, strict=False)


def check_adapter(model: PeftModel, checkpoint: str | Path) -> None:
    """
    Refuse a checkpoint whose adapter does not hold all that this run trains.

    Args:
        model ([`~peft.PeftModel`]):
            With adapters of this run's settings.
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.

    Raises:
        [`PackingError`]: If it holds no adapter, or no tensor for a parameter that is trained.
    """
    adapter = model.active_adapters[0]
    # An adapter of another name than "default" has a folder of its own.
    folders = [
        folder for folder in (Path(checkpoint), Path(checkpoint, adapter)) if _has_one_of(_ADAPTER_WEIGHTS, folder)
    ]
    if not folders:
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} holds no adapter, but this run trains one. Resume with the "
            "settings that the checkpoint was written with, or start a new run from its weights."
        )
    saved = load_peft_weights(str(folders[0]), device="cpu").keys()
    wanted = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False).keys()
    # PEFT writes what belongs to the adapter, whose name is part of the parameter's. The rest is the base model's.
    base = {
        name.replace(".base_layer.", ".")
        for name, param in model.named_parameters()
        if param.requires_grad and adapter not in name.split(".")
    }
    given = saved | {name.replace(".base_layer.", ".") for name in saved}
    _refuse_missing([name for name in [*wanted, *sorted(base)] if name not in given], checkpoint)


def _refuse_missing(names: list[str], checkpoint: str | Path) -> None:
    if not names:
        return
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    raise PackingError(
        f"Every parameter must come from the checkpoint, but {Path(checkpoint).name} has no tensor of the right shape "
        f"for {len(names)} of this model's: {shown}. Training would go on with their initial values. Resume with the "
        "model and the adapters that the checkpoint was written with."
    )


def _has_one_of(names: tuple[str, ...], folder: Path) -> bool:
    return any((folder / name).is_file() for name in names)
