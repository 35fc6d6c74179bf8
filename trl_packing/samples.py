"""Are the samples what TRL's preparation expects? Asked before a model is loaded; the answer names the sample."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from .errors import PackingError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import SFTConfig

logger = logging.getLogger(__name__)

# TRL's four, and the further ones that chat templates of published models read.
KNOWN_ROLES = (
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "function",
    "ipython",
    "observation",
    "document",
    "context",
)
# What other tools write for the same roles.
_ROLE_ALIASES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_TOKEN_COLUMNS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
# Parts of a turn's content that only a processor reads.
_MEDIA = ("image", "image_url", "video", "audio", "input_audio")
_NUM_PEEKED = 100
_BATCH = 1_000


@dataclass(frozen=True)
class _Rules:
    """What a sample must look like: the columns that are read, and how turns are spelled."""

    columns: tuple[str, ...]
    role: str = "role"
    content: str = "content"
    needs_assistant: str | None = None
    others: tuple[str, ...] = ()

    @property
    def tokenized(self) -> bool:
        return self.columns[0] == "input_ids"


# What was found right, by which rules: a recipe asks while it reads its files, and the trainer asks for everyone.
_right: weakref.WeakKeyDictionary[Any, _Rules] = weakref.WeakKeyDictionary()


def validate_samples(
    dataset: Dataset | IterableDataset, training_args: SFTConfig, *, name: str = "training"
) -> Dataset | IterableDataset:
    """
    Check every sample of a data set, or the first 100 of a stream.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Samples with `messages`, `conversations` (turns of `from` and `value`), `prompt` and `completion`, a text
            column, or token ids, as TRL reads them.
        training_args (`trl.SFTConfig`):
            Says which column holds text, and whether only assistant turns or completions are trained on.
        name (`str`, *optional*, defaults to `"training"`):
            What the set is, for messages.

    Returns:
        `datasets.Dataset` or `datasets.IterableDataset`: All the samples. A `prompt` column that belongs to no
            completion is left out, because TRL would look for the completion; `conversations` become `messages` where
            only assistant turns are trained on, which TRL checks before it converts them.

    Raises:
        [`PackingError`]: If there is no sample, if the columns are not TRL's, or if a sample is malformed. The message
            has the sample's number, counted from 0.
    """
    from datasets import Dataset

    mapped = isinstance(dataset, Dataset)
    columns = _column_names(dataset)
    if not columns or (mapped and len(dataset) == 0):
        raise PackingError(f"The {name} set holds no samples.")
    if "prompt" in columns and "completion" not in columns and {"messages", "conversations"} & set(columns):
        logger.warning(f"The column `prompt` of the {name} set has no `completion` beside it and is not read.")
        dataset = dataset.remove_columns("prompt")
        columns = [column for column in columns if column != "prompt"]
    rules = _rules_for(columns, training_args, name)
    if _right.get(dataset) == rules:
        return dataset
    if mapped and dataset.format["type"] != "custom":
        _check_all(dataset, rules, name)
    else:
        for index, sample in enumerate(dataset.take(_NUM_PEEKED)):
            _refuse(_complaint(sample, rules), index, name)
    if rules.role == "from" and training_args.assistant_only_loss:
        from trl import maybe_convert_to_chatml

        dataset = dataset.map(maybe_convert_to_chatml, remove_columns="conversations")
        rules = _rules_for(_column_names(dataset), training_args, name)
    _right[dataset] = rules
    return dataset


def check_content_parts(dataset: Dataset | IterableDataset, tokenizer: Any, chat_template: str | None = None) -> None:
    """
    Check that a chat template renders turns whose content is a list of parts as it renders their text.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Samples for a tokenizer; a processor takes parts. The first 100 are looked at, of a stream the first.
        tokenizer (`PreTrainedTokenizerBase`):
            With the chat template.
        chat_template (`str`, *optional*):
            Instead of the tokenizer's own.

    Raises:
        [`PackingError`]: If a part is an image, a video or sound, or if the template fails on parts, leaves them out
            or prints them as Python writes them.
    """
    from datasets import Dataset

    for sample in dataset.take(_NUM_PEEKED if isinstance(dataset, Dataset) else 1):
        # A template may not render a completion alone.
        for columns in (("messages",), ("conversations",), ("prompt", "completion")):
            values = [sample.get(column) for column in columns]
            turns = [turn for value in values if isinstance(value, list) for turn in value]
            if any(_has_parts(turn) for turn in turns):
                _check_parts(turns, tokenizer, chat_template)
                return


def _content(turn: Mapping[str, Any]) -> Any:
    return turn.get("content", turn.get("value"))


def _has_parts(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(_content(turn), list)


def _check_parts(turns: list[Any], tokenizer: Any, chat_template: str | None) -> None:
    in_parts, in_text = [], []
    for turn in turns:
        turn = {**turn, "role": turn.get("role", turn.get("from")), "content": _content(turn)}
        parts = [part for part in turn["content"] if isinstance(part, Mapping)] if _has_parts(turn) else []
        if media := [part["type"] for part in parts if part.get("type") in _MEDIA]:
            raise PackingError(
                f"A text model reads text, but a turn's content has a part of type {media[0]!r}. Remove such parts, "
                "or train a model that takes them, with its processor."
            )
        # One part: how a template joins several is its own affair.
        text = [part for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str)][:1]
        in_parts.append({**turn, "content": text} if text else turn)
        in_text.append({**turn, "content": text[0]["text"]} if text else turn)
    expected = tokenizer.apply_chat_template(in_text, tokenize=False, chat_template=chat_template)
    try:
        rendered = tokenizer.apply_chat_template(in_parts, tokenize=False, chat_template=chat_template)
    # A template may raise anything.
    except Exception as error:
        rendered = f"{type(error).__name__}: {error}"
    if rendered != expected:
        raise PackingError(
            "The chat template must render a turn in parts (`[{'type': 'text', ...}]`) as the text of the parts, but "
            f"it makes {rendered[:120]!r} of the first such sample. Join its parts into one string, or set "
            "`chat_template_path` to a template that reads parts."
        )


def _column_names(dataset: Any) -> list[str]:
    if dataset.column_names is not None:
        return list(dataset.column_names)
    # A stream may tell its columns only by its samples.
    return list(next(iter(dataset), {}))


def _rules_for(columns: Sequence[str], training_args: SFTConfig, name: str) -> _Rules:
    text = training_args.dataset_text_field
    others = tuple(
        column for column in ("messages", "conversations", "prompt", "completion", text) if column in columns
    )
    if "input_ids" in columns:
        rules = _Rules(("input_ids", *(column for column in _TOKEN_COLUMNS if column in columns)))
    elif "prompt" in columns and "completion" in columns:
        only_completion = training_args.completion_only_loss is not False
        rules = _Rules(
            ("prompt", "completion"), needs_assistant="completion" if only_completion else "any", others=others
        )
    elif "messages" in columns:
        rules = _Rules(("messages",), needs_assistant="any", others=others)
    elif "conversations" in columns:
        rules = _Rules(("conversations",), "from", "value", needs_assistant="any", others=others)
    elif text in columns and "prompt" not in columns:
        rules = _Rules((text,), others=others)
    else:
        raise PackingError(
            f"The {name} set has the columns {', '.join(columns)}, but training reads `messages`, or `conversations`, "
            f"or `prompt` and `completion`, or `{text}` (`dataset_text_field`). Rename a column or set that key."
        )
    if training_args.completion_only_loss and rules.columns[0] not in ("prompt", "input_ids"):
        raise PackingError(
            f"`completion_only_loss` needs the columns `prompt` and `completion`, but the {name} set has "
            f"{', '.join(columns)}. For conversations, `assistant_only_loss: true` trains on assistant turns only."
        )
    if not training_args.assistant_only_loss:
        return _Rules(rules.columns, rules.role, rules.content, None, rules.others)
    if rules.needs_assistant is None:
        raise PackingError(
            f"`assistant_only_loss` needs conversations, but the {name} set is read from `{rules.columns[0]}`. Remove "
            "the setting or give `messages`."
        )
    return rules


def _check_all(dataset: Dataset, rules: _Rules, name: str) -> None:
    """Look at whole Arrow columns, and at single samples only where a batch is not plainly right."""
    from tqdm.auto import tqdm

    others = [column for column in rules.others if column not in rules.columns]
    tables = dataset.with_format("arrow").select_columns(list(rules.columns))
    plain = dataset.with_format(None).select_columns([*rules.columns, *others])
    quiet = os.environ.get("RANK", "0") != "0"
    start = 0
    with tqdm(total=len(dataset), desc=f"Checking the {name} set", delay=1, disable=quiet, leave=False) as bar:
        for table in tables.iter(_BATCH):
            # A shuffled set gives one chunk per sample.
            for batch in table.combine_chunks().to_batches():
                stop = start + batch.num_rows
                if not _surely_right(batch, rules):
                    for index, sample in enumerate(plain.select(range(start, stop)), start):
                        _refuse(_complaint(sample, rules), index, name)
                bar.update(batch.num_rows)
                start = stop


def _refuse(complaint: str | None, index: int, name: str) -> None:
    if complaint is not None:
        raise PackingError(f"Sample {index} of the {name} set (counted from 0) {complaint}")


# ---- the plain definition, one sample at a time


def _complaint(sample: Mapping[str, Any], rules: _Rules) -> str | None:
    """What is wrong with a sample, as the end of a sentence, or `None`."""
    values = {column: sample.get(column) for column in rules.columns}
    if rules.tokenized:
        return _complaint_about_tokens(values)
    for column, value in values.items():
        if value is None:
            filled = [other for other in rules.others if other not in values and sample.get(other) is not None]
            if filled:
                return f"has no `{column}` but has `{filled[0]}`. All samples of a set need the same columns."
            return f"has no `{column}`. Remove it or fill it in; a CSV file reads `NA` and `null` as missing."
        if not isinstance(value, str) and column not in ("messages", "conversations", "prompt", "completion"):
            return f"must have text in `{column}`, but has {_shown(value)}."
        turns_only = column in ("messages", "conversations")
        if (turns_only or not isinstance(value, str)) and (wrong := _complaint_about_turns(value, column, rules)):
            return wrong
    if len({isinstance(value, str) for value in values.values()}) > 1:
        return "has text in one of `prompt` and `completion` and turns in the other. Use the same form for both."
    return _complaint_about_assistant(values, rules)


def _complaint_about_turns(turns: Any, column: str, rules: _Rules) -> str | None:
    if not isinstance(turns, list):
        return f"must have a list of turns in `{column}`, but has {_shown(turns)}."
    if not turns:
        return f"has an empty list in `{column}`. Remove it."
    for number, turn in enumerate(turns):
        at = f"turn {number} of `{column}`"
        if not isinstance(turn, Mapping):
            return f"must have turns with `{rules.role}` and `{rules.content}`, but {at} is {_shown(turn)}."
        role = turn.get(rules.role)
        if role is None:
            return f"has no `{rules.role}` in {at}; its keys are {', '.join(map(str, turn)) or 'none'}."
        if role not in KNOWN_ROLES:
            advice = f"Rename it to {_ROLE_ALIASES[role]!r}." if role in _ROLE_ALIASES else "Rename it."
            return f"has the unknown role {role!r} in {at}. Known roles: {', '.join(KNOWN_ROLES)}. {advice}"
        content = turn.get(rules.content)
        if content is None:
            # Tool calls and thinking turns stand without content.
            if not any(value for key, value in turn.items() if key not in (rules.role, rules.content)):
                return f"has no `{rules.content}` in {at}."
        elif not isinstance(content, (str, list)):
            return f"must have text in `{rules.content}` of {at}, but has {_shown(content)}."
    return None


def _complaint_about_assistant(values: Mapping[str, Any], rules: _Rules) -> str | None:
    if rules.needs_assistant is None:
        return None
    if any(isinstance(value, str) for value in values.values()):
        return "is not a conversation, which `assistant_only_loss` needs."
    columns = rules.columns if rules.needs_assistant == "any" else (rules.needs_assistant,)
    if any(turn[rules.role] == "assistant" for column in columns for turn in values[column]):
        return None
    where = " and ".join(f"`{column}`" for column in columns)
    return f"has no assistant turn in {where}, so `assistant_only_loss` leaves nothing to train on. Remove it."


def _complaint_about_tokens(values: Mapping[str, Any]) -> str | None:
    length = len(values["input_ids"] or ())
    for column, value in values.items():
        # Masks may hold truth values.
        kinds = (int,) if column in ("input_ids", "labels") else (int, bool)
        if not isinstance(value, list) or not all(type(token) in kinds for token in value):
            return f"must have a list of integers in `{column}`, but has {_shown(value)}."
        if not value:
            return f"has no token in `{column}`. Remove it."
        if len(value) != length:
            return f"has {length} entries in `input_ids` but {len(value)} in `{column}`."
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"the {type(value).__name__} {str(value)[:40]!r}"


# ---- the fast form: whole columns at once


def _surely_right(batch: pa.RecordBatch, rules: _Rules) -> bool:
    """Whether the plain definition accepts every sample of a batch. `False` only means that it has to be asked."""
    columns = [batch.column(column) for column in rules.columns]
    if any(column.null_count for column in columns) or not all(_is_valid(column) for column in columns):
        return False
    if rules.tokenized:
        return _tokens_right(columns)
    conversational = rules.columns[0] in ("messages", "conversations")
    if all(_is_text(column.type) for column in columns):
        return rules.needs_assistant is None and not conversational
    if not conversational and rules.columns[0] != "prompt":
        return False
    if not all(_turns_right(column, rules) for column in columns):
        return False
    if rules.needs_assistant is None:
        return True
    read = columns if rules.needs_assistant == "any" else [batch.column(rules.needs_assistant)]
    found = [_rows_with_assistant(column, rules) for column in read]
    return bool(pc.count_distinct(pa.concat_arrays(found)).as_py() == batch.num_rows)


def _turns_right(column: pa.Array, rules: _Rules) -> bool:
    if not _is_list(column.type) or not pa.types.is_struct(column.type.value_type):
        return False
    kind, turns = column.type.value_type, pc.list_flatten(column)
    if not {rules.role, rules.content} <= {kind.field(number).name for number in range(kind.num_fields)}:
        return False
    if turns.null_count or not pc.all(pc.greater(pc.list_value_length(column), 0)).as_py():
        return False
    roles, contents = pc.struct_field(turns, rules.role), pc.struct_field(turns, rules.content)
    if not _is_text(roles.type) or not _is_text(contents.type) or roles.null_count or contents.null_count:
        return False
    return set(pc.unique(roles).to_pylist()) <= set(KNOWN_ROLES)


def _rows_with_assistant(column: pa.Array, rules: _Rules) -> pa.Array:
    """Numbers of the rows that hold an assistant turn, one entry per turn."""
    roles = pc.struct_field(pc.list_flatten(column), rules.role)
    return pc.list_parent_indices(column).filter(pc.equal(roles, "assistant"))


def _tokens_right(columns: list[pa.Array]) -> bool:
    if not all(_is_list(column.type) and pa.types.is_integer(column.type.value_type) for column in columns):
        return False
    if any(pc.list_flatten(column).null_count for column in columns):
        return False
    first, *others = (pc.list_value_length(column) for column in columns)
    return bool(
        pc.all(pc.greater(first, 0)).as_py() and all(pc.all(pc.equal(other, first)).as_py() for other in others)
    )


def _is_valid(column: pa.Array) -> bool:
    """Whether all text is UTF-8, which Arrow's readers do not ask and the first reader of a sample does."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
