"""From parsed settings to a trainer, and from a trained model to a saved one."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, AutoTokenizer
from trl import DatasetMixtureConfig, ModelConfig, get_quantization_config
from trl.data_utils import is_conversational, is_conversational_from_value

from .. import _compat
from ..config import PackedSFTConfig
from ..errors import LeakError, MissingDependencyError, PackingError
from ..quickstart import resolve_dataset, resolve_model
from ..resume import last_whole_checkpoint
from ..trainer import PackedSFTTrainer
from .config import LaunchOptions, RecipeArguments, build_lora, parse_recipe
from .data import load_data
from .data.files import looks_local
from .hub import check_hub

RUN_TYPES = (RecipeArguments, PackedSFTConfig, ModelConfig, DatasetMixtureConfig)
_RUN_FILES = ("adapter_config.json", "adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")


def parse_sft(
    argv: Sequence[str] | None = None, *, recipe_file: str | os.PathLike[str] | None = None, prog: str | None = None
) -> tuple[RecipeArguments, PackedSFTConfig, ModelConfig, DatasetMixtureConfig, LaunchOptions]:
    """
    Parse the command line and YAML of a fine-tuning run.

    Args:
        argv (`Sequence[str]`, *optional*):
            Words after the program's name. The default is `sys.argv[1:]`.
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe, beside which `--config NAME` is looked up.
        prog (`str`, *optional*):
            The program's name in the help.

    Returns:
        `tuple`: Script, training, model and data settings, and the launch options found in the YAML.

    Raises:
        [`PackingError`]: If a key or value is wrong, in one sentence.
        [`UnsupportedVersionError`]: If an installed package is outside the supported range.
    """
    _compat.check_versions()
    parsed = parse_recipe(argv, dataclass_types=RUN_TYPES, recipe_file=recipe_file, prog=prog)
    script, training, model, data, launch = parsed
    # On the command line the words come as text, which would be the name of a folder.
    words = {"true": True, "false": None}
    training.resume_from_checkpoint = words.get(
        str(training.resume_from_checkpoint).lower(), training.resume_from_checkpoint
    )
    return script, training, model, data, launch


def build_sft(
    script_args: RecipeArguments,
    training_args: PackedSFTConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> PackedSFTTrainer:
    """
    Build the trainer of a run: what needs no data is checked first, then the data, then the model is loaded.

    Args:
        script_args ([`RecipeArguments`]):
            Data set and adapter settings.
        training_args ([`PackedSFTConfig`]):
            The run's settings.
        model_args ([`~trl.ModelConfig`]):
            Model and adapter settings.
        dataset_args ([`~trl.DatasetMixtureConfig`]):
            The mixture, if any.

    Returns:
        [`PackedSFTTrainer`]: Ready to train.

    Raises:
        [`PackingError`]: If a setting, the data, the model or the output folder cannot be used, in one sentence.
    """
    if not model_args.model_name_or_path:
        raise PackingError("A run needs a model, but `model_name_or_path` is not set. Give a hub id or a folder.")
    check_output_dir(training_args)
    peft_config = build_lora(model_args, lora_mapping(script_args.lora_config))
    quantization_config = get_quantization_config(model_args)
    name = resolve_model(model_args.model_name_or_path)
    check_model_name(name)
    train_dataset, eval_dataset = load_samples(script_args, dataset_args, training_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    with model_errors(name):
        return PackedSFTTrainer(
            model=name,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=load_tokenizer(name, train_dataset, training_args, model_args.model_revision),
            quantization_config=quantization_config,
            peft_config=peft_config,
        )


def load_samples(
    script_args: RecipeArguments, dataset_args: DatasetMixtureConfig, training_args: PackedSFTConfig
) -> tuple[Any, Any]:
    """
    Load the data of a run, where the quickstart's names work like those of the hub.

    Args:
        script_args ([`RecipeArguments`]), dataset_args ([`~trl.DatasetMixtureConfig`]),
        training_args ([`PackedSFTConfig`]):
            The run's settings. They are not modified.

    Returns:
        `tuple`: The training set, and the evaluation set or `None`, as [`load_data`] gives them.

    Raises:
        [`PackingError`]: If a name, a file, a split or a sample is wrong, in one sentence.
    """
    if script_args.dataset_name is not None:
        script_args = copy.copy(script_args)
        script_args.dataset_name = resolve_dataset(script_args.dataset_name)
    entries = [replace(entry, path=resolve_dataset(entry.path)) for entry in dataset_args.datasets]
    return load_data(script_args, replace(dataset_args, datasets=entries), training_args)


def load_tokenizer(name: str, samples: Any, args: PackedSFTConfig, revision: str | None = None) -> Any:
    """
    Load a model's tokenizer or processor, and check that it has what the samples need before weights are loaded.

    Args:
        name (`str`):
            Hub id or folder.
        samples (`Dataset` or `IterableDataset`):
            The training set.
        args ([`PackedSFTConfig`]):
            The run's settings.
        revision (`str`, *optional*):
            Of the model.

    Returns:
        `PreTrainedTokenizerBase` or `ProcessorMixin`: As TRL loads it.

    Raises:
        [`PackingError`]: If a chat template, an end-of-sequence token or a pad token is needed and missing.
    """
    template = args.chat_template_path
    if template and not Path(template).exists() and (looks_local(template) or template.endswith((".jinja", ".j2"))):
        raise PackingError(
            f"`chat_template_path` is {template}, which does not exist. Relative paths start at {Path.cwd()}."
        )
    origin = {"revision": revision, "trust_remote_code": args.trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(name, **origin)
    except (OSError, ImportError):
        # A vision-language model's processor needs its image settings and torchvision. Text needs neither.
        processor = AutoTokenizer.from_pretrained(name, **origin)
    tokenizer = getattr(processor, "tokenizer", processor)
    sample = next(iter(samples))
    if is_conversational(sample) or is_conversational_from_value(sample):
        if template is None and processor.chat_template is None:
            raise PackingError(
                f"Conversations need a chat template, but the tokenizer of {name} has none. Set `chat_template_path` "
                "to a Jinja file or to a model that has one."
            )
    elif "input_ids" not in sample and (args.eos_token or tokenizer.eos_token) is None:
        raise PackingError(
            f"Every text ends with an end-of-sequence token, but the tokenizer of {name} has none. Set `eos_token`."
        )
    # A template's own tokenizer may bring one.
    if template is None and (args.pad_token or tokenizer.pad_token or args.eos_token or tokenizer.eos_token) is None:
        raise PackingError(
            f"The tokenizer of {name} has neither a pad token nor an end-of-sequence token. Set `pad_token`."
        )
    return processor


def finish_sft(trainer: PackedSFTTrainer, dataset_name: str | None = None) -> None:
    """
    End a run as TRL's script does: save, push if asked, close the trackers.

    Args:
        trainer ([`PackedSFTTrainer`]):
            After `train`.
        dataset_name (`str`, *optional*):
            For the model card.
    """
    args = trainer.args
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved to {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")
    _settle(trainer)
    trainer.end()


def _settle(trainer: PackedSFTTrainer) -> None:
    """
    Let gloo's threads finish before its group is freed.

    They want the GIL to drop the tensors of their last collective, and the group's destructor joins them without
    giving it back: the process would hang after its work is done (seen with torch 2.13, at the end of a script).
    """
    if trainer.accelerator.num_processes > 1 and "gloo" in str(torch.distributed.get_backend()):
        trainer.accelerator.wait_for_everyone()
        time.sleep(1.0)


def check_output_dir(args: PackedSFTConfig) -> None:
    """
    Refuse to write over another run or where nothing can be written, and to resume from nothing.

    Args:
        args ([`PackedSFTConfig`]):
            The run's settings.

    Raises:
        [`PackingError`]: If `output_dir` is a file, or holds a run that this one does not resume, or if there is no
            checkpoint to resume from.
    """
    folder, resume = Path(args.output_dir), args.resume_from_checkpoint
    if folder.exists() and not folder.is_dir():
        raise PackingError(f"`output_dir` is {folder}, which is a file. Name a folder.")
    if resume is True:
        last_whole_checkpoint(folder)
    elif resume and not Path(resume).is_dir():
        raise PackingError(f"`resume_from_checkpoint` is {resume}, which is no folder. Name a checkpoint, or `true`.")
    _check_writable("output_dir", folder)
    if args.packing_report is not None:
        _check_writable("packing_report", Path(args.packing_report))
    if args.eval_per_sample is not None:
        _check_writable("eval_per_sample", Path(args.eval_per_sample).parent)
    if resume or not folder.is_dir():
        return
    found = [path.name for path in folder.iterdir() if path.name in _RUN_FILES or path.name.startswith("checkpoint-")]
    if found:
        resume = ", or continue with `resume_from_checkpoint: true`" if "checkpoint-" in "".join(found) else ""
        raise PackingError(
            f"`output_dir` {folder} already holds a run ({', '.join(sorted(found)[:3])}). Choose a new `output_dir`, "
            f"or remove that one{resume}."
        )


def _check_writable(name: str, folder: Path) -> None:
    """Look whether a folder can be made, without making it. The run would fail at its first checkpoint."""
    existing = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
    if not existing.is_dir():
        raise PackingError(f"`{name}` needs the folder {folder}, but {existing} is a file. Name another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PackingError(f"`{name}` needs the folder {folder}, but {existing} cannot be written to.")


def check_model_name(name: str) -> None:
    """
    Check a model's name before anything is loaded.

    Args:
        name (`str`):
            Hub id or folder.

    Raises:
        [`PackingError`]: If a path does not exist, the folder holds no model, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        if looks_local(name):
            raise PackingError(
                f"`model_name_or_path` is {name}, which does not exist. Relative paths start at {Path.cwd()}."
            )
        check_hub(name, "model_name_or_path")
        return
    if not (folder / "config.json").is_file():
        hint = (
            " It holds an adapter: merge it first, or name its base model."
            if (folder / "adapter_config.json").is_file()
            else ""
        )
        raise PackingError(
            f"`model_name_or_path` is {name}, which holds no `config.json`, so it is no model folder.{hint}"
        )


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises for a model that cannot be loaded into one sentence."""
    try:
        yield
    except (PackingError, LeakError, MissingDependencyError):
        raise
    except OSError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        advice = " Download it while online, or give a local folder." if not Path(name).exists() else ""
        raise PackingError(f"The model {name} cannot be loaded: {reason[:300]}.{advice}") from error
    except ImportError as error:
        # bitsandbytes, for one, is looked for when the model is loaded.
        raise MissingDependencyError(f"The run needs a package: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        # transformers' message about a tracker that is not installed.
        if " requires " not in str(error):
            raise
        raise PackingError(" ".join(str(error).split())) from error
    except ValueError as error:
        # TRL, transformers and PEFT explain a wrong setting this way.
        raise PackingError(" ".join(str(error).split())) from error


def lora_mapping(value: Any) -> Mapping[str, Any] | None:
    """Give `RecipeArguments.lora_config` the type it has once it is parsed."""
    assert value is None or isinstance(value, Mapping)
    return value
