"""
`python -m trl_packing.sft`: the recipe as a module, for launchers that take one.

```bash
accelerate launch --module trl_packing.sft --config quickstart.yaml
trl sft -m trl_packing.sft --config FILE
```

What runs is `recipes/sft.py`, the file that `trl-packing cp sft.py` copies.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

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


def drop_launcher_word(words: Sequence[str]) -> list[str]:
    """
    Drop the path of TRL's own script, which `trl sft -m trl_packing.sft` puts among our arguments.

    Args:
        words (`Sequence[str]`):
            The command line after the module's name.

    Returns:
        `list[str]`: What the user wrote.
    """
    stray = next(
        (index for index, word in enumerate(words) if Path(word).parts[-3:] == ("trl", "scripts", "sft.py")), -1
    )
    return [word for index, word in enumerate(words) if index != stray]


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run the recipe as if it had been started by its path.

    Args:
        argv (`Sequence[str]`, *optional*):
            Its command line. The default is that of this process.
    """
    recipe = str(recipe_folder() / "sft.py")
    sys.argv = [recipe, *drop_launcher_word(sys.argv[1:] if argv is None else argv)]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
