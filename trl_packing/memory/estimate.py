"""The estimate: what stays for the whole run, what a row adds, and when both together are largest."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from ..errors import PackingError
from ..layers import layer_kinds
from .activations import LayerBytes, Numerics, layer_bytes
from .model import build_on_meta, decoder_layers, quantised_weights, stored_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

Sharding: TypeAlias = Literal["ddp", "fsdp2"]

GIB = 2**30
# TRL's fused head: logits exist for so many tokens and so much of the vocabulary at a time.
HEAD_TOKENS, HEAD_COLUMNS = 4_096, 32_768
# Temporaries of its backward pass without Triton, in float32 per logit.
_HEAD_TEMPORARIES = 6.5
# Ids, labels, positions and log-probabilities of a token, and the share of a segment's last chunk that stays empty.
_BYTES_PER_TOKEN = 60
_EMPTY_SLOTS = 16


@dataclass(frozen=True)
class MemoryEstimate:
    """
    Bytes on each GPU where their sum is largest.

    Args:
        weights (`int`):
            Frozen weights, this GPU's share.
        trained_weights (`int`):
            Adapters, or all weights if there are none, this GPU's share.
        gradients (`int`):
            Of the trained weights, and DDP's buckets of them.
        optimizer (`int`):
            AdamW's two moments.
        gathered (`int`):
            Weights that are whole for a moment: under FSDP two layers, embeddings and head; the largest quantised
            matrix.
        activations (`int`):
            What the row's tokens keep for the backward pass, and its temporaries.
        logits (`int`):
            A tile of logits, hidden states and their gradient. Small unless the loss is the largest moment.
        peak_at (`str`):
            The moment: `"loss"`, `"last layer"` or `"first layer"` of the backward pass.
        num_parameters (`int`):
            Of the model and its adapters, on all GPUs.
        num_trained (`int`):
            Of those that are trained.
        row_tokens (`int`):
            Tokens in a packed row.
        num_ranks (`int`):
            GPUs.
        sharding (`str`):
            `"ddp"` or `"fsdp2"`.
        device (`str`):
            `"cuda"` or `"cpu"`.
    """

    weights: int
    trained_weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    peak_at: str
    num_parameters: int
    num_trained: int
    row_tokens: int
    num_ranks: int
    sharding: Sharding
    device: str

    @property
    def total(self) -> int:
        """Bytes that PyTorch's allocator hands out at the peak."""
        return (
            self.weights
            + self.trained_weights
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.logits
        )

    def to_dict(self) -> dict[str, Any]:
        """Give the numbers as JSON values, in bytes."""
        return {**asdict(self), "total": self.total}

    def to_text(self, width: int = 96) -> str:
        """
        Give the estimate as plain text.

        Args:
            width (`int`, *optional*, defaults to `96`):
                Most columns of a line.

        Returns:
            `str`: Lines without colour.
        """
        from rich.console import Console

        console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(self)
        lines = console.file.getvalue().rstrip().split("\n")  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for name, value, remark in self._lines():
            table.add_row(name, f"{value / GIB:,.2f} GiB", remark)
        place = "GPU" if self.device == "cuda" else "process"
        ranks = f" ({self.num_ranks} with {self.sharding})" if self.num_ranks > 1 else ""
        heading = f"Memory per {place}{ranks}, by formula; CUDA's own (about 1 GiB) and fragmentation come on top"
        return Group(Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)))

    def _lines(self) -> list[tuple[str, int, str]]:
        trained = f"{self.num_trained:,} of {self.num_parameters:,} parameters"
        lines = [
            ("frozen weights", self.weights, ""),
            ("trained weights", self.trained_weights, trained),
            ("gradients", self.gradients, ""),
            ("optimiser", self.optimizer, "two moments of AdamW"),
            ("gathered weights", self.gathered, "whole for a moment"),
            ("activations", self.activations, f"of a row of {self.row_tokens:,} tokens"),
            ("logits", self.logits, "in tiles"),
        ]
        return [*((*line,) for line in lines if line[1]), ("total", self.total, f"largest at the {self.peak_at}")]


def estimate_memory(
    config: Any,
    *,
    row_tokens: int,
    peft_config: Any = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str = "bfloat16",
    mixed_precision: bool = True,
    gradient_checkpointing: bool = True,
    gradient_accumulation_steps: int = 1,
    num_ranks: int = 1,
    sharding: Sharding = "ddp",
    device: str = "cuda",
    kernels: bool | None = None,
    segments_per_row: float = 1.0,
) -> MemoryEstimate:
    """
    Estimate the memory that packed training of a model needs on each GPU.

    Nothing is loaded: the model is built on the meta device, with its adapters. The formula, with T tokens in a row, L
    layers and R ranks:

    - weights, trained weights, gradients and two moments of AdamW: bytes of the parameters, divided by R under FSDP2.
      DDP adds a bucket as large as the gradients. (It also copies up to 250 MB of weights once, at its start.)
    - gathered under FSDP2: the two largest layers, embeddings, final norm and head, whole; if they are trained, also
      the gradients of embeddings and head, and twice that of one layer.
    - activations: T times what every layer keeps (see `activations`); with checkpointing T times D for the input of
      every layer, and what one layer keeps.
    - logits, as TRL computes them: a tile of 4,096 tokens by 32,768 columns, and T times D hidden states twice in the
      dtype of computing and once in float32.
    - the peak is the largest of three moments: the loss; the backward pass of the last layer; that of the first layer,
      when all gradients exist.

    Args:
        config (`transformers.PretrainedConfig`):
            Of the model.
        row_tokens (`int`):
            Tokens in a packed row, `token_budget`.
        peft_config (`peft.LoraConfig`, *optional*):
            Adapters; `target_modules: auto` is resolved. The default trains all weights.
        quantization_config (`transformers.BitsAndBytesConfig`, *optional*):
            Of the frozen weights.
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"bfloat16"`):
            The weights are loaded in.
        mixed_precision (`bool`, *optional*, defaults to `True`):
            Whether `bf16` or `fp16` is on, so that autocast computes in 2 bytes.
        gradient_checkpointing (`bool`, *optional*, defaults to `True`):
            Whether layers are computed twice to keep only their input.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Above 1 the gradients of earlier micro-steps are there when a row is computed.
        num_ranks (`int`, *optional*, defaults to `1`):
            GPUs.
        sharding (`str`, *optional*, defaults to `"ddp"`):
            `"ddp"` keeps everything on each GPU; `"fsdp2"` divides weights, gradients and optimiser state. ZeRO-3
            divides the same.
        device (`str`, *optional*, defaults to `"cuda"`):
            `"cpu"` has no Triton, so that the loss needs more.
        kernels (`bool`, *optional*):
            Whether recurrent layers run the CUDA packages' kernels instead of ours. The default is yes on CUDA.
        segments_per_row (`float`, *optional*, defaults to `1.0`):
            Segments in a row. Our recurrent operations leave a part of each segment's last chunk empty.

    Returns:
        [`MemoryEstimate`]: Of what PyTorch allocates. CUDA itself and fragmentation come on top.

    Raises:
        [`PackingError`]: If an argument is out of range.
    """
    if sharding not in ("ddp", "fsdp2"):
        raise PackingError(f"`sharding` must be one of ddp, fsdp2, but it is {sharding!r}. Pick one of them.")
    for name, value in {"row_tokens": row_tokens, "num_ranks": num_ranks}.items():
        if value < 1:
            raise PackingError(f"`{name}` must be at least 1, but it is {value}. Pass a positive integer.")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = build_on_meta(copy.deepcopy(config), dtype, peft_config, quantization_config)
    text_config = model.config.get_text_config()
    kernels = device == "cuda" if kernels is None else kernels
    numerics = Numerics(
        compute=2 if mixed_precision else dtype.itemsize,
        residual=dtype.itemsize,
        autocast=mixed_precision,
        kernels=kernels,
        slots=1 + _EMPTY_SLOTS * segments_per_row / row_tokens,
    )
    layers = decoder_layers(model, text_config)
    kinds = layer_kinds(text_config)
    costs = [layer_bytes(layer, text_config, kinds[i], i, numerics) for i, layer in enumerate(layers)]

    fixed = _fixed(model, layers, quantization_config, num_ranks, sharding)
    moments = _moments(costs, text_config, numerics, row_tokens, gradient_checkpointing)
    loss = _loss(model, text_config, numerics, row_tokens, device)
    buckets, gradients = fixed.pop("buckets"), fixed.pop("gradients")
    earlier = gradients if gradient_accumulation_steps > 1 else 0
    at = {
        "loss": (buckets + earlier, moments["loss"], loss),
        "last layer": (buckets + earlier, moments["last layer"], 0),
        "first layer": (buckets + gradients, moments["first layer"], 0),
    }
    peak_at = max(at, key=lambda moment: sum(at[moment]))
    parameters = list(model.parameters())
    return MemoryEstimate(
        **fixed,
        gradients=int(at[peak_at][0]),
        activations=int(at[peak_at][1]),
        logits=int(at[peak_at][2]),
        peak_at=peak_at,
        num_parameters=sum(weight.numel() for weight in parameters),
        num_trained=sum(weight.numel() for weight in parameters if weight.requires_grad),
        row_tokens=row_tokens,
        num_ranks=num_ranks,
        sharding=sharding,
        device=device,
    )


def _fixed(
    model: nn.Module, layers: list[nn.Module], quantization_config: Any, num_ranks: int, sharding: Sharding
) -> dict[str, int]:
    """What does not depend on the row."""
    frozen, trained = stored_bytes(model, quantization_config)
    divided = sharding == "fsdp2" and num_ranks > 1
    share = num_ranks if divided else 1
    gathered = 0.0
    if divided:
        by_layer = [stored_bytes(layer, quantization_config) for layer in layers]
        whole, trained_layers = sorted(map(sum, by_layer)), [layer[1] for layer in by_layer]
        gathered = sum(whole[-2:]) + frozen + trained - sum(whole)
        # Gradients before they are divided: of embeddings and head, of one layer, and its copy that is sent.
        gathered += trained - sum(trained_layers) + 2 * max(trained_layers)
    largest = max((weight.numel() for weight in quantised_weights(model, quantization_config)), default=0)
    return {
        "weights": frozen // share,
        "trained_weights": trained // share,
        "gradients": trained // share,
        "buckets": trained if num_ranks > 1 and not divided else 0,
        "optimizer": 2 * trained // share,
        "gathered": int(gathered + 2 * largest),
    }


def _moments(
    costs: list[LayerBytes], config: Any, numerics: Numerics, num_tokens: int, checkpointing: bool
) -> dict[str, float]:
    """Bytes of activations at the three moments."""
    width = config.hidden_size
    outside = num_tokens * (_BYTES_PER_TOKEN + (4 + 2 * numerics.compute) * width)
    kept = [num_tokens * cost.kept + cost.kept_weights for cost in costs]
    passing = [num_tokens * cost.transient + cost.transient_weights for cost in costs]
    inputs = num_tokens * numerics.residual * width
    if checkpointing:
        before = outside + inputs * len(costs)
        return {
            "loss": before,
            "last layer": before + max(map(sum, zip(kept, passing, strict=True))),
            "first layer": outside + inputs + kept[0] + passing[0],
        }
    return {
        "loss": outside + sum(kept),
        "last layer": outside + sum(kept) + max(passing),
        "first layer": outside + kept[0] + passing[0],
    }


def _loss(model: nn.Module, config: Any, numerics: Numerics, num_tokens: int, device: str) -> float:
    """TRL's fused head: logits in tiles, hidden states of all tokens and their gradient."""
    columns, tokens = min(config.vocab_size, HEAD_COLUMNS), min(num_tokens, HEAD_TOKENS)
    tile = numerics.compute * tokens * HEAD_COLUMNS
    temporaries = 0.0 if device == "cuda" else _HEAD_TEMPORARIES * 4 * tokens * columns
    hidden = num_tokens * config.hidden_size * (4 + numerics.compute)
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    converted = columns * config.hidden_size * numerics.compute if head.element_size() != numerics.compute else 0
    gradient = 4 * head.numel() if head.requires_grad else 0
    return tile + temporaries + hidden + converted + gradient
