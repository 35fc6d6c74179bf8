"""
Packing for a speech recogniser: padded encoder batch -> `pack_rows` -> decoder -> loss.

    python recipes/asr_decoder.py

Runs offline on a CPU in under a minute. The same model is trained twice on the same batches, padded and packed, and
the two runs are printed side by side. Everything is built here from configs and a seed: synthetic clips of 0.1 to
30 s, a small convolutional encoder, a projector, and a tiny Llama decoder with LoRA.

For a model of your own, keep your padded batch as it is and take over what `packed_loss` does with it.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing import pack_rows, register_ops, unpack_rows

NUM_MELS = 16
NUM_PHONES = 30
FRAMES_PER_SECOND = 100
# 80 ms of sound per decoder token.
FRAMES_PER_TOKEN = 8
SECONDS = (0.1, 30.0)
PHONES_PER_SECOND = 3
PHONES_PER_CLIP = 3
END_OF_TEXT = NUM_PHONES
WIDTH = 128


@dataclass
class Clips:
    """A padded batch of clips with their transcripts."""

    features: torch.Tensor  # [B, frames, NUM_MELS]
    num_frames: list[int]
    transcripts: list[torch.Tensor]  # int64, ending with END_OF_TEXT


def synthetic_clips(num_batches: int, batch_size: int, seed: int) -> Iterator[Clips]:
    """Clips of uniform length, of a few phones each: a phone is a fixed spectrum, held for a third of a second."""
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.randn(NUM_PHONES, NUM_MELS, generator=generator)
    for _ in range(num_batches):
        seconds = torch.empty(batch_size).uniform_(*SECONDS, generator=generator).tolist()
        features, transcripts = [], []
        for duration in seconds:
            num_frames = round(duration * FRAMES_PER_SECOND)
            num_phones = max(1, round(duration * PHONES_PER_SECOND))
            few = torch.randperm(NUM_PHONES, generator=generator)[:PHONES_PER_CLIP]
            phones = few[torch.randint(PHONES_PER_CLIP, (num_phones,), generator=generator)]
            held = phones[torch.arange(num_frames) * num_phones // num_frames]
            features.append(spectra[held] + 0.3 * torch.randn(num_frames, NUM_MELS, generator=generator))
            transcripts.append(torch.cat([phones, torch.tensor([END_OF_TEXT])]))
        yield Clips(pad_sequence(features, batch_first=True), [len(clip) for clip in features], transcripts)


class SpeechModel(nn.Module):
    """Encoder, projector and decoder. Only the decoder cares whether its batch is padded or packed."""

    def __init__(self) -> None:
        super().__init__()
        # Strides equal to the kernels: no encoder output depends on more padding than its own last frames.
        self.encoder = nn.Sequential(
            nn.Conv1d(NUM_MELS, 64, kernel_size=4, stride=4),
            nn.GELU(),
            nn.Conv1d(64, WIDTH, kernel_size=FRAMES_PER_TOKEN // 4, stride=FRAMES_PER_TOKEN // 4),
        )
        self.projector = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
        config = LlamaConfig(
            vocab_size=NUM_PHONES + 1,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="varlen",
        )
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.decoder = get_peft_model(LlamaForCausalLM(config), lora)

    def decoder_batch(self, clips: Clips) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings `[B, L, WIDTH]`, attention mask and labels `[B, L]`: sound, then text, then pads."""
        num_tail_frames = -clips.features.shape[1] % FRAMES_PER_TOKEN
        features = nn.functional.pad(clips.features.transpose(1, 2), (0, num_tail_frames))
        sound = self.projector(self.encoder(features).transpose(1, 2))
        embed = self.decoder.get_input_embeddings()
        rows, labels = [], []
        for row, transcript in enumerate(clips.transcripts):
            num_tokens = -(-clips.num_frames[row] // FRAMES_PER_TOKEN)
            rows.append(torch.cat([sound[row, :num_tokens], embed(transcript)]))
            labels.append(torch.cat([torch.full((num_tokens,), -100), transcript]))
        attention_mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
        return (
            pad_sequence(rows, batch_first=True),
            attention_mask,
            pad_sequence(labels, batch_first=True, padding_value=-100),
        )


@dataclass
class Run:
    """What one of the two runs did."""

    model: SpeechModel
    losses: list[float]
    num_decoder_tokens: int = 0
    cpu_seconds: float = 0.0


def padded_loss(model: SpeechModel, clips: Clips) -> tuple[torch.Tensor, int]:
    """The batch as most recognisers run it."""
    inputs_embeds, attention_mask, labels = model.decoder_batch(clips)
    out = model.decoder(inputs_embeds=inputs_embeds, attention_mask=attention_mask, labels=labels, use_cache=False)
    return out.loss, attention_mask.numel()


def packed_loss(model: SpeechModel, clips: Clips) -> tuple[torch.Tensor, int]:
    """The same batch without its pads."""
    packed = pack_rows(*model.decoder_batch(clips))
    out = model.decoder(**packed.model_kwargs())
    return out.loss, packed.boundaries.total_tokens


def train_step(
    run: Run,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[SpeechModel, Clips], tuple[torch.Tensor, int]],
    clips: Clips,
) -> None:
    """One optimiser step of encoder, projector and adapters, with its CPU time."""
    start = time.process_time()
    loss, num_decoder_tokens = loss_of(run.model, clips)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.cpu_seconds += time.process_time() - start
    run.num_decoder_tokens += num_decoder_tokens
    run.losses.append(loss.item())


@torch.no_grad()
def largest_logit_difference(model: SpeechModel, clips: Clips) -> float:
    """Run one model on one batch both ways: the largest difference over all real tokens."""
    inputs_embeds, attention_mask, _ = model.decoder_batch(clips)
    padded = model.decoder(inputs_embeds=inputs_embeds, attention_mask=attention_mask, use_cache=False).logits
    packed = pack_rows(inputs_embeds, attention_mask)
    unpacked = unpack_rows(model.decoder(**packed.model_kwargs()).logits, packed)
    return (padded - unpacked)[attention_mask.bool()].abs().max().item()


def report(padded: Run, packed: Run, logit_difference: float) -> str:
    """The two runs side by side."""
    tokens = 1 - packed.num_decoder_tokens / padded.num_decoder_tokens
    seconds = 1 - packed.cpu_seconds / padded.cpu_seconds
    apart = max(abs(a - b) for a, b in zip(padded.losses, packed.losses, strict=True))
    rows = [
        ("first loss", f"{padded.losses[0]:.6f}", f"{packed.losses[0]:.6f}", ""),
        ("last loss", f"{padded.losses[-1]:.6f}", f"{packed.losses[-1]:.6f}", f"largest difference {apart:.1e}"),
        (
            "decoder tokens",
            f"{padded.num_decoder_tokens:,}",
            f"{packed.num_decoder_tokens:,}",
            f"saved {tokens:.1%}, the padding share",
        ),
        ("CPU seconds", f"{padded.cpu_seconds:.1f}", f"{packed.cpu_seconds:.1f}", f"saved {seconds:.1%}"),
    ]
    lines = [
        f"{name:<16}{left:>12}{right:>12}  {note}" for name, left, right, note in [("", "padded", "packed", ""), *rows]
    ]
    lines.append(f"Logits of the trained model, padded against packed: largest difference {logit_difference:.1e}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> tuple[Run, Run]:
    """Train both ways, print the comparison, and return both runs."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="optimiser steps of each run (default: 15)")
    parser.add_argument("--batch-size", type=int, default=12, help="clips per step (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and clips (default: 0)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.batch_size < 1:
        parser.error("--steps and --batch-size need at least 1")

    register_ops()
    torch.manual_seed(options.seed)
    model = SpeechModel()
    padded, packed = Run(model, []), Run(copy.deepcopy(model), [])
    *batches, last = synthetic_clips(options.steps + 1, options.batch_size, options.seed)
    # Would this decoder keep the clips of one row apart? Once, before training.
    with torch.no_grad():
        packed_batch = pack_rows(*packed.model.decoder_batch(last))
    packed_batch.check(packed.model.decoder)
    trainable = [[p for p in run.model.parameters() if p.requires_grad] for run in (padded, packed)]
    optimizers = [torch.optim.AdamW(parameters, lr=3e-3) for parameters in trainable]
    for clips in batches:
        train_step(padded, optimizers[0], padded_loss, clips)
        train_step(packed, optimizers[1], packed_loss, clips)
    print(report(padded, packed, largest_logit_difference(packed.model, last)))
    return padded, packed


if __name__ == "__main__":
    main()
