"""The folder where the quickstart keeps models that it built or converted, shared by all processes of a machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from ..errors import PackingError

CACHE_VARIABLE = "TRL_PACKING_CACHE"


def cache_folder() -> Path:
    """
    Say where built models are kept.

    Returns:
        `Path`: `$TRL_PACKING_CACHE`, else `trl_packing` under `$XDG_CACHE_HOME`, else under `~/.cache`. It is not
            created.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_packing"


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """
    Fill a folder the first time it is wanted, so that no process ever sees it half-filled.

    Args:
        folder (`Path`):
            Where the result goes. If it has a `config.json`, it is taken as it is.
        build (`Callable[[Path], object]`):
            Fills the empty folder it is given, which is moved to `folder` at the end, or removed if `build` raises.

    Returns:
        `Path`: `folder`. Processes that come later wait for the first one.

    Raises:
        [`PackingError`]: If `folder` holds something else, or can't be written.
    """
    if _is_model(folder):
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if _is_model(folder):
                return folder
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise PackingError(
                    f"A model goes into a new or empty folder, but `{folder}` holds something that is not one. Pass "
                    "another `folder`, or remove it."
                )
            # A killed process may have left one; only the owner of the lock gets here.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                partial.replace(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        # Import errors and our own are not `OSError`; what is left is the disk.
        raise PackingError(
            f"`{folder}` can't be written: {error}. Set `{CACHE_VARIABLE}` to a folder with free space."
        ) from error
    return folder


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
