"""Start processes for a test, bounded in time."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
}


def run(command, timeout=240, check=True, **kwargs):
    result = subprocess.run(
        [str(word) for word in command],
        env=kwargs.pop("env", ENVIRONMENT),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **kwargs,
    )
    if check and result.returncode:
        raise AssertionError(
            f"{command} ended with {result.returncode}:\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
        )
    return result


def train_on(num_ranks, folder, **options):
    """Train `tests/distributed_run.py` on ranks of this machine and give what each saw."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks] if num_ranks > 1 else []
    run([sys.executable, *launcher, TESTS / "distributed_run.py", folder, json.dumps(options)])
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(rank["world_size"] == num_ranks for rank in ranks)
    assert not num_ranks > 1 or all(rank["wrapped"] == "DistributedDataParallel" for rank in ranks)
    return ranks
