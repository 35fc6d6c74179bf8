"""From the names in a config to a training and an evaluation set."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import PackingError
from ...samples import validate_samples
from ..hub import check_hub
from .files import cache_folder, check_files, explain, has_card_configs, is_saved_dataset, loader_for, looks_local

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig, ScriptArguments, SFTConfig

logger = logging.getLogger(__name__)


def load_data(
    script_args: ScriptArguments, dataset_args: DatasetMixtureConfig, training_args: SFTConfig
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """
    Load the training set, and the evaluation set if the run evaluates, and check their samples.

    Args:
        script_args (`trl.ScriptArguments`):
            `dataset_name` is a hub id or a local path: a file (JSONL, JSON, Parquet, CSV, text), a folder of those, or
            what `save_to_disk` wrote. A folder's splits are told by its file names, such as `train.jsonl` and
            `test.jsonl`.
        dataset_args (`trl.DatasetMixtureConfig`):
            `datasets:` is a mixture, whose entries take the same paths. It wins over `dataset_name`, as in TRL. Its
            `test_split_size` draws with the run's seed.
        training_args (`trl.SFTConfig`):
            The run evaluates unless `eval_strategy` is `"no"`. Also says which columns are read.

    Returns:
        `tuple`: The training set and the evaluation set, the latter `None` if the run does not evaluate.

    Raises:
        [`PackingError`]: If a name, a file, a split or a sample is wrong, in one sentence.
    """
    if dataset_args.datasets:
        splits, source = _load_mixture(script_args, dataset_args, training_args.seed), "the `datasets` mixture"
    elif script_args.dataset_name:
        splits, source = _load_named(script_args), f"`dataset_name: {script_args.dataset_name}`"
    else:
        raise PackingError("A run needs data, but neither `dataset_name` nor `datasets` is given.")
    if dataset_args.streaming and not dataset_args.datasets:
        logger.warning(
            "`streaming` belongs to `datasets` and has no effect on `dataset_name`. Use `dataset_streaming`."
        )
    names = [entry.path for entry in dataset_args.datasets] or [str(script_args.dataset_name)]
    with _one_sentence(source, [Path(name).expanduser() for name in names]):
        train = _split(splits, script_args.dataset_train_split, "dataset_train_split", source)
        train = validate_samples(train, training_args, name="training")
        if training_args.eval_strategy == "no":
            return train, None
        evaluation = _split(splits, script_args.dataset_test_split, "dataset_test_split", source)
        return train, validate_samples(evaluation, training_args, name="evaluation")


def _load_named(script_args: ScriptArguments) -> Any:
    import datasets

    name, streaming = str(script_args.dataset_name), script_args.dataset_streaming
    path = Path(name).expanduser()
    if not path.exists():
        _check_hub_id(name, "dataset_name")
        with _one_sentence(f"`dataset_name: {name}`", []):
            return datasets.load_dataset(name, name=script_args.dataset_config, streaming=streaming)
    if path.is_dir() and is_saved_dataset(path):
        _ignore_config(script_args)
        with _one_sentence(f"`{path}`", []):
            return _stream(_load_saved(path)) if streaming else _load_saved(path)
    check_files(path)
    with _one_sentence(f"`{path}`", [path]):
        if path.is_dir():
            cache = cache_folder(path)
            return datasets.load_dataset(
                str(path), name=script_args.dataset_config, streaming=streaming, cache_dir=cache
            )
        _ignore_config(script_args)
        return datasets.load_dataset(_loader(path), data_files={"train": str(path.resolve())}, streaming=streaming)


def _load_mixture(script_args: ScriptArguments, dataset_args: DatasetMixtureConfig, seed: int) -> Any:
    from trl import get_dataset

    if script_args.dataset_name:
        logger.warning("Both `datasets` and `dataset_name` are given. `datasets` is used and `dataset_name` is not.")
    if script_args.dataset_streaming and not dataset_args.streaming:
        logger.warning(
            "`dataset_streaming` belongs to `dataset_name` and has no effect on `datasets`. Use `streaming`."
        )
    if dataset_args.streaming and dataset_args.test_split_size is not None:
        raise PackingError(
            "A stream has no known length to split, but `test_split_size` is set. Remove it or `streaming`."
        )
    entries, paths = [], []
    for entry in dataset_args.datasets:
        path = Path(entry.path).expanduser()
        if not path.exists():
            # With `data_files` the path may be the name of a loader, such as `json`.
            if entry.data_files is None and entry.data_dir is None:
                _check_hub_id(entry.path, "datasets")
            entries.append(entry)
            continue
        paths.append(path)
        if entry.data_files is None and entry.data_dir is None and (files := _local_files(path, entry.split)):
            loader, data_files = files
            entry = dataclasses.replace(entry, path=loader, data_files={_base_split(entry.split): data_files})
        entries.append(entry)
    with _one_sentence("the `datasets` mixture", paths), _numpy_seed(seed):
        return get_dataset(dataclasses.replace(dataset_args, datasets=entries))


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Fix the state that TRL's unseeded `test_split_size` draws from: ranks and resumed runs must split alike."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _local_files(path: Path, split: str) -> tuple[str, Any] | None:
    """Loader and files of a mixture entry that `load_dataset` does not take by its path, or `None` where it does."""
    if path.is_file():
        check_files(path)
        return _loader(path), str(path.resolve())
    if not is_saved_dataset(path):
        check_files(path)
        if has_card_configs(path):
            logger.warning(
                f"`datasets` reads {path} once and then from its cache, even if its files change, because its "
                "README.md has `configs:`. Give `data_files` too where they do."
            )
        return None
    folder = path / _base_split(split) if (path / "dataset_dict.json").is_file() else path
    if not folder.is_dir():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise PackingError(f"{path} has no split {split!r}. Its splits: {', '.join(splits)}.")
    return "arrow", sorted(str(file) for file in folder.glob("*.arrow"))


def _loader(path: Path) -> str:
    """What `load_dataset` takes as path for one file. Given the folder, it sees by itself that tabs separate a TSV."""
    return str(path.resolve().parent) if ".tsv" in path.suffixes else str(loader_for(path))


def _base_split(split: str) -> str:
    """The split's name without a slice: `train` of `train[:10%]`."""
    return split.partition("[")[0]


def _load_saved(path: Path) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _stream(splits: dict[str, Any]) -> dict[str, Any]:
    return {name: data.to_iterable_dataset(num_shards=max(1, len(data.cache_files))) for name, data in splits.items()}


def _split(splits: Any, split: str, key: str, source: str) -> Any:
    if split in splits:
        return splits[split]
    names = ", ".join(splits)
    message = f"`{key}` is {split!r}, but {source} has only: {names}."
    if key == "dataset_test_split":
        message += (
            " Set `eval_strategy: no`, or give a folder with `train` and `test` files, or a `datasets` mixture with "
            "`test_split_size`."
        )
    raise PackingError(message)


def _check_hub_id(name: str, key: str) -> None:
    if looks_local(name):
        raise PackingError(f"The data {name!r} in `{key}` does not exist. Relative paths start at {Path.cwd()}.")
    check_hub(name, key)


def _ignore_config(script_args: ScriptArguments) -> None:
    if script_args.dataset_config is not None:
        logger.warning("`dataset_config` has no effect on a local file or a folder from `save_to_disk`.")


@contextmanager
def _one_sentence(source: str, paths: list[Path]) -> Iterator[None]:
    """Turn what `datasets`, Arrow, pandas and the hub raise into one sentence."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        yield
    except PackingError:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise PackingError(
            f"{source[0].upper()}{source[1:]} is not on this machine, and the hub cannot be reached: {_reason(error)}."
            " Give a local path, or load it once while online."
        ) from error
    # StopIteration is what `datasets` raises for a JSON file without a sample.
    except (OSError, ValueError, TypeError, KeyError, StopIteration, DatasetsError, ArrowException) as error:
        for path in paths:
            if path.exists() and (sentence := explain(path)):
                raise PackingError(sentence) from error
        reason = _reason(error)
        if "corresponds to no data" in reason or isinstance(error, StopIteration):
            reason = "it holds no samples"
        raise PackingError(f"{source[0].upper()}{source[1:]} cannot be loaded: {reason}.") from error


def _reason(error: BaseException) -> str:
    """The innermost message, on one line: `datasets` wraps the cause in a message that says nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
