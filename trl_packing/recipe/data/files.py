"""Data files on this machine: which loader reads them, and what is wrong with one that no loader can read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import PackingError

logger = logging.getLogger(__name__)

# File name suffix to the name of the loader in `datasets`. Compressed files of these kinds work too.
LOADERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def loader_for(path: Path) -> str | None:
    """Give the loader of a data file by its suffix, or `None` where it is not a data file."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return LOADERS.get(suffixes[-1].lower()) if suffixes else None


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def looks_local(name: str) -> bool:
    """Whether a name that is not there was meant as a path: no hub id looks like this."""
    return (
        name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or loader_for(Path(name)) is not None
    )


def check_files(path: Path) -> None:
    """
    Check that a data file, or every data file of a folder, can be read and that none would be left out.

    Args:
        path (`Path`):
            An existing file or folder.

    Raises:
        [`PackingError`]: If a file is empty or of an unknown kind, or if a folder has data files of several kinds, of
            which `datasets` would read only one without a message.
    """
    if path.is_file():
        if loader_for(path) is None:
            raise PackingError(
                f"A data file needs a suffix that tells its kind, but {path} has none of {', '.join(LOADERS)}."
            )
        _check_not_empty(path)
        return
    kinds: dict[str, Path] = {}
    for file in _data_files(path):
        _check_not_empty(file)
        kinds.setdefault(loader_for(file) or "", file)
    if not kinds:
        raise PackingError(f"The folder {path} has no data file. Known suffixes: {', '.join(LOADERS)}.")
    # Notes and licences are text files too. A data card says which files belong to which configuration.
    structured = {kind: file for kind, file in kinds.items() if kind != "text"}
    if structured and "text" in kinds:
        logger.warning(
            f"Text files such as {kinds['text']} are not read, because the folder has {', '.join(structured)}."
        )
    if len(structured) > 1 and not (path / "README.md").is_file():
        found = ", ".join(str(file.relative_to(path)) for file in structured.values())
        raise PackingError(
            f"A data folder holds files of one kind, because only one is read, but {path} has {found}. Use one folder "
            "for each kind, and `datasets:` to mix them."
        )


def has_card_configs(folder: Path) -> bool:
    """Whether a data card in this folder says which files belong to which configuration."""
    card = folder / "README.md"
    return card.is_file() and any(line.startswith("configs:") for line in card.read_text("utf-8").splitlines())


def cache_folder(folder: Path) -> str | None:
    """
    Give a folder with a data card a cache of its own for every state of its files.

    Args:
        folder (`Path`):
            Existing folder of data files.

    Returns:
        `str`, *optional*: For `cache_dir`. `None` where `datasets` sees by itself that files have changed: with
            configurations in a card it does not, and gives what it has read before.
    """
    import datasets

    if not has_card_configs(folder):
        return None
    digest = hashlib.sha256(str(folder.resolve()).encode())
    for file in [folder / "README.md", *_data_files(folder)]:
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return str(Path(datasets.config.HF_DATASETS_CACHE, f"{folder.resolve().name}-{digest.hexdigest()[:16]}"))


def explain(path: Path) -> str | None:
    """Find in one sentence what is wrong with JSON that could not be read, or `None` where nothing is found."""
    files = [path] if path.is_file() else list(_data_files(path))
    for file in files:
        if loader_for(file) == "json" and file.suffix not in _COMPRESSED and (sentence := _explain_json(file)):
            return sentence
    return None


def _data_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        # datasets skips what is hidden, and its own notes about a data set are not data.
        hidden = any(part.startswith((".", "__")) for part in parts)
        if (
            not hidden
            and file.is_file()
            and loader_for(file)
            and file.name not in ("dataset_infos.json", "state.json")
        ):
            yield file


def _check_not_empty(file: Path) -> None:
    if file.stat().st_size == 0:
        raise PackingError(f"The data file {file} is empty.")


def _explain_json(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:
            first = stream.read(4096).lstrip(b"\xef\xbb\xbf").lstrip()[:1]
        return _explain_array(file) if first == b"[" else _explain_lines(file)
    except OSError as error:
        return f"The data file {file} cannot be read: {error}."


def _explain_array(file: Path) -> str | None:
    try:
        _loads(file.read_bytes())
    except ValueError as error:
        return f"{file} is not JSON: {error}."
    return None


def _explain_lines(file: Path) -> str | None:
    num_objects = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                value = _loads(line)
            except ValueError as error:
                # A file that is one object over many lines is JSON as well.
                if number == 1 and _explain_array(file) is None:
                    return None
                reason = getattr(error, "msg", None) or str(error)
                return f"{file} must hold one JSON object per line, but line {number} is not JSON: {reason}."
            if not isinstance(value, dict):
                return f"{file} must hold one JSON object per line, but line {number} is a {type(value).__name__}."
            num_objects += 1
    return None if num_objects else f"The data file {file} holds no samples, only blank lines."


def _loads(data: bytes) -> Any:
    """Read JSON as strictly as Arrow does: UTF-8, no key twice, no half of a surrogate pair."""
    text = data.decode("utf-8-sig")
    value = json.loads(text, object_pairs_hook=_unique_keys)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair in a string") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value
