"""`PackedSFTConfig`: TRL's `SFTConfig` and the settings of packing."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from trl import SFTConfig

from .errors import PackingError

_OVERLONG = ("truncate", "split", "drop", "error")


@dataclass
class PackedSFTConfig(SFTConfig):
    """
    Settings of [`PackedSFTTrainer`]: every key of [`~trl.SFTConfig`] with its meaning, and the ones below.

    Args:
        token_budget (`int`, *optional*):
            Most tokens in a packed row, alignment included. The default is `max_length * per_device_train_batch_size`,
            which keeps the tokens per step of a TRL config and fills better than shorter rows.
        overlong (`str`, *optional*):
            What happens to a sample above `max_length`: `"truncate"` keeps `max_length` tokens (which end
            `truncation_mode` says), `"split"` keeps all tokens as several fragments, `"drop"` leaves the sample out,
            `"error"` stops. It holds for evaluation sets too, packed or padded. Every sample and token is counted and
            reported. The default is `"split"` if `packing_strategy="bfd_split"`, else `"truncate"`.
        row_shape (`str`, *optional*, defaults to `"exact"`):
            `"exact"` makes rows as long as their samples, `"fixed"` gives all rows one shape of `token_budget` tokens
            and `max_segments + 2` offsets, for `torch.compile`.
        max_segments (`int`, *optional*):
            Most segments in a row. Needed by `row_shape="fixed"`.
        packing_order (`str`, *optional*, defaults to `"shuffled"`):
            `"shuffled"` fills rows from a seeded shuffle, which keeps their composition random and regroups every
            epoch; `"best_fit"` fills them fullest but puts samples of like length together.
        balance (`str`, *optional*, defaults to `"cost"`):
            What ranks and micro-steps are made equal in: `"cost"` (attention included), `"tokens"` or `"none"`.
        isolation_check (`str`, *optional*, defaults to `"error"`):
            `"error"` proves before step 1, and before the first evaluation, that segments do not influence one
            another and stops otherwise; `"off"` skips the proof, which is printed and recorded.
        ops (`str`, *optional*, defaults to `"auto"`):
            Operations of recurrent layers and short convolutions: `"auto"` decides per call by device and by what is
            installed, `"kernels"` insists on the packages' kernels, `"torch"` on ours.
        packing_report (`str`, *optional*):
            Folder for the report of the plan and the run.
        eval_per_sample (`str`, *optional*):
            JSONL file that every evaluation writes with loss and token count of each sample, in data order. At most
            one worker then reads a stream.
    """

    token_budget: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens in a packed row, alignment included. Defaults to `max_length * "
            "per_device_train_batch_size`."
        },
    )
    overlong: str | None = field(
        default=None,
        metadata={
            "help": "What happens to a sample above `max_length`: `truncate` (as `truncation_mode` says), `split` "
            "into fragments, `drop`, or `error`. Always counted. Defaults to `truncate`, or `split` if "
            "`packing_strategy='bfd_split'`.",
            "choices": [None, *_OVERLONG],
        },
    )
    row_shape: str = field(
        default="exact",
        metadata={
            "help": "`exact` makes rows as long as their samples, `fixed` gives all rows one shape, for "
            "`torch.compile`.",
            "choices": ["exact", "fixed"],
        },
    )
    max_segments: int | None = field(
        default=None, metadata={"help": "Most segments in a row. Needed by `row_shape='fixed'`."}
    )
    packing_order: str = field(
        default="shuffled",
        metadata={
            "help": "`shuffled` fills rows from a seeded shuffle and regroups every epoch, `best_fit` fills them "
            "fullest but puts samples of like length together.",
            "choices": ["shuffled", "best_fit"],
        },
    )
    balance: str = field(
        default="cost",
        metadata={
            "help": "What ranks and micro-steps are made equal in: `cost`, `tokens` or `none`.",
            "choices": ["cost", "tokens", "none"],
        },
    )
    isolation_check: str = field(
        default="error",
        metadata={
            "help": "`error` proves before step 1 that segments do not influence one another and stops otherwise, "
            "`off` skips the proof, which is printed and recorded.",
            "choices": ["error", "off"],
        },
    )
    ops: str = field(
        default="auto",
        metadata={
            "help": "Operations of recurrent layers and short convolutions: `auto` decides per call, `kernels` "
            "insists on the packages' kernels, `torch` on ours.",
            "choices": ["auto", "kernels", "torch"],
        },
    )
    packing_report: str | None = field(
        default=None, metadata={"help": "Folder for the report of the plan and the run."}
    )
    eval_per_sample: str | None = field(
        default=None,
        metadata={"help": "JSONL file that every evaluation writes with loss and token count of each sample."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_packing()

    @classmethod
    def from_sft(cls, args: SFTConfig) -> PackedSFTConfig:
        """
        Give TRL's settings the defaults of packing.

        Args:
            args ([`~trl.SFTConfig`]):
                Settings, left as they are.

        Returns:
            [`PackedSFTConfig`]: A copy, or `args` itself if it has the settings of packing already.

        Raises:
            [`PackingError`]: If the settings contradict one another.
        """
        if isinstance(args, cls):
            return args
        # Running `__post_init__` again on values it has already resolved is not safe upstream, so the copy changes
        # class.
        packed = copy.copy(args)
        packed.__class__ = cls
        for name in cls.__annotations__:
            setattr(packed, name, cls.__dataclass_fields__[name].default)
        packed._check_packing()
        return packed

    def _check_packing(self) -> None:
        for name in PackedSFTConfig.__annotations__:
            choices = self.__dataclass_fields__[name].metadata.get("choices")
            if choices and getattr(self, name) not in choices:
                named = ", ".join(f"`{choice}`" for choice in choices if choice is not None)
                raise PackingError(f"`{name}` must be one of {named}, but it is {getattr(self, name)!r}.")
        strategies = ("bfd", "bfd_split", "wrapped")
        if self.packing_strategy not in strategies:
            raise PackingError(
                f"`packing_strategy` must be one of {', '.join(f'`{name}`' for name in strategies)}, but it is "
                f"{self.packing_strategy!r}."
            )
        counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        for name in ("token_budget", "max_segments", "max_length", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackingError(f"`{name}` must be at least 1, but it is {value}.")
        for name in ("learning_rate", "weight_decay", "dataloader_num_workers", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PackingError(f"`{name}` must be at least 0, but it is {value}.")
        if self.row_shape == "fixed" and self.max_segments is None:
            raise PackingError("`row_shape: fixed` needs the number of segments in a row. Set `max_segments`.")
        budget = self.resolved_token_budget
        if (self.packing or self.row_shape == "fixed") and budget is None:
            raise PackingError(
                "With `max_length: null` the token budget of a packed row cannot be derived. Set `token_budget`."
            )
        if self.packing and budget is not None and self.max_length is not None and budget < self.max_length:
            raise PackingError(
                f"A sample may have `max_length` = {self.max_length} tokens, but a row holds only `token_budget` = "
                f"{budget}. Raise `token_budget`, or lower `max_length`."
            )
        row, longest, multiple = self.row_budget, self.max_length or 1, self.pad_to_multiple_of or 1
        if self.packing and row is not None and row < longest:
            raise PackingError(
                f"A sample may have {longest} tokens, but of `token_budget` = {budget} a row of `row_shape: fixed` "
                f"has only {row}, a multiple of `pad_to_multiple_of` = {multiple}. Set `token_budget: "
                f"{-(-longest // multiple) * multiple}`, or lower `max_length`."
            )

    @property
    def resolved_token_budget(self) -> int | None:
        """Tokens per packed row: `token_budget`, or `max_length * per_device_train_batch_size`."""
        if self.token_budget is not None:
            return self.token_budget
        return None if self.max_length is None else self.max_length * self.per_device_train_batch_size

    @property
    def row_budget(self) -> int | None:
        """Tokens of samples that a packed row holds: the token budget, to which the alignment tail belongs."""
        budget, multiple = self.resolved_token_budget, self.pad_to_multiple_of
        if budget is None or multiple is None:
            return budget
        whole = budget // multiple * multiple
        # An exact row that holds the longest sample alone is rounded up.
        return whole if self.row_shape == "fixed" else max(whole, self.max_length or 1)

    @property
    def resolved_max_length(self) -> int | None:
        """Most tokens of a sample: `max_length`, or what a packed training row holds."""
        return self.row_budget if self.max_length is None and self.packing else self.max_length

    @property
    def resolved_overlong(self) -> str:
        """The policy for samples above `max_length`."""
        return self.overlong or ("split" if self.packing_strategy == "bfd_split" else "truncate")
