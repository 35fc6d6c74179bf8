"""
Fresh environments made by pip, by uv and editable: three ways to start a run give one result, and leave no trace.

Needs a package registry, and about 10 minutes on a quiet machine: `make test-install`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
RUN = ["--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]
TWO_PROCESSES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
machine_rank: 0
mixed_precision: "no"
num_machines: 1
num_processes: 2
use_cpu: true
"""
# Nothing of the checkout may be found by chance.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

pytestmark = [pytest.mark.network, pytest.mark.slow]


class Installed:
    """An environment, and an empty folder to work in."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.bin, self.work = how, folder / "venv" / "bin", folder / "work"
        self.work.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", self.bin.parent], check=True)
        self.call("python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "torch", "uv", "build", "hatchling")
        # Torch is there by now: where it comes from is the machine's affair, which uv does not know.
        self.call("python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "trl")
        self.without = {words: self.call("trl", *words.split()).stdout for words in ("--help", "sft --help")}
        installers = {
            "pip": ["python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, self.wheel],
            "uv": ["uv", "pip", "install", "-q", "--python", self.bin / "python", "-c", CONSTRAINTS, self.wheel],
            "editable": ["python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "-e", ROOT],
        }
        self.call(*installers[how])

    @property
    def wheel(self) -> Path:
        dist = self.work.parent / "dist"
        if not dist.exists():
            # The wheel is made from the source distribution, as anyone's would be.
            self.call("python", "-m", "build", "--no-isolation", "-o", dist, ROOT)
        return next(dist.glob("*.whl"))

    def call(self, program: str | Path, *words: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**ENVIRONMENT, "PATH": f"{self.bin}{os.pathsep}{ENVIRONMENT['PATH']}"}
        result = subprocess.run(
            [str(self.bin / program), *map(str, words)],
            env=environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert not check or result.returncode == 0, f"{program} {words}:\n{result.stdout}\n{result.stderr[-4000:]}"
        return result


@pytest.fixture(scope="module", params=["pip", "uv", "editable"])
def installed(request: Any, tmp_path_factory: Any) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp(request.param)
    yield Installed(request.param, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_three_ways_to_start_give_the_same_losses(installed: Installed, num_processes: int) -> None:
    work = installed.work
    (work / "spread.yaml").write_text(TWO_PROCESSES.replace("num_processes: 2", f"num_processes: {num_processes}"))
    for name in ("quickstart_tiny", "sft.py"):
        if not list(work.glob(f"{name}*")):
            installed.call("trl-packing", "cp", name)
    ways = {
        "trl-packing": ["trl-packing", "sft", "--accelerate_config", "spread.yaml"],
        "trl": ["trl", "sft", "-m", "trl_packing.sft", "--accelerate_config", "spread.yaml"],
        "accelerate": ["accelerate", "launch", "--config_file", "spread.yaml", "sft.py"],
    }
    losses = {}
    for way, words in ways.items():
        file = work / f"{way}-{num_processes}.jsonl"
        options = ["--output_dir", work / f"{way}-{num_processes}", "--eval_per_sample", file]
        installed.call(*words, "--config", "quickstart_tiny.yaml", *RUN, *options)
        losses[way] = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
    assert len(losses["trl"]) >= 10
    assert losses["trl-packing"] == losses["trl"] == losses["accelerate"]


def test_uninstalled_it_leaves_trl_as_it_was(installed: Installed) -> None:
    for words, text in installed.without.items():
        assert installed.call("trl", *words.split()).stdout == text
    installed.call("python", "-m", "pip", "uninstall", "-q", "-y", "trl_packing")
    for words, text in installed.without.items():
        assert installed.call("trl", *words.split()).stdout == text
    assert not (installed.bin / "trl-packing").exists()
    # Of an editable install pip leaves an empty folder, which Python takes for a package.
    assert installed.call("python", "-c", "import trl_packing.cli", check=False).returncode == 1
