"""
The model sections of gpu.py: training throughput, device reads and compilation of models built from configs.

TRL runs flash attention where the package is installed, else sdpa; its hybrids need the packages' kernels. Ours run
what `attn_implementation: auto` picks. Weights are bf16, all are trained, with gradient checkpointing and AdamW.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from common import Emit, guarded
from datasets import Dataset
from distributions import draw
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import SFTConfig, SFTTrainer, pack_dataset

from trl_packing import (
    PackedCollator,
    PackedSFTConfig,
    PackedSFTTrainer,
    check_isolation,
    register_ops,
    unregister_ops,
)
from trl_packing.preflight import choose_attention
from trl_packing.quickstart.tiny import byte_tokenizer, tiny_config

ROW = {"1b": 8_192, "tiny": 256}
LONGEST = {"1b": 4_096, "tiny": 128}
NUM_TOKENS = {"1b": 1_000_000, "tiny": 2_000}
# Steps between two looks at the clock, each of which waits for the device.
INTERVAL = {"1b": 4, "tiny": 1}
VARIANTS = ("TRL padded", "TRL bfd", "ours", "ours, fixed rows")
ARCHITECTURES = ("llama", "qwen3_next", "bamba")
# What the profiler calls a wait or a copy to the host, on a GPU and, the last two, on any device.
READS = {
    "cudaStreamSynchronize": "stream waits",
    "cudaDeviceSynchronize": "device waits",
    "Memcpy DtoH": "copies to host",
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
}


def config_of(architecture: str, size: str, num_layers: int | None = None) -> PreTrainedConfig:
    """A model of about 1B, or a tiny one. `num_layers` keeps a part of it that has each kind of layer."""
    if size == "tiny":
        return tiny_config(architecture)
    total = num_layers or 16
    shared: dict[str, Any] = {"vocab_size": 32_768, "max_position_embeddings": 32_768, "num_hidden_layers": total}
    if architecture == "llama":
        sizes = {"hidden_size": 2_048, "intermediate_size": 8_192, "num_attention_heads": 32, "num_key_value_heads": 8}
        return transformers.LlamaConfig(**shared, **sizes, tie_word_embeddings=True)
    if architecture == "qwen3_next":
        return transformers.Qwen3NextConfig(
            **shared,
            hidden_size=1_536,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=384,
            shared_expert_intermediate_size=384,
        )
    indices = [index for index in range(total) if index % 6 == 3]
    sizes = {"hidden_size": 2_048, "intermediate_size": 5_632, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes |= {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
    return transformers.BambaConfig(**shared, **sizes, attn_layer_indices=indices)


def build(config: PreTrainedConfig, ours: bool, device: str) -> Any:
    """A model with random weights, in bf16 on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    attention = "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"
    # TRL's side runs transformers as it is.
    unregister_ops()
    if ours:
        register_ops()
        attention, _ = choose_attention(config, dtype, torch.device(device))
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def trainer_of(variant: str, config: PreTrainedConfig, device: str, size: str, folder: str, **settings: Any) -> Any:
    """The trainer of a variant, on the same samples for all."""
    row, longest, ours = ROW[size], LONGEST[size], variant.startswith("ours")
    lengths = np.minimum(draw("lognormal", NUM_TOKENS[size]), longest)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), NUM_TOKENS[size]))]
    rng, most = np.random.default_rng(0), config.vocab_size
    samples = [rng.integers(3, most, length).tolist() for length in lengths]
    dataset = Dataset.from_dict({"input_ids": samples, "labels": samples})
    settings = {
        "output_dir": folder,
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        "per_device_train_batch_size": 16 if variant == "TRL padded" else 1,
        "max_length": longest,
        "router_aux_loss_coef": 0.0,
        **settings,
    }
    if variant == "TRL bfd":
        dataset = pack_dataset(dataset, row, "bfd")
        settings |= {"padding_free": True, "max_length": None}
    if ours:
        settings |= {"packing": True, "token_budget": row, "isolation_check": "off"}
    if variant == "ours, fixed rows":
        settings |= {"row_shape": "fixed", "max_segments": row // 16}
    kind, args = (PackedSFTTrainer, PackedSFTConfig) if ours else (SFTTrainer, SFTConfig)
    return kind(
        model=build(config, ours, device),
        args=args(**settings),
        train_dataset=dataset,
        processing_class=byte_tokenizer(),
    )


# ---- throughput


class Clock(TrainerCallback):
    """Notes time and trained tokens at every log, and stops the run when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.marks, self.losses = seconds, [], []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.marks.append((time.perf_counter(), logs["num_tokens"]))
            self.losses.append(logs["loss"])
            # The first interval warms up.
            control.should_training_stop = len(self.marks) > 2 and self.marks[-1][0] > self.marks[0][0] + self.seconds


def throughput(architecture: str, device: str, size: str, seconds: float, emit: Emit) -> None:
    """The proof on the very model, then the variants one after the other."""
    config = config_of(architecture, size)
    guarded(emit, "isolation", architecture, partial(_isolation, config, device))
    rates: dict[str, float] = {}
    # Half of the time goes to imports, models and first calls.
    each = min(12.0, 0.5 * seconds / len(VARIANTS))
    for variant in VARIANTS:
        _free(device)
        guarded(emit, "training", variant, partial(_train, variant, config, device, size, each, rates))


def _isolation(config: PreTrainedConfig, device: str) -> dict[str, Any]:
    model = build(config, True, device)
    register_ops(model)
    report = check_isolation(model)
    return {
        "attention": model.config._attn_implementation,
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:,.0f}M",
        "largest leak": f"{report.max_leak:.1e}",
        "holds": "yes" if report.ok else "no",
    }


def _train(
    variant: str, config: PreTrainedConfig, device: str, size: str, seconds: float, rates: dict[str, float]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = trainer_of(variant, config, device, size, folder, logging_steps=INTERVAL[size])
        clock = Clock(seconds)
        trainer.add_callback(clock)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    (start, before), (stop, after) = clock.marks[0], clock.marks[-1]
    rates[variant] = (after - before) / (stop - start)
    padded, packed = rates.get("TRL padded"), rates.get("TRL bfd")
    return {
        "variant": variant,
        "attention": trainer.model.config._attn_implementation,
        "tokens/s": rates[variant],
        "x padded": rates[variant] / padded if padded else "",
        "x bfd": rates[variant] / packed if packed else "",
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else "",
        "steps": trainer.state.global_step,
        "first loss": clock.losses[0],
    }


# ---- device reads


class Profiled(TrainerCallback):
    """Profiles two micro-steps of the second optimiser step: from the end of its first to the end of its third."""

    def __init__(self, device: str) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        self.profiler, self.num_ends = profile(activities=activities), 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_ends += state.global_step == 1
        if self.num_ends == 1:
            self.profiler.start()
        elif self.num_ends == 3:
            self.profiler.stop()

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for event in self.profiler.events():
            for name, what in READS.items():
                found[what] += event.name.startswith(name)
        return found


def syncs(device: str, size: str, emit: Emit) -> None:
    """Waits and copies per micro-step, of a part of each model. Experts read, too, on a CPU."""
    for architecture in ARCHITECTURES:
        config = config_of(architecture, size, num_layers=4)
        for variant in ("TRL bfd", "ours"):
            _free(device)
            guarded(
                emit, "per micro-step", f"{architecture}, {variant}", partial(_reads, variant, config, device, size)
            )


def _reads(variant: str, config: PreTrainedConfig, device: str, size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        settings = {"logging_steps": 100, "gradient_accumulation_steps": 4, "max_steps": 2}
        trainer = trainer_of(variant, config, device, size, folder, **settings, gradient_checkpointing=False)
        profiled = Profiled(device)
        trainer.add_callback(profiled)
        trainer.train()
    counts = profiled.counts()
    return {
        "model": config.model_type,
        "trainer": variant,
        **{what: counts[what] / 2 for what in dict.fromkeys(READS.values())},
    }


# ---- compilation


def compiled(device: str, size: str, emit: Emit) -> None:
    """Fixed rows through `torch.compile`: a first pass over ragged rows compiles, a second is timed against eager."""
    for architecture in ARCHITECTURES:
        _free(device)
        guarded(emit, "fixed rows", architecture, partial(_compiled, architecture, device, size))


def _compiled(architecture: str, device: str, size: str) -> dict[str, Any]:
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    config = config_of(architecture, size, num_layers=4)
    if architecture == "qwen3_next":
        # What is measured are boundaries. Experts choose their tokens by data.
        config.mlp_only_layers = list(range(config.num_hidden_layers))
    model = build(config, True, device).train()
    register_ops(model)
    rows = _ragged_rows(size, device)
    seconds, losses = {}, {}
    for name, called in (("eager", model), ("compiled", torch.compile(model, backend=backend))):
        _pass(called, rows, device)
        start = time.perf_counter()
        losses[name] = _pass(called, rows, device)
        seconds[name] = (time.perf_counter() - start) / len(rows)
    metrics = get_compilation_metrics()
    return {
        "model": architecture,
        "backend": backend,
        "rows": len(rows),
        "bounds": len({row["max_length_q"] for row in rows}),
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(metric.recompile_reason is not None for metric in metrics),
        "graph breaks": sum(counters["graph_break"].values()),
        "eager ms": 1e3 * seconds["eager"],
        "compiled ms": 1e3 * seconds["compiled"],
        "largest loss difference": f"{max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True)):.1e}",
    }


def _ragged_rows(size: str, device: str) -> list[dict[str, Any]]:
    row, rng = ROW[size], np.random.default_rng(0)
    collate, rows = PackedCollator(token_budget=row, max_segments=row // 4), []
    for longest in (row // 8, row // 4, row // 2, row // 8, row // 4, row // 2):
        samples: list[dict[str, Any]] = []
        left = row
        while (length := int(rng.integers(2, longest))) <= left and len(samples) < row // 4:
            samples.append({"input_ids": rng.integers(3, 250, length)})
            left -= length
        packed = collate(samples)
        rows.append(
            {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in packed.items()}
        )
    return rows


def _pass(model: Any, rows: list[dict[str, Any]], device: str) -> list[float]:
    losses = []
    for row in rows:
        loss = model(use_cache=False, **row).loss
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        parameter.grad = None
    return [float(loss) for loss in losses]


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
