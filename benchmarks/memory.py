"""
The memory estimate beside what PyTorch's CPU allocator really hands out, and beside a table made by hand.

    python benchmarks/memory.py            tiny models and operations, measured; the recipes' table, by formula
    python benchmarks/memory.py --ranks    also 2 gloo processes under DDP and FSDP2

Measured is every allocation from building a tiny model to the end of its second training step: packed rows, LoRA or
all weights, TRL's fused head, AdamW. The head's tile of logits is made small on both sides, because it would drown the
layers of a tiny model; one case keeps it. The exit code is 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_packing import Boundaries, register_ops, safe_lora_targets
from trl_packing.memory import estimate_memory, measured_peak
from trl_packing.memory.activations import delta_rule_values, scan_values
from trl_packing.memory.model import build_on_meta
from trl_packing.ops.gated_delta_rule import gated_delta_rule
from trl_packing.ops.mamba2_scan import mamba2_scan
from trl_packing.quickstart.tiny import tiny_config

# Most relative error of an estimate, against measurements and against the table.
LIMIT, PAPER_LIMIT = 0.15, 0.25
SMALL_TILE = 64
LENGTHS = (100, 100, 100, 100, 100, 12)


@dataclass(frozen=True)
class Case:
    """A tiny training run."""

    architecture: str
    lora: bool = True
    bf16: bool = False
    checkpointing: bool = False
    lengths: tuple[int, ...] = LENGTHS
    small_tile: bool = True
    num_ranks: int = 1
    sharding: str = "ddp"
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.architecture, "lora" if self.lora else "all", "bf16" if self.bf16 else "fp32"]
        words += ["checkpointing"] * self.checkpointing + [self.sharding] * (self.num_ranks > 1)
        return " ".join([*words, f"{sum(self.lengths)} tokens in {len(self.lengths)}"])

    @property
    def dtype(self) -> torch.dtype:
        """As a user would load it: a frozen base in bf16, a trained one in float32 under autocast."""
        return torch.bfloat16 if self.bf16 and self.lora else torch.float32

    def config(self) -> Any:
        config = tiny_config(self.architecture)
        config.update(self.sizes)
        config._attn_implementation = "varlen"
        return config


def all_cases() -> list[Case]:
    switches = itertools.product(("llama", "qwen3_5", "qwen3_next", "bamba"), *[(True, False)] * 3)
    cases = [Case(*case) for case in switches]
    cases += [replace(case, lengths=(512,)) for case in cases]
    cases += [Case(architecture, lora, lengths=(24,)) for architecture in ("llama", "bamba") for lora in (True, False)]
    return [*cases, Case("llama", small_tile=False, sizes={"vocab_size": 4_096})]


def measure(case: Case) -> tuple[int, int]:
    """Peak bytes of a case, measured and estimated."""
    peft_config = LoraConfig(r=8, target_modules="auto") if case.lora else None
    with small_tile() if case.small_tile else nullcontext():
        measured = measured_peak(lambda: train_two_steps(case))
        estimate = estimate_memory(
            case.config(),
            row_tokens=sum(case.lengths),
            peft_config=peft_config,
            dtype=case.dtype,
            mixed_precision=case.bf16,
            gradient_checkpointing=case.checkpointing,
            num_ranks=case.num_ranks,
            sharding=case.sharding,  # type: ignore[arg-type]
            device="cpu",
            segments_per_row=len(case.lengths),
        )
    return measured, estimate.total


@contextmanager
def small_tile() -> Iterator[None]:
    """Let TRL compute logits in tiles of 64 by 64, and let the estimate know."""
    with (
        patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", SMALL_TILE),
        patch("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", SMALL_TILE),
        patch("trl_packing.memory.estimate.HEAD_COLUMNS", SMALL_TILE),
        patch("trl_packing.memory.estimate.HEAD_TOKENS", SMALL_TILE),
    ):
        yield


def train_two_steps(case: Case) -> None:
    register_ops()
    model = sharded_model(case) if case.sharding == "fsdp2" else whole_model(case)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.lora:
            model.enable_input_require_grads()
    if case.num_ranks > 1 and case.sharding == "ddp":
        # It would copy all weights to send them, in buckets of 250 MB, which is everything here.
        model = DistributedDataParallel(model, init_sync=False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], fused=True)
    row = packed_row(case.lengths)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = -model(**row, use_cache=False, fused_lm_head=True).log_probs.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_model(case: Case) -> Any:
    model = AutoModelForCausalLM.from_config(case.config(), dtype=case.dtype, attn_implementation="varlen")
    register_ops(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if case.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=safe_lora_targets(model)))
    return model.train()


def sharded_model(case: Case) -> Any:
    """FSDP2 from the meta device, so that no rank ever holds the whole model."""
    model = build_on_meta(case.config(), case.dtype, LoraConfig(r=8, target_modules="auto") if case.lora else None)
    base = model.get_base_model() if case.lora else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    mesh = init_device_mesh("cpu", (case.num_ranks,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(0.01)
    return model.train()


def packed_row(lengths: tuple[int, ...]) -> dict[str, Any]:
    boundaries = Boundaries.from_lengths(lengths)
    input_ids = torch.randint(3, 200, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    labels = input_ids.clone()
    labels[0, list(boundaries.offsets[:-1])] = -100
    return {"input_ids": input_ids, "labels": labels, **boundaries.to_model_kwargs(host_offsets=True)}


# ---- operations


def operations() -> list[tuple[str, int, float]]:
    """Bytes per token that our operations keep in one long segment, counted and by the estimate's factors."""
    results = []
    for heads, qk_width, v_width in ((4, 32, 32), (2, 64, 128), (4, 128, 128)):
        counted = kept_bytes(lambda n, h=heads, k=qk_width, v=v_width: _delta_rule_call(n, h, k, v))
        name = f"delta rule, {heads} heads, {qk_width} and {v_width} wide"
        results.append((name, counted, 4 * heads * delta_rule_values(qk_width, v_width)))
    for heads, width, groups, state in ((8, 16, 1, 16), (8, 64, 1, 128), (8, 32, 4, 64)):
        counted = kept_bytes(lambda n, s=(heads, width, groups, state): _scan_call(n, *s))
        name = f"Mamba-2 scan, {heads} heads {width} wide, {groups} groups of {state} states"
        results.append((name, counted, 4 * scan_values(heads, width, groups, state, 64)))
    return results


def kept_bytes(call: Callable[[int], tuple[Callable[[], Any], Any]], num_tokens: int = 1_024) -> int:
    """What a call's result and graph hold once it has returned."""
    run, _ = call(num_tokens)
    run()

    def keep() -> tuple[Any, torch.Tensor]:
        # Larger than every temporary, so that the peak is what is kept and this.
        return run(), torch.empty(2**28, dtype=torch.uint8)

    return round((measured_peak(keep) - 2**28) / num_tokens)


def _delta_rule_call(num_tokens: int, heads: int, qk_width: int, v_width: int) -> tuple[Callable[[], Any], Any]:
    q, k = (torch.randn(1, num_tokens, heads, qk_width, requires_grad=True) for _ in range(2))
    v = torch.randn(1, num_tokens, heads, v_width, requires_grad=True)
    g, beta = (torch.rand(1, num_tokens, heads, requires_grad=True) for _ in range(2))
    options = {"use_qk_l2norm_in_kernel": True, "lengths": (num_tokens,)}
    return lambda: gated_delta_rule(q, k, v, -g, beta, **options), (q, k, v, g, beta)


def _scan_call(num_tokens: int, heads: int, width: int, groups: int, state: int) -> tuple[Callable[[], Any], Any]:
    x = torch.randn(1, num_tokens, heads, width, requires_grad=True)
    dt = torch.rand(1, num_tokens, heads, requires_grad=True)
    write, read = (torch.randn(1, num_tokens, groups, state, requires_grad=True) for _ in range(2))
    decay = -torch.rand(heads)
    options: dict[str, Any] = {"D": torch.ones(heads), "dt_softplus": True, "lengths": (num_tokens,)}
    return lambda: mamba2_scan(x, dt, decay, write, read, 64, **options), (x, dt, write, read)


# ---- the recipes, by formula


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def llama(width: int, inner: int, layers: int, heads: int, tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
    )


def bamba() -> Any:
    return transformers.BambaConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_expand=2,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Recipe:
    """A row of the table: GiB of the base, trained parameters, GiB per GPU under DDP and FSDP2 on 8 and 4 GPUs."""

    config: Callable[[], Any]
    targets: list[str]
    base: float
    trained: float
    ddp: float | None
    fsdp_8: float
    fsdp_4: float
    experts: list[str] | None = None


RECIPES = {
    "Llama-3.2-1B": Recipe(lambda: llama(2_048, 8_192, 16, 32, True), ATTENTION + MLP, 2.3, 11.3e6, 5.7, 3.8, 4.1),
    "Llama-3.1-8B": Recipe(lambda: llama(4_096, 14_336, 32, 32), ATTENTION + MLP, 15.0, 41.9e6, 21.5, 8.7, 10.7),
    "Llama-3.3-70B": Recipe(lambda: llama(8_192, 28_672, 80, 64), ATTENTION + MLP, 131, 207e6, None, 36.5, 53),
    "Bamba-9B-v2": Recipe(bamba, [*ATTENTION, *MLP, "in_proj"], 18.2, 39.3e6, 24.8, 9.4, 11.7),
    "Qwen3-Next-80B-A3B": Recipe(
        transformers.Qwen3NextConfig, [*ATTENTION, "in_proj_qkvz", "out_proj"], 148, 15.9e6, None, 29, 48
    ),
    "the same + experts": Recipe(
        transformers.Qwen3NextConfig, [*ATTENTION, "in_proj_qkvz", "out_proj"], 148, 1.12e9, None, 37, 58, EXPERTS
    ),
}


def recipe_rows(name: str) -> list[tuple[str, float, float]]:
    """Label, value of the table and estimate of one recipe: rank 16, experts rank 8, rows of 8,192 tokens."""
    recipe = RECIPES[name]
    ranks = {"rank_pattern": {"gate_up_proj": 8, "down_proj": 8}} if recipe.experts else {}
    peft_config = LoraConfig(r=16, target_modules=recipe.targets, target_parameters=recipe.experts, **ranks)

    def estimate(num_ranks: int, sharding: Any) -> Any:
        return estimate_memory(
            recipe.config(), row_tokens=8_192, peft_config=peft_config, num_ranks=num_ranks, sharding=sharding
        )

    on_one, gib = estimate(1, "ddp"), 2**30
    rows = [("base", recipe.base, on_one.weights / gib), ("trained", recipe.trained, float(on_one.num_trained))]
    if recipe.ddp is not None:
        rows.append(("ddp", recipe.ddp, estimate(2, "ddp").total / gib))
    return [
        *rows,
        ("fsdp2 x8", recipe.fsdp_8, estimate(8, "fsdp2").total / gib),
        ("fsdp2 x4", recipe.fsdp_4, estimate(4, "fsdp2").total / gib),
    ]


# ---- processes


def measure_on_ranks(cases: list[Case]) -> list[tuple[int, int]]:
    """Measured on rank 0 of gloo processes, and estimated."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(folder), cases)
        torch.multiprocessing.start_processes(_on_rank, arguments, nprocs=cases[0].num_ranks, start_method="spawn")
        results: list[tuple[int, int]] = torch.load(Path(folder, "results"))
    return results


def _on_rank(rank: int, folder: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=cases[0].num_ranks)
    results = [measure(case) for case in cases]
    if rank == 0:
        torch.save(results, Path(folder, "results"))
    dist.destroy_process_group()


def rank_cases() -> list[Case]:
    # Wide enough that the weights are most of the memory.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 2_048}
    base = Case("llama", lengths=(48, 16), num_ranks=2, sizes=sizes)
    return [replace(base, lora=lora, sharding=sharding) for lora in (True, False) for sharding in ("ddp", "fsdp2")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--ranks", action="store_true", help="also measure 2 processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0

    def show(name: str, measured: float, estimated: float, limit: float, unit: float = 2**20) -> None:
        nonlocal failed
        error = estimated / measured - 1
        failed += abs(error) > limit
        mark = "" if abs(error) <= limit else "  ABOVE THE LIMIT"
        print(f"{name:<64} {measured / unit:>10.2f} {estimated / unit:>10.2f} {error:>+7.1%}{mark}", flush=True)

    print(f"{'tiny runs, MiB':<64} {'measured':>10} {'estimated':>10}")
    for case in all_cases():
        show(case.name, *measure(case), LIMIT)
    print("\noperations, bytes per token")
    for name, counted, estimated in operations():
        show(name, counted, estimated, LIMIT, 1)
    if arguments.ranks:
        print("\n2 processes, MiB on rank 0")
        for case, result in zip(rank_cases(), measure_on_ranks(rank_cases()), strict=True):
            show(case.name, *result, LIMIT)
    print("\nrecipes, GiB per GPU, on paper and by formula")
    for recipe in RECIPES:
        for label, paper, estimated in recipe_rows(recipe):
            show(f"{recipe}, {label}", paper, estimated, PAPER_LIMIT, 1e6 if label == "trained" else 1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
