"""
Which architectures train exactly on packed rows: every causal LM class of transformers that a config can build.

    python benchmarks/audit.py                      all types: minutes on one core
    python benchmarks/audit.py --fast               one type per kind of layer
    python benchmarks/audit.py --types llama bamba  these

Each tiny model gets one packed row with every boundary keyword, once as transformers alone runs it and once with
`register_ops`. It is judged by three numbers: how far a segment's logits move when another's tokens change, the
gradient of a segment's logits at another's input embeddings, and the difference to the samples alone. Where they are
not right with `register_ops`, the model must be refused before the first step: by name, by an error in the forward, or
by `check_isolation`. Where they are, `check_isolation` must not refuse it, in float32 and in bfloat16. Otherwise the
exit code is 1. The table and the numbers go to `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import TINY_TYPES, tiny_model  # noqa: E402

from trl_packing import (  # noqa: E402
    Boundaries,
    LeakError,
    PackingError,
    check_isolation,
    register_ops,
    unregister_ops,
)
from trl_packing.register.dispatch import refuse_unsupported  # noqa: E402

LENGTHS = (11, 6, 1, 9)
SETTINGS = (("stock", "eager"), ("stock", "sdpa"), ("ours", "eager"), ("ours", "sdpa"), ("ours", "varlen"))
FAST = [
    "llama",
    "gemma2",
    "gpt_oss",
    "opt",
    "bloom",
    "qwen3_next",
    "qwen3_5_text",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "lfm2",
    "kimi_linear",
    "mamba",
    "mamba2",
    "jamba",
    "zamba2",
    "minimax",
    "rwkv",
]

# Relative to the largest logit, and to the gradient at a segment's own embeddings. Rounding of a tiny float32 model
# stays below; leaks are at 1e-4 and above. What lies between is measured again in float64.
LEAK, DOUBT, DIFFERENCE = 1e-6, 1e-3, 1e-5

EXACT, REFUSED, LEAKING, NUMBERS, ABSENT = "exact", "refused", "leaking", "other numbers", "-"
FALSE_ALARM = "false alarm"


@dataclass
class Cell:
    """What one model did under one setting."""

    model_type: str
    operations: str
    attention: str
    status: str
    detail: str = ""
    move: float | None = None
    gradient: float | None = None
    alone: float | None = None


def audit(model_type: str, operations: str, attention: str) -> Cell:
    """Judge one model type under one setting."""
    cell = Cell(model_type, operations, attention, ABSENT)
    try:
        if operations == "ours":
            register_ops()
        model = tiny_model(model_type, attn_implementation=attention)
    # Some models look the name up in a table of their own.
    except (ValueError, ImportError, KeyError) as error:
        cell.detail = _first_sentence(error)
        return cell
    try:
        if operations == "ours":
            register_ops(model)
            refuse_unsupported(model)
        _judge(cell, model)
        if cell.status in (LEAKING, NUMBERS) and operations == "ours":
            report = check_isolation(model)
            if not report.ok:
                cell.status, cell.detail = REFUSED, f"check_isolation: {cell.status}"
        if cell.status == EXACT and operations == "ours":
            _look_for_alarm(cell)
    except (LeakError, PackingError) as error:
        cell.status, cell.detail = REFUSED, _first_sentence(error)
    except Exception as error:
        cell.status, cell.detail = REFUSED, f"{type(error).__name__}: {_first_sentence(error)}"
    finally:
        unregister_ops()
    return cell


def _look_for_alarm(cell: Cell) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(cell.model_type, dtype, cell.attention)
        register_ops(model)
        report = check_isolation(model, host_offsets=True)
        if not report.ok:
            cell.status, cell.detail = FALSE_ALARM, f"{dtype}: " + " ".join(report.to_text().split())


def _judge(cell: Cell, model: nn.Module) -> None:
    cell.move, cell.gradient, cell.alone = measure(model)
    if LEAK < max(cell.move, cell.gradient) < DOUBT:
        model.config._experts_implementation = "eager"
        cell.move, cell.gradient, cell.alone = measure(model.double())
    if max(cell.move, cell.gradient) > LEAK:
        cell.status = LEAKING
    else:
        cell.status = EXACT if cell.alone < DIFFERENCE else NUMBERS


def measure(model: nn.Module) -> tuple[float, float, float]:
    """Give largest move, largest foreign gradient, and largest difference to the samples alone, all relative."""
    generator = torch.Generator().manual_seed(1)
    sizes = list(LENGTHS)
    ids = torch.randint(4, 128, (1, sum(sizes)), generator=generator)
    embedded: list[torch.Tensor] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embedded.append(out))
    packed = _forward(model, ids, packed=True)
    handle.remove()
    # Audio decoders look codebooks up in a list of embeddings, which no hook sees. Their moves have to do.
    gradient = _foreign_gradient(packed, embedded[-1]) if embedded else 0.0
    scale = packed.abs().max().item()
    move = 0.0
    with torch.no_grad():
        before = _forward(model, ids, packed=True).split(sizes, dim=1)
        for changed in range(len(sizes)):
            samples = list(ids.split(sizes, dim=1))
            samples[changed] = 4 + (samples[changed] + 3) % 124
            after = _forward(model, torch.cat(samples, dim=1), packed=True).split(sizes, dim=1)
            moves = [(new - old).abs().max().item() for new, old in zip(after, before, strict=True)]
            move = max([move, *moves[:changed], *moves[changed + 1 :]])
        alone = torch.cat([_forward(model, sample, packed=False) for sample in ids.split(sizes, dim=1)], dim=1)
    return move / scale, gradient, (packed - alone).abs().max().item() / scale


def _forward(model: nn.Module, ids: torch.Tensor, *, packed: bool) -> torch.Tensor:
    # Some routers draw noise in training.
    torch.manual_seed(0)
    kwargs = Boundaries.from_lengths(LENGTHS).to_model_kwargs() if packed else {}
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def _foreign_gradient(logits: torch.Tensor, embedded: torch.Tensor) -> float:
    sizes, own, foreign = list(LENGTHS), 0.0, 0.0
    for segment, part in enumerate(logits.split(sizes, dim=1)):
        weights = torch.linspace(-1, 1, part.numel()).view_as(part)
        (gradient,) = torch.autograd.grad((part * weights).sum(), embedded, retain_graph=True)
        effects = [piece.abs().max().item() for piece in gradient.view(1, sum(sizes), -1).split(sizes, dim=1)]
        own = max(own, effects[segment])
        foreign = max([foreign, *effects[:segment], *effects[segment + 1 :]])
    return foreign / own


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:160] if len(text) <= 160 else text[:157] + "..."


def table(cells: list[Cell]) -> str:
    """Lay the cells out as a Markdown page: counts per setting, then one row per type."""
    columns = [f"{operations}, {attention}" for operations, attention in SETTINGS]
    lines = [
        "# Architectures on packed rows",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()} CPU, no CUDA "
        f"kernels. Segments of {', '.join(map(str, LENGTHS))} tokens, every boundary keyword passed. "
        "`stock` is transformers alone, `ours` is after `register_ops(model)`.",
        "",
        "- exact: nothing of one segment reaches another, and the logits are those of the samples alone",
        "- refused: stopped before the first step, by name, by an error or by `check_isolation`",
        "- leaking: one segment changes another without a message",
        "- other numbers: segments are apart, but the logits are not those of the samples alone",
        "- `-`: the architecture does not offer this attention",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    by_type: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_type.setdefault(cell.model_type, {})[f"{cell.operations}, {cell.attention}"] = cell
    for status in (EXACT, REFUSED, LEAKING, NUMBERS, ABSENT):
        counts = Counter(column for row in by_type.values() for column in columns if row[column].status == status)
        lines.append(f"| {status} | " + " | ".join(str(counts[column]) for column in columns) + " |")
    lines += ["", "| architecture | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for model_type, row in sorted(by_type.items()):
        lines.append(f"| {model_type} | " + " | ".join(row[column].status for column in columns) + " |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.operations == "ours" and cell.status == REFUSED:
            reasons.setdefault((cell.model_type, cell.detail), []).append(cell.attention)
    lines += ["", "## Why refused", ""]
    lines += [f"- {name} ({', '.join(attentions)}): {why}" for (name, why), attentions in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _plain(cell: Cell) -> dict[str, Any]:
    numbers = {name: float(f"{value:.3g}") for name, value in asdict(cell).items() if isinstance(value, float)}
    return {name: value for name, value in asdict(cell).items() if value not in (None, "")} | numbers


def main() -> int:
    """Run the audit and write its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="one type per kind of layer")
    parser.add_argument("--types", nargs="+", default=None, help="only these model types")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels.layer.layer").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    types = args.types or (FAST if args.fast else TINY_TYPES)
    cells = []
    for model_type in types:
        row = [audit(model_type, operations, attention) for operations, attention in SETTINGS]
        print(f"{model_type:26s}" + " ".join(f"{cell.status:14s}" for cell in row), flush=True)
        cells += row
    if not args.types:
        args.out.mkdir(parents=True, exist_ok=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        lines = ",\n".join(json.dumps(_plain(cell)) for cell in cells)
        head = json.dumps({"versions": versions, "lengths": LENGTHS})[:-1]
        name = "audit_fast" if args.fast else "audit"
        (args.out / f"{name}.json").write_text(f'{head}, "cells": [\n{lines}\n]}}\n')
        (args.out / f"{name}.md").write_text(table(cells))
    bad = [cell for cell in cells if cell.operations == "ours" and cell.status in (LEAKING, NUMBERS, FALSE_ALARM)]
    for cell in bad:
        print(f"{'REFUSED' if cell.status == FALSE_ALARM else 'NOT REFUSED'}: {cell}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
