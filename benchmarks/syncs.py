"""
Device-to-host reads in a training micro-step, by place: transformers with positions only, TRL, and ours, in one run.

    python benchmarks/syncs.py               Llamas of 1 and 2 layers
    python benchmarks/syncs.py --json FILE

Every read makes the host wait for the GPU. They are counted on the CPU, which runs the same operations, forward and
backward, from the end of one micro-step to the end of the next. Where code takes another path on a GPU it is made to
take it here: TRL's head picks the predicted positions, and `transformers` runs the host side of its flash attention.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import show

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from device_reads import FLASH, micro_steps, register_flash_stand_in, side
from test_device_reads import RUN, dataset
from training import model_of, settings
from trl.trainer import utils as trl_utils

ATTENTION = {"transformers": FLASH, "TRL": "sdpa", "ours": "varlen"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trl_utils._use_triton = lambda device: True
    register_flash_stand_in()
    rows: list[dict[str, Any]] = []
    for name, attention in ATTENTION.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            one, two = (
                micro_steps(
                    side(name, model_of(attention, num_hidden_layers=layers), dataset(), settings(folder, **RUN))
                )[0]
                for layers in (1, 2)
            )
        rows.append({"trainer": name, "read at": "all places", "1 layer": one.total(), "2 layers": two.total()})
        rows += [
            {"trainer": "", "read at": place, "1 layer": one[place], "2 layers": two[place]}
            for place in sorted(one | two)
        ]
    show("Device-to-host reads in one micro-step", rows, args.json)


if __name__ == "__main__":
    main()
