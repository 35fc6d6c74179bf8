"""Where a config lies, and what is written in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PackingError
from .values import nearest

CONFIG_DIR_VARIABLE = "TRL_PACKING_CONFIG_DIR"

_PACKAGE = Path(__file__).resolve().parents[2]
_SUFFIXES = (".yaml", ".yml")
# A number for everyone except YAML 1.1, which wants a dot before the exponent. The sign of the exponent is required,
# so that a commit id such as 12e4567 stays a string.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]\d+")


@dataclass(frozen=True)
class ConfigFile:
    """
    A YAML config as written, before its values are checked.

    Args:
        path (`Path`):
            The file.
        values (`dict[str, Any]`):
            Its top-level keys and values.
        texts (`dict[str, str]`):
            For each key with a scalar value, the value as written in the file: `no` where YAML 1.1 reads `False`.
        lines (`dict[str, int]`):
            The line of each key, counted from 1.
    """

    path: Path
    values: dict[str, Any]
    texts: dict[str, str]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """Name the place of a key for a message."""
        return f"{self.path}, line {self.lines[key]}"


def config_folders(recipe_file: str | os.PathLike[str] | None = None) -> list[Path]:
    """
    List the folders in which a bare config name is looked up, in order.

    Args:
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe. The folder `configs` beside its own folder is searched, so that a copied recipe finds
            the configs that were copied with it.

    Returns:
        `list[Path]`: The existing ones among `$TRL_PACKING_CONFIG_DIR`, `<recipe>/../configs`, the checkout's
            `configs` and the package's own. The checkout comes before the package, because an editable install leaves
            a stale copy.

    Raises:
        [`PackingError`]: If `$TRL_PACKING_CONFIG_DIR` is set to something that is not a folder.
    """
    folders = []
    if own := os.environ.get(CONFIG_DIR_VARIABLE):
        if not Path(own).is_dir():
            raise PackingError(
                f"`{CONFIG_DIR_VARIABLE}` must name a folder, but {own!r} is none. Unset it or correct it."
            )
        folders.append(Path(own))
    if recipe_file is not None:
        folders.append(Path(recipe_file).resolve().parent.parent / "configs")
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        folders.append(_PACKAGE.parent / "configs")
    folders.append(_PACKAGE / "configs")
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def list_configs(recipe_file: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """
    List the configs that a bare name reaches.

    Args:
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe, as for [`config_folders`].

    Returns:
        `dict[str, Path]`: Name without suffix to file. The first folder that has a name wins.
    """
    found: dict[str, Path] = {}
    for folder in config_folders(recipe_file):
        for path in sorted(folder.iterdir()):
            if path.suffix in _SUFFIXES and path.is_file():
                found.setdefault(path.stem, path)
    return found


def resolve_config(name: str, recipe_file: str | os.PathLike[str] | None = None) -> Path:
    """
    Find the file that `--config NAME` means.

    Args:
        name (`str`):
            A path, or the bare name of a config, both with or without `.yaml`. An existing file always wins.
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe, as for [`config_folders`].

    Returns:
        `Path`: An existing file.

    Raises:
        [`PackingError`]: If there is none. The message lists what exists and the nearest name.
    """
    if not name:
        raise PackingError("`--config` needs the name or the path of a YAML file, but it is empty.")
    given = Path(name).expanduser()
    candidates = [given, *(given.with_name(given.name + suffix) for suffix in _SUFFIXES)]
    if existing := next((path for path in candidates if path.is_file()), None):
        return existing
    # A bare name may also be that of a folder here, for example of the model.
    configs = {} if given.name != name else list_configs(recipe_file)
    if path := configs.get(given.stem if given.suffix in _SUFFIXES else name):
        return path
    if given.is_dir():
        inside = sorted(path.name for path in given.iterdir() if path.suffix in _SUFFIXES)
        raise PackingError(
            f"`--config` needs a file, but {name!r} is a folder with {_listed(inside) or 'no YAML file'}."
        )
    if given.name != name:
        siblings = sorted(path.name for path in given.parent.iterdir()) if given.parent.is_dir() else []
        raise PackingError(f"The config file {name!r} does not exist.{_suggestion(given.name, siblings)}")
    folders = _listed([str(folder) for folder in config_folders(recipe_file)])
    raise PackingError(
        f"There is no config {name!r}, neither here nor in {folders or 'a folder of configs'}."
        f"{_suggestion(given.stem, list(configs))} Known configs: {_listed(list(configs)) or 'none'}."
    )


def read_config(path: Path) -> ConfigFile:
    """
    Read a YAML config.

    Args:
        path (`Path`):
            The file. Anchors and merge keys work. Numbers like `1e-4` inside a mapping or list are read as numbers.

    Returns:
        [`ConfigFile`]: Its values as written.

    Raises:
        [`PackingError`]: If the file cannot be read, is not YAML, is empty, is not one mapping with text keys, or has
            a key twice. The message names the file and, where there is one, the line.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PackingError(f"The config {path} cannot be read as UTF-8 text: {error}.") from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise PackingError(f"The config {path} is empty. It needs at least a model and a data set.")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise PackingError(f"The config {path} must be one mapping of `key: value` lines, but it is {kind}.")
        for node in _nested_scalars(root, path):
            if node.style is None and _EXPONENT.fullmatch(node.value):
                node.tag = "tag:yaml.org,2002:float"
        texts = {key.value: value.value for key, value in root.value if isinstance(value, yaml.ScalarNode)}
        lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
        values = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise PackingError(_yaml_sentence(error, path)) from error
    return ConfigFile(path, values, texts, {**dict.fromkeys(values, root.start_mark.line + 1), **lines})


def _nested_scalars(root: Any, path: Path) -> Iterator[Any]:
    """Yield the scalars below the top level, `env` apart, and refuse keys that are not names or occur twice."""
    import yaml

    todo, seen = [(False, root)], set()
    while todo:
        nested, node = todo.pop()
        # An anchor may be used many times, and may even hold itself.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            if nested:
                yield node
        elif isinstance(node, yaml.SequenceNode):
            todo += [(nested, child) for child in node.value]
        else:
            _check_keys(node, path, names_only=node is root)
            for key, child in node.value:
                below = nested if node is not root else key.value != "env" and not isinstance(child, yaml.ScalarNode)
                todo.append((below, child))


def _check_keys(node: Any, path: Path, *, names_only: bool) -> None:
    import yaml

    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if names_only and key.tag != "tag:yaml.org,2002:str":
            shown = getattr(key, "value", key)
            raise PackingError(f"Every key of a config is a name, but the one in {path}, line {line}, is `{shown}`.")
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            raise PackingError(
                f"Every key may occur once, but `{key.value}` is in {path} on lines {lines[key.value]} and {line}."
            )
        lines[str(key.value)] = line


def _yaml_sentence(error: Any, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    line = f", line {mark.line + 1}" if mark else ""
    if "\\t" in problem:
        return f"YAML is indented with spaces, but {path}{line} has a tab. Replace it with spaces."
    return f"The config {path}{line} is not valid YAML: {problem}."


def _suggestion(name: str, names: list[str]) -> str:
    guess = nearest(name, names)
    return f" Did you mean {guess!r}?" if guess else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names)
