"""
What `check_isolation` costs, beside an optimiser step of the same model in the same run.

    python benchmarks/isolation.py                         tiny models and one of 135 million parameters
    python benchmarks/isolation.py --models llama --rounds 9
    python benchmarks/isolation.py --json benchmarks/results/isolation.json

A step is forward, loss, backward and AdamW over one packed row of `token budget` tokens. Check and steps take turns,
and the medians of CPU seconds on one thread are compared. `forward tokens` counts tokens times passes, a backward pass
as two forward passes. Tiny models pay for passes, not for tokens: there the check is dear beside a short row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import show
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_packing import Boundaries, check_isolation, register_ops
from trl_packing.quickstart import TINY_NAMES
from trl_packing.quickstart.tiny import tiny_config

BUDGETS = (1024, 4096)
# Sizes of SmolLM2-135M.
LARGEST = "llama of 135M"
SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def build(name: str) -> nn.Module:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True) if name == LARGEST else tiny_config(name)
    register_ops()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="varlen")
    register_ops(model)
    return model.train()


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int) -> None:
    boundaries = Boundaries.from_lengths([budget // 8] * 8)
    ids = torch.randint(3, 250, (1, budget))
    logits = model(input_ids=ids, use_cache=False, **boundaries.to_model_kwargs(host_offsets=True)).logits
    nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def forward_tokens(model: nn.Module) -> int:
    """Count the tokens of a check's forward passes, and twice those of the two that are run backward, the first."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    report = check_isolation(model, host_offsets=True)
    hook.remove()
    assert report.ok, report.to_text()
    return sum(sizes) + 2 * (sizes[0] + sizes[1])


def measure(name: str, rounds: int) -> dict[str, Any]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    calls = {"check": lambda: check_isolation(model, host_offsets=True)}
    calls |= {f"step of {budget}": lambda budget=budget: training_step(model, optimizer, budget) for budget in BUDGETS}
    times: dict[str, list[float]] = {call: [] for call in calls}
    # The first round warms up.
    for number in range(rounds + 1):
        for call, function in calls.items():
            start = time.process_time()
            function()
            if number:
                times[call].append(time.process_time() - start)
    seconds = {call: statistics.median(values) for call, values in times.items()}
    tokens = forward_tokens(model)
    row: dict[str, Any] = {"model": name, "forward tokens": tokens, "check, CPU s": seconds["check"]}
    for budget in BUDGETS:
        row[f"step of {budget}, CPU s"] = seconds[f"step of {budget}"]
        row[f"check in steps of {budget}"] = seconds["check"] / seconds[f"step of {budget}"]
        row[f"by tokens ({budget})"] = tokens / (3 * budget)
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[*TINY_NAMES.values(), LARGEST])
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    show(
        "The isolation check beside an optimiser step", [measure(name, args.rounds) for name in args.models], args.json
    )


if __name__ == "__main__":
    main()
