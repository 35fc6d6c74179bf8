"""What is written for readers is true: docstring examples run, public names are in the README, links lead "
"somewhere."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import trl_packing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(trl_packing.__path__, "trl_packing.")
    if not name.endswith("__main__") and ".recipes" not in name
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_some_examples_are_there_to_run():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 5


@pytest.mark.parametrize("name", trl_packing.__all__)
def test_every_public_name_is_in_the_readme(name):
    assert re.search(rf"\b{name}\b", README)
    assert getattr(trl_packing, name).__doc__


def test_public_names_are_the_designs():
    assert set(trl_packing.__all__) == {
        "Boundaries",
        "PackedCollator",
        "PackedSFTConfig",
        "PackedSFTTrainer",
        "PackPlan",
        "plan_packs",
        "RankedBatchSampler",
        "pack_rows",
        "unpack_rows",
        "PackedRows",
        "register_ops",
        "unregister_ops",
        "check_isolation",
        "IsolationReport",
        "check_lora_targets",
        "safe_lora_targets",
        "PackingError",
        "LeakError",
        "MissingDependencyError",
        "UnsupportedVersionError",
    }


def test_files_that_the_readme_names_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    targets += re.findall(r"`((?:recipes|benchmarks|configs)/[\w./-]+)`", README)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets
    assert not missing


def test_configs_that_the_readme_names_exist():
    names = set(re.findall(r"\b([a-z0-9_]+\.yaml)\b", README))
    assert len(names) > 5
    assert not [name for name in names if not (ROOT / "configs" / name).exists()]


def test_readme_examples_run(tmp_path, monkeypatch):
    """The first example whole, and the collator's: they need no more than what is installed."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for block in blocks[:2]:
        exec(compile(block, "README.md", "exec"), {})


def test_no_module_is_longer_than_a_reader_can_hold():
    too_long = {
        str(path.relative_to(ROOT)): number
        for folder, limit in (("trl_packing", 450), ("recipes", 450))
        for path in (ROOT / folder).rglob("*.py")
        if (number := len(path.read_text(encoding="utf-8").splitlines())) > limit
    }
    assert not too_long
