"""
`python -m trl_packing.sft`: the recipe as a module, for launchers that take one.

```bash
accelerate launch --module trl_packing.sft --config quickstart.yaml
trl sft -m trl_packing.sft --config FILE
```

TRL reads FILE itself, and hands accelerate's launcher every key that it does not know, before the user's own words.
The launcher refuses ours, unless `module: trl_packing.sft` stands above them in FILE: what follows the name is for the
module. TRL does not look at `--config=FILE`.

What runs is `recipes/sft.py`, the file that `trl-packing cp sft.py` copies.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_MODULE = "trl_packing.sft"
_PACKAGE = Path(__file__).resolve().parent


def recipe_folder() -> Path:
    """
    Say where the recipes are.

    Returns:
        `Path`: The checkout's `recipes`, else the package's own. An editable install leaves a stale copy in the
            package.
    """
    checkout = _PACKAGE.parent
    return (checkout if (checkout / "pyproject.toml").is_file() else _PACKAGE) / "recipes"


def drop_launcher_words(words: Sequence[str]) -> list[str]:
    """
    Drop what `trl sft` puts among our arguments: the path of its own script, and before it the keys of the YAML that
    it does not know and the name of this module.

    Args:
        words (`Sequence[str]`):
            The command line after the module's name.

    Returns:
        `list[str]`: What the user wrote.
    """
    scripts = (index for index, word in enumerate(words) if Path(word).parts[-3:] == ("trl", "scripts", "sft.py"))
    script = next(scripts, None)
    if script is None:
        return list(words)
    before, after = list(words[:script]), list(words[script + 1 :])
    keys = _keys_of_the_yaml(after)
    while len(before) > 1 and keys.get(before[0].removeprefix("--")) == before[1]:
        del before[:2]
    for index, word in enumerate(before[:-1]):
        if word in ("-m", "--module") and before[index + 1] == _MODULE:
            del before[index : index + 2]
            break
    return before + after


def _keys_of_the_yaml(words: list[str]) -> dict[str, str]:
    """Values as text, as TRL writes them. A file that cannot be read is explained later, by the recipe."""
    import yaml

    try:
        values = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text(encoding="utf-8"))
    except (ValueError, IndexError, OSError, yaml.YAMLError):
        return {}
    return {str(key): str(value) for key, value in values.items()} if isinstance(values, dict) else {}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run the recipe as if it had been started by its path.

    Args:
        argv (`Sequence[str]`, *optional*):
            Its command line. The default is that of this process.
    """
    recipe = str(recipe_folder() / "sft.py")
    sys.argv = [recipe, *drop_launcher_words(sys.argv[1:] if argv is None else argv)]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
