"""
One rank that trains recipes one after the other, so that a test starts its processes once.

`python -m torch.distributed.run --nproc-per-node 2 tests/recipes_run.py '{"OUT": ["--config", "llama.yaml", ...]}'`
"""

import json
import os
import sys
from pathlib import Path

import torch

from trl_packing.proof import AdapterProof
from trl_packing.recipe import build_sft, parse_sft


def main(runs: dict[str, list[str]]) -> None:
    for out, words in runs.items():
        *settings, _ = parse_sft(words)
        trainer = build_sft(*settings)
        trainer.train()
        trainer.save_model()
        proof = next(c for c in trainer.callback_handler.callbacks if isinstance(c, AdapterProof))
        result = {
            "world_size": trainer.accelerator.num_processes,
            "wrapped": type(trainer.model_wrapped).__name__,
            "steps": trainer.state.global_step,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "isolated": trainer.isolation_report.ok,
            "adapters": sum(row.num_adapters for row in proof.gradients.rows),
            "trained": sum(row.num_trained for row in proof.gradients.rows),
        }
        Path(out, f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Freeing gloo's group at the end of a process can hang, see `trl_packing.recipe.build._settle`.
    os._exit(0)
