"""The proof's row has what training rows have, and compares a segment of one token with itself alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from training import VOCAB_SIZE, conversations, model_of, packed_trainer
from transformers import AttentionInterface, AttentionMaskInterface

from trl_packing import LeakError, PackedCollator, check_isolation, register_ops
from trl_packing.register.attention import varlen_attention_forward

FIXED = {"packing": True, "row_shape": "fixed", "max_segments": 16, "token_budget": 512, "max_steps": 1}


def blind_behind_repeated_offsets(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A kernel that takes a repeated offset for the end of all boundaries."""
    if "cu_seq_lens_q" in kwargs and (kwargs["cu_seq_lens_q"].diff() == 0).any():
        whole = torch.tensor([0, query.shape[2]], dtype=torch.int32)
        kwargs |= {"cu_seq_lens_q": whole, "cu_seqlens_cpu": None, "max_length_q": query.shape[2]}
    return varlen_attention_forward(module, query, *args, **kwargs)


@pytest.fixture
def blind(monkeypatch):
    register_ops()
    AttentionInterface.register("blind", blind_behind_repeated_offsets)
    AttentionMaskInterface.register("blind", lambda *args, **kwargs: None)
    yield "blind"
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["blind"]


def test_a_kernel_that_repeated_offsets_mislead_stops_fixed_rows_only(blind, tmp_path):
    def trainer(**overrides: Any) -> Any:
        model = tiny_model("llama", attn_implementation=blind, vocab_size=VOCAB_SIZE)
        return packed_trainer(tmp_path, conversations(8), model=model, **overrides)

    with pytest.raises(LeakError, match="LlamaAttention"):
        trainer(**FIXED).train()
    exact = trainer(packing=True, max_steps=1)
    exact.train()
    assert exact.isolation_report.ok


class Recorder(nn.Module):
    """Notes the keywords of every call that has boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "cu_seq_lens_q" in kwargs:
            self.seen.append(kwargs)


@pytest.mark.parametrize("host_offsets", [True, False], ids=["host", "no_host"])
def test_rows_of_the_proof_have_the_keywords_of_the_users_collator(host_offsets, tmp_path):
    model, recorder = model_of(), Recorder()
    model.model.register_forward_pre_hook(recorder, with_kwargs=True)
    trainer = packed_trainer(tmp_path, conversations(8), model=model, packing=True, max_steps=1)
    trainer.data_collator = PackedCollator(position_ids_start=2, host_offsets=host_offsets)
    trainer.train()
    assert len(recorder.seen) > 4
    assert {int(kwargs["position_ids"].min()) for kwargs in recorder.seen} == {2}
    assert {"cu_seqlens_cpu" in kwargs for kwargs in recorder.seen} == {host_offsets}
    assert trainer.isolation_report.ok


class SkipsShortSegments(nn.Module):
    """Embeddings of a kernel that leaves out segments shorter than its tile."""

    def __init__(self, inner: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.lengths = inner, None
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        offsets = kwargs.get("cu_seq_lens_q")
        self.lengths = None if offsets is None else offsets.diff()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        if self.lengths is None:
            return hidden
        return hidden * (torch.repeat_interleave(self.lengths, self.lengths) >= 4)[None, :, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_segment_of_one_token_that_is_left_out_is_found(dtype, varlen):
    model = tiny_model("llama", dtype, varlen)
    assert check_isolation(model).ok
    assert check_isolation(model).probe("alone").detail.startswith("Segments 1 and 3 give")
    model.model.layers[1].mlp = SkipsShortSegments(model.model.layers[1].mlp, model.model)
    report = check_isolation(model)
    assert [probe.status for probe in report.probes] == ["passed", "passed", "passed", "failed"]
    with pytest.raises(LeakError, match=r"Segment 1 gives other logits.*layers\.1\.mlp"):
        report.raise_if_leaking()
