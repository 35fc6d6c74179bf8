"""A padded batch packed by `pack_rows` keeps its rows apart, in order and in place, whatever side the pads are on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model

from trl_packing import LeakError, PackingError, pack_rows, register_ops, unpack_rows

LENGTHS = (7, 0, 3, 12, 1)
WIDTH = 8


def padded_mask(lengths: tuple[int, ...], side: str, padded_length: int | None = None) -> torch.Tensor:
    padded_length = padded_length or max(lengths)
    columns = torch.arange(padded_length)[None]
    real = torch.tensor(lengths)[:, None]
    return (columns < real if side == "right" else columns >= padded_length - real).long()


def padded_batch(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = padded_mask(LENGTHS, side)
    embeddings = torch.randn(*mask.shape, WIDTH, requires_grad=True)
    labels = torch.randint(0, 50, mask.shape)
    return embeddings, mask, labels


# ---- the layout, exact


@pytest.mark.parametrize("side", ["left", "right"])
def test_asr_batch_packs_in_row_order_without_pads(side: str) -> None:
    embeddings, mask, labels = padded_batch(side)
    packed = pack_rows(embeddings, mask, labels)
    kwargs = packed.model_kwargs()

    assert kwargs["cu_seq_lens_q"].tolist() == [0, 7, 10, 22, 23]
    assert packed.segment_rows == (0, 2, 3, 4)
    assert packed.row_lengths == LENGTHS
    assert kwargs["max_length_q"] == 12
    assert kwargs["position_ids"].tolist() == [[*range(7), *range(3), *range(12), 0]]
    assert "attention_mask" not in kwargs
    assert kwargs["use_cache"] is False
    assert torch.equal(kwargs["inputs_embeds"][0], embeddings[mask.bool()])
    expected_labels = labels[mask.bool()].clone()
    expected_labels[[0, 7, 10, 22]] = -100
    assert kwargs["labels"].tolist() == [expected_labels.tolist()]
    assert packed.padding_share == 1 - 23 / 60


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpack_restores_the_padded_layout_with_zeros_at_pads(side: str) -> None:
    embeddings, mask, _ = padded_batch(side)
    packed = pack_rows(embeddings, mask)
    restored = unpack_rows(packed.inputs_embeds, packed)
    assert torch.equal(restored, embeddings * mask[..., None])


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_reach_the_embeddings_and_no_pad(side: str) -> None:
    embeddings, mask, _ = padded_batch(side)
    packed = pack_rows(embeddings, mask)
    weight = torch.randn(5, 12, WIDTH)
    (unpack_rows(packed.inputs_embeds, packed) * weight).sum().backward()
    assert torch.equal(embeddings.grad, weight * mask[..., None])


def test_random_masks_round_trip_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        rows = int(torch.randint(1, 6, (), generator=generator))
        columns = int(torch.randint(1, 9, (), generator=generator))
        starts = torch.randint(0, columns, (rows, 1), generator=generator)
        ends = torch.randint(0, columns + 1, (rows, 1), generator=generator)
        mask = (torch.arange(columns) >= starts) & (torch.arange(columns) < ends)
        ids = torch.randint(1, 99, (rows, columns), generator=generator)
        if not mask.any():
            continue
        packed = pack_rows(input_ids=ids, attention_mask=mask)
        assert torch.equal(packed.input_ids[0], ids[mask])
        assert torch.equal(unpack_rows(packed.input_ids, packed), ids * mask)
        assert packed.row_lengths == tuple(mask.sum(1).tolist())


def test_extra_tensors_are_packed_along_and_kept_out_of_the_model_call() -> None:
    embeddings, mask, _ = padded_batch("left")
    weights, spans = torch.randn(5, 12), torch.randn(5, 12, 2, 3)
    packed = pack_rows(embeddings, mask, extra={"loss_weights": weights, "spans": spans})
    assert torch.equal(packed.extra["loss_weights"][0], weights[mask.bool()])
    assert torch.equal(packed.extra["spans"][0], spans[mask.bool()])
    assert "spans" not in packed.model_kwargs()


def test_inputs_are_not_modified() -> None:
    embeddings, mask, labels = padded_batch("right")
    before = [tensor.detach().clone() for tensor in (embeddings, mask, labels)]
    pack_rows(embeddings, mask, labels)
    assert all(torch.equal(old, new) for old, new in zip(before, (embeddings, mask, labels), strict=True))


def test_pads_may_hold_nan() -> None:
    embeddings, mask, _ = padded_batch("left")
    broken = embeddings.detach().masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    packed = pack_rows(broken, mask)
    restored = unpack_rows(packed.inputs_embeds, packed)
    restored.sum().backward()
    assert torch.isfinite(restored).all()
    assert torch.equal(broken.grad, mask[..., None].expand_as(embeddings).float())


def test_every_call_gives_new_boundary_tensors() -> None:
    packed = pack_rows(input_ids=torch.ones(2, 3, dtype=torch.long), lengths=[2, 3])
    assert packed.model_kwargs()["cu_seq_lens_q"] is not packed.model_kwargs()["cu_seq_lens_q"]


# ---- host lengths and copies


@pytest.mark.parametrize("lengths", [LENGTHS, list(LENGTHS), torch.tensor(LENGTHS)], ids=["tuple", "list", "tensor"])
def test_host_lengths_give_the_same_row_as_the_mask(lengths: Any) -> None:
    embeddings, mask, labels = padded_batch("left")
    by_mask = pack_rows(embeddings, mask, labels)
    both = pack_rows(embeddings, mask, labels, lengths=lengths)
    assert torch.equal(both.index, by_mask.index)
    assert both.boundaries == by_mask.boundaries
    right = pack_rows(embeddings, lengths=lengths)
    assert torch.equal(right.index, pack_rows(embeddings, padded_mask(LENGTHS, "right")).index)


def test_without_mask_and_lengths_every_token_is_real() -> None:
    packed = pack_rows(input_ids=torch.arange(6).reshape(2, 3))
    assert packed.boundaries.lengths == (3, 3)
    assert packed.input_ids.tolist() == [[0, 1, 2, 3, 4, 5]]


class _CopyCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts reads of a meta tensor, a device whose values nobody can read, by answering them from `values`."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values, self.num_copies = values, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads_out = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        if reads_out and args[0].device.type == "meta":
            self.num_copies += 1
            return self.values
        return func(*args, **kwargs)


@pytest.mark.parametrize(("host_lengths", "num_copies"), [(None, 1), (LENGTHS, 0)], ids=["mask", "lengths"])
def test_device_to_host_copies(host_lengths: tuple[int, ...] | None, num_copies: int) -> None:
    embeddings, mask, labels = (tensor.to("meta") for tensor in padded_batch("left"))
    with _CopyCounter(padded_mask(LENGTHS, "left")) as counter:
        packed = pack_rows(embeddings, mask, labels, lengths=host_lengths, extra={"weights": mask})
        unpack_rows(packed.inputs_embeds, packed)
        kwargs = packed.model_kwargs()
    assert counter.num_copies == num_copies
    assert packed.boundaries.lengths == (7, 3, 12, 1)
    assert {value.device.type for value in kwargs.values() if isinstance(value, torch.Tensor)} == {"meta"}


# ---- refusals


def _ids() -> torch.Tensor:
    return torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": _ids(), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "row 1 of `attention_mask`"),
        ({"input_ids": _ids(), "attention_mask": torch.tensor([[2, 1, 1], [1, 0, 0]])}, "zeros and ones"),
        ({"input_ids": _ids(), "attention_mask": torch.ones(2, 4).long()}, r"`attention_mask` needs rows and columns"),
        ({"input_ids": _ids(), "attention_mask": torch.zeros(2, 3).long()}, "All 2 rows of the batch are empty"),
        ({"input_ids": _ids(), "labels": torch.ones(3, 2).long()}, r"`labels` needs rows and columns"),
        ({"input_ids": _ids(), "extra": {"weight": torch.ones(6)}}, r"extra\['weight'\]"),
        ({"input_ids": _ids(), "lengths": [1]}, "`lengths` has 1 entries, but the batch has 2 rows"),
        ({"input_ids": _ids(), "lengths": [1, 4]}, r"`lengths\[1\]` is 4"),
        ({"input_ids": _ids(), "lengths": [0.5, 1.0]}, r"`lengths\[0\]` is 0.5"),
        ({"input_ids": _ids(), "lengths": [1, 3], "attention_mask": _ids()}, r"`lengths\[0\]` is 1, but row 0"),
        ({"input_ids": torch.ones(2, 3, 4)}, r"`input_ids` needs the shape `\[B, L\]`"),
        ({"inputs_embeds": _ids()}, r"`inputs_embeds` needs the shape `\[B, L, D\]`"),
        ({}, "only one of them"),
        ({"input_ids": _ids(), "inputs_embeds": torch.ones(2, 3, 4)}, "only one of them"),
    ],
    ids=[
        "hole", "values", "mask-shape", "all-empty", "labels-shape", "extra-shape", "lengths-count", "lengths-range",
        "relative-lengths", "disagree", "ids-dims", "embeds-dims", "nothing", "both",
    ],
)  # fmt: skip
def test_bad_batches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack_rows(**arguments)


@pytest.mark.parametrize("shape", [(1, 4), (2, 5), (5,)], ids=["cut", "rows", "flat"])
def test_unpack_refuses_what_is_not_the_packed_row(shape: tuple[int, ...]) -> None:
    packed = pack_rows(input_ids=_ids(), lengths=[2, 3])
    with pytest.raises(PackingError, match=r"`hidden` needs the shape `\[1, 5, ...\]`"):
        unpack_rows(torch.zeros(shape), packed)


# ---- models


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "bamba"])
def test_packed_decoder_equals_padded(model_type: str, side: str) -> None:
    lengths = (70, 0, 3, 12, 1)
    model = tiny_model(model_type)
    register_ops(model)
    mask = padded_mask(lengths, side)
    base = torch.randn(*mask.shape, 64)
    weight = torch.randn(*mask.shape, VOCAB_SIZE) * mask[..., None]

    padded_in = base.clone().requires_grad_()
    # An empty row has no softmax of its own, so the padded reference runs without it.
    full = [row for row, length in enumerate(lengths) if length]
    padded_out = model(inputs_embeds=padded_in[full], attention_mask=mask[full], use_cache=False).logits
    (padded_out * weight[full]).sum().backward()

    packed_in = base.clone().requires_grad_()
    packed = pack_rows(packed_in, mask)
    packed_out = unpack_rows(model(**packed.model_kwargs()).logits, packed)
    (packed_out * weight).sum().backward()

    real = mask.bool()
    torch.testing.assert_close(packed_out[full][real[full]], padded_out[real[full]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_in.grad[real], padded_in.grad[real], rtol=1e-4, atol=1e-4)
    assert not packed_in.grad[~real].any()
    assert not packed_out[~real].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_loss_is_the_padded_loss(side: str) -> None:
    model = tiny_model("llama")
    mask = padded_mask(LENGTHS, side)
    ids = torch.randint(1, 64, mask.shape)
    labels = ids.masked_fill(mask == 0, -100)
    # The first label of a left-padded row would be predicted by a pad.
    first = (mask.cumsum(1) == 1) & (mask == 1)
    padded = model(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(first, -100), use_cache=False).loss
    packed = pack_rows(input_ids=ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(model(**packed.model_kwargs()).loss, padded, rtol=1e-5, atol=1e-6)


def test_check_accepts_a_decoder_that_keeps_rows_apart() -> None:
    packed = pack_rows(input_ids=_ids(), lengths=[2, 3])
    assert packed.check(tiny_model("llama")).ok


def test_check_refuses_a_decoder_that_mixes_rows() -> None:
    packed = pack_rows(input_ids=_ids(), lengths=[2, 3])
    with pytest.raises(LeakError):
        packed.check(tiny_model("opt"))
