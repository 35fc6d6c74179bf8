"""
Packing for batches that are padded already: the decoder of an ASR or vision-language model, fed with embeddings.

Shapes: B batch rows, L padded length, T real tokens of all rows, N segments, D model width.

A left-padded batch of three rows, one of them empty, becomes one row with two segments and comes back as it was:

```text
inputs_embeds   .  .  a0 a1        a0 a1 | c0 c1 c2 c3       position_ids  0 1 | 0 1 2 3
                .  .  .  .    ->                             segment_rows    0 |       2
                c0 c1 c2 c3                                  labels     -100 . | -100 . . .
```

Row order is kept, an empty row has no segment, and a pad takes part in nothing: it gets no output and no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .boundaries import IGNORE_INDEX, Boundaries, lengths_from_attention_mask
from .errors import LeakError, PackingError
from .isolation import IsolationReport, check_isolation
from .isolation.reach import length_limits


@dataclass(frozen=True, eq=False)
class PackedRows:
    """
    A padded batch laid out as one packed row, and what it takes to undo that. Built by [`pack_rows`].

    Args:
        boundaries ([`Boundaries`]):
            One segment for each row that has a token, in row order.
        segment_rows (`tuple[int, ...]`):
            Batch row of each segment.
        row_lengths (`tuple[int, ...]`):
            Real tokens of each batch row, 0 for an empty one.
        padded_length (`int`):
            L, the columns of the padded batch.
        index (`torch.Tensor`):
            int64 of shape `[T]`: where each token stands in the batch flattened to `B * L`.
        inputs_embeds (`torch.Tensor`, *optional*):
            Shape `[1, T, D]`, on the gradient tape of the batch it was taken from.
        input_ids (`torch.Tensor`, *optional*):
            int64 of shape `[1, T]`. Exactly one of the two inputs is set.
        labels (`torch.Tensor`, *optional*):
            int64 of shape `[1, T]`; the first label of every segment is -100.
        extra (`dict[str, torch.Tensor]`):
            The extra tensors of [`pack_rows`], shape `[1, T, ...]`.
    """

    boundaries: Boundaries
    segment_rows: tuple[int, ...]
    row_lengths: tuple[int, ...]
    padded_length: int
    index: torch.Tensor
    inputs_embeds: torch.Tensor | None = None
    input_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def padding_share(self) -> float:
        """Share of the padded batch that was padding, in [0, 1): the decoder tokens that packing saves."""
        return 1 - self.boundaries.total_tokens / (len(self.row_lengths) * self.padded_length)

    def model_kwargs(self, *, host_offsets: bool = False) -> dict[str, Any]:
        """
        Give the keyword arguments of the model's forward.

        Args:
            host_offsets (`bool`, *optional*, defaults to `False`):
                Whether to add `cu_seqlens_cpu`, as [`Boundaries.to_model_kwargs`] does.

        Returns:
            `dict[str, Any]`: `inputs_embeds` or `input_ids`, `labels` where given, the boundaries as new tensors on
                the input's device, and `use_cache=False`, because a cache makes transformers ignore the boundaries.
                Extra tensors are left out: pass the ones that the model knows beside these.

        Example:

        ```python
        >>> import torch
        >>> from trl_packing import pack_rows
        >>> packed = pack_rows(input_ids=torch.tensor([[5, 6, 0], [7, 8, 9]]), lengths=[2, 3])
        >>> sorted(packed.model_kwargs())[:3]
        ['cu_seq_lens_k', 'cu_seq_lens_q', 'input_ids']

        ```
        """
        inputs = {"inputs_embeds": self.inputs_embeds, "input_ids": self.input_ids, "labels": self.labels}
        kwargs: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        kwargs.update(self.boundaries.to_model_kwargs(device=self.index.device, host_offsets=host_offsets))
        return {**kwargs, "use_cache": False}

    def check(self, model: torch.nn.Module) -> IsolationReport:
        """
        Refuse a model that would not keep the rows apart, by the trainer's own check. Once before training is enough,
        with the longest rows that there will be: some models keep apart only what is shorter than a limit.

        Args:
            model (`torch.nn.Module`):
                The decoder that is called with [`~PackedRows.model_kwargs`], as it is trained: adapters on, device and
                dtype set.

        Returns:
            [`IsolationReport`]: Of a model that keeps rows apart.

        Raises:
            [`LeakError`]: If a token of one row moves another row's outputs or gradients, or the check could not tell.
        """
        report = check_isolation(model)
        report.raise_if_leaking()
        for limit in length_limits(model) if self.boundaries.num_segments > 1 else ():
            longest = self.boundaries.total_tokens if limit.is_of_row else self.boundaries.max_seqlen
            if longest > limit.tokens:
                raise LeakError(
                    f"Rows are kept apart up to {limit.tokens} tokens, but this batch has {longest}: above, "
                    f"{limit.reason}. Cut them to {limit.tokens}, or run this batch padded."
                )
        return report


def pack_rows(
    inputs_embeds: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    lengths: Sequence[int] | torch.Tensor | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> PackedRows:
    """
    Lay the real tokens of a padded batch end to end in one row.

    Args:
        inputs_embeds (`torch.Tensor`, *optional*):
            Shape `[B, L, D]`. Gradients flow back into it; those of pads are zero.
        attention_mask (`torch.Tensor`, *optional*):
            Bool or integer zeros and ones, shape `[B, L]`, left- or right-padded. Without mask and `lengths` every
            token is real. On a GPU it is copied to the host once, unless `lengths` are passed.
        labels (`torch.Tensor`, *optional*):
            int64 of shape `[B, L]`, not shifted; -100 is ignored. The first label of every row becomes -100.
        input_ids (`torch.Tensor`, *optional*):
            int64 of shape `[B, L]`. Pass either this or `inputs_embeds`.
        lengths (`Sequence[int]` or `torch.Tensor`, *optional*):
            Real tokens of each row, zero allowed, on the host. Without `attention_mask` the batch is right-padded.
            With it the mask only tells where each row starts and nothing is copied from the device; on CUDA a mask of
            other lengths then fails as a device-side assertion.
        extra (`Mapping[str, torch.Tensor]`, *optional*):
            More tensors of shape `[B, L, ...]` to pack along, under names of your own.

    Returns:
        [`PackedRows`]: Nothing passed in is modified.

    Raises:
        [`PackingError`]: If both inputs or none are passed, a shape does not fit, a mask has holes, mask and lengths
            disagree, or no row has a token.

    Example:

    ```python
    >>> import torch
    >>> from trl_packing import pack_rows
    >>> embeddings = torch.randn(3, 4, 8)
    >>> attention_mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    >>> packed = pack_rows(embeddings, attention_mask)
    >>> packed.boundaries.lengths, packed.segment_rows
    ((2, 4), (0, 2))

    ```
    """
    if (inputs_embeds is None) == (input_ids is None):
        raise PackingError("Pass either `inputs_embeds` or `input_ids` to `pack_rows`, and only one of them.")
    name, inputs = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    assert inputs is not None
    num_dims = 2 if inputs_embeds is None else 3
    if inputs.ndim != num_dims:
        wanted = "[B, L, D]" if num_dims == 3 else "[B, L]"
        raise PackingError(f"`{name}` needs the shape `{wanted}`, but the shape is {list(inputs.shape)}.")
    per_token = {
        "attention_mask": attention_mask,
        "labels": labels,
        **{f"extra[{k!r}]": v for k, v in (extra or {}).items()},
    }
    for key, tensor in per_token.items():
        if tensor is not None and tensor.shape[:2] != inputs.shape[:2]:
            raise PackingError(
                f"`{key}` needs rows and columns like `{name}`, {list(inputs.shape[:2])}, but its shape is "
                f"{list(tensor.shape)}. Pass the padded tensors of one batch."
            )
    row_lengths, starts = _rows_of(inputs, attention_mask, lengths)
    segment_rows = tuple(row for row, length in enumerate(row_lengths) if length)
    if not segment_rows:
        raise PackingError(
            f"All {len(row_lengths)} rows of the batch are empty. Skip the batch, or drop empty samples."
        )
    boundaries = Boundaries.from_lengths(row_lengths[row] for row in segment_rows)
    index = _flat_index(boundaries, segment_rows, inputs, starts)
    if lengths is not None and attention_mask is not None and attention_mask.is_cuda:
        # The comparison stays on the device: reading it would be the copy that `lengths` are passed to avoid.
        mask = attention_mask.reshape(-1) != 0
        same = mask.index_select(0, index).all() & (mask.sum() == boundaries.total_tokens)
        torch._assert_async(same, "`lengths` and `attention_mask` of `pack_rows` disagree, or the mask has holes.")
    return PackedRows(
        boundaries=boundaries,
        segment_rows=segment_rows,
        row_lengths=tuple(row_lengths),
        padded_length=inputs.shape[1],
        index=index,
        inputs_embeds=None if inputs_embeds is None else _gather(inputs_embeds, index),
        input_ids=None if input_ids is None else _gather(input_ids, index),
        labels=None if labels is None else _pack_labels(labels, index, boundaries),
        extra={key: _gather(tensor, index) for key, tensor in (extra or {}).items()},
    )


def unpack_rows(hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    """
    Put a packed row back into the padded layout.

    Args:
        hidden (`torch.Tensor`):
            Shape `[1, T, ...]` of any dtype: hidden states, logits, per-token losses.
        packed ([`PackedRows`]):
            What [`pack_rows`] returned for the batch.

    Returns:
        `torch.Tensor`: Shape `[B, L, ...]`: every token where it stood in the batch, zeros at pads and in empty rows.
            Gradients flow back into `hidden`.

    Raises:
        [`PackingError`]: If `hidden` is not one row with the batch's real tokens.

    Example:

    ```python
    >>> import torch
    >>> from trl_packing import pack_rows, unpack_rows
    >>> packed = pack_rows(input_ids=torch.tensor([[5, 6, 0], [7, 8, 9]]), lengths=[2, 3])
    >>> unpack_rows(packed.input_ids, packed)
    tensor([[5, 6, 0],
            [7, 8, 9]])

    ```
    """
    num_tokens = packed.boundaries.total_tokens
    if hidden.ndim < 2 or hidden.shape[:2] != (1, num_tokens):
        raise PackingError(
            f"`hidden` needs the shape `[1, {num_tokens}, ...]` of the packed row, but the shape is "
            f"{list(hidden.shape)}. Pass a tensor with all tokens of the row, not one cut by `logits_to_keep`."
        )
    num_rows = len(packed.row_lengths)
    padded = hidden.new_zeros(num_rows * packed.padded_length, *hidden.shape[2:])
    padded = padded.index_copy(0, packed.index.to(hidden.device), hidden[0])
    return padded.reshape(num_rows, packed.padded_length, *hidden.shape[2:])


def _rows_of(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, lengths: Sequence[int] | torch.Tensor | None
) -> tuple[list[int], np.ndarray[Any, Any] | torch.Tensor]:
    """Real tokens of each row, and the column where each row starts: on the device only where the host can't know."""
    num_rows, padded_length = inputs.shape[:2]
    if lengths is None:
        if attention_mask is None:
            return [padded_length] * num_rows, np.zeros(num_rows, dtype=np.int64)
        host_mask = attention_mask.cpu()
        return lengths_from_attention_mask(host_mask), (host_mask.numpy() != 0).argmax(axis=1)
    row_lengths = _checked_lengths(lengths, num_rows, padded_length)
    if attention_mask is None:
        return row_lengths, np.zeros(num_rows, dtype=np.int64)
    if attention_mask.device.type != "cpu":
        return row_lengths, (attention_mask != 0).to(torch.int32).argmax(dim=1)
    mask_lengths = lengths_from_attention_mask(attention_mask)
    for row, (length, mask_length) in enumerate(zip(row_lengths, mask_lengths, strict=True)):
        if length != mask_length:
            raise PackingError(
                f"`lengths[{row}]` is {length}, but row {row} of `attention_mask` has {mask_length} real tokens. Pass "
                "the lengths of the padded batch itself, or the mask alone."
            )
    return row_lengths, (attention_mask.numpy() != 0).argmax(axis=1)


def _checked_lengths(lengths: Sequence[int] | torch.Tensor, num_rows: int, padded_length: int) -> list[int]:
    row_lengths = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    if len(row_lengths) != num_rows:
        raise PackingError(
            f"`lengths` has {len(row_lengths)} entries, but the batch has {num_rows} rows. Pass one per row."
        )
    for row, length in enumerate(row_lengths):
        if not isinstance(length, int | np.integer) or not 0 <= length <= padded_length:
            raise PackingError(
                f"`lengths` counts the tokens of each row, 0 to {padded_length} of them, but `lengths[{row}]` is "
                f"{length}."
            )
    return [int(length) for length in row_lengths]


def _flat_index(
    boundaries: Boundaries,
    segment_rows: tuple[int, ...],
    inputs: torch.Tensor,
    starts: np.ndarray[Any, Any] | torch.Tensor,
) -> torch.Tensor:
    """Where each packed token stands in the batch flattened to `B * L`: int64 `[T]` on the input's device."""
    token_rows = torch.from_numpy(np.repeat(np.asarray(segment_rows, dtype=np.int64), boundaries.lengths))
    index = token_rows * inputs.shape[1] + boundaries.position_ids()[0]
    if isinstance(starts, torch.Tensor):
        starts = starts.to(inputs.device)
        return index.to(inputs.device) + starts.index_select(0, token_rows.to(inputs.device))
    return (index + torch.from_numpy(starts).index_select(0, token_rows)).to(inputs.device)


def _gather(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[2:]).index_select(0, index.to(tensor.device))[None]


def _pack_labels(labels: torch.Tensor, index: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    firsts = torch.tensor(boundaries.offsets[:-1])
    packed = _gather(labels, index).to(index.device)
    return packed.index_fill(1, firsts.to(index.device), IGNORE_INDEX)
