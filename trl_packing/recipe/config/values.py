"""Does a value from a YAML fit the field it is for? Where TRL's parser takes anything, this says what is wrong."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...errors import PackingError

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class MisfitError(ValueError):
    """A value does not fit its field. The message is the end of a sentence: what the field takes."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Give the known name that begins with `name`, or else is most like it, or `None` where none is alike."""
    names = list(known)
    longer = [candidate for candidate in names if len(name) > 2 and candidate.startswith(name)]
    return next(iter(longer or get_close_matches(name, names, n=1)), None)


def fit_fields(cls: type, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """
    Check a mapping against the fields of a dataclass.

    Args:
        cls (`type`):
            The dataclass that will be built from the mapping.
        values (`Mapping[str, Any]`):
            Keys and values as YAML gives them.
        what (`str`):
            What the mapping is, for the message.

    Returns:
        `dict[str, Any]`: The arguments for `cls`. Mappings for fields that are dataclasses themselves are built.

    Raises:
        [`PackingError`]: If a key is unknown, with the nearest one, if a value does not fit, or if a field is missing.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            guess = nearest(str(key), fields)
            known = f"Did you mean `{guess}`?" if guess else f"Known keys: {', '.join(sorted(fields))}."
            raise PackingError(f"{what} has the unknown key `{key}`. {known}")
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise PackingError(f"{what} needs the key `{name}`, which is not there.")
    try:
        return {key: fit(value, hints[key]) for key, value in values.items() if (name := key)}
    except MisfitError as error:
        raise PackingError(f"{what}: `{name}` {error}.") from error


def fit(value: Any, hint: Any, *, text: str | None = None, choices: Iterable[Any] | None = None) -> Any:
    """
    Check one value against a type hint, and read numbers and words the way the field means them.

    Args:
        value (`Any`):
            The value as YAML gives it.
        hint (`Any`):
            The field's type.
        text (`str`, *optional*):
            The value as written. A text field gets this where YAML 1.1 sees a number, a date or a truth value.
        choices (`Iterable[Any]`, *optional*):
            The only values allowed, beside `None` where the type allows it.

    Returns:
        `Any`: The value for the field. What TRL's parser takes keeps its meaning.

    Raises:
        [`MisfitError`]: If it does not fit.
    """
    leaves = _leaves(hint)
    if value is None:
        # An empty value of a switch is off in TRL.
        if type(None) in leaves or bool in leaves or Any in leaves:
            return None
        raise _misfit(leaves, value)
    allowed = [*(choices or ()), *(choice for leaf in leaves for choice in _literals(leaf))]
    if allowed and not isinstance(value, (list, dict)):
        return _choose(value, text, allowed, leaves)
    if isinstance(value, bool):
        return _fit_bool(value, leaves)
    if isinstance(value, (int, float)):
        return _fit_number(value, leaves, text)
    if isinstance(value, str):
        return _fit_text(value, leaves)
    if isinstance(value, list):
        return _fit_list(value, leaves)
    if isinstance(value, Mapping):
        return _fit_mapping(value, leaves)
    if str in leaves and text is not None:
        return text
    raise _misfit(leaves, value)


def _choose(value: Any, text: str | None, allowed: list[Any], leaves: list[Any]) -> Any:
    for candidate in (value, text):
        # True equals 1, which no list of choices means.
        if any(
            _matches(candidate, choice) and isinstance(candidate, bool) == isinstance(choice, bool)
            for choice in allowed
        ):
            return candidate
    if isinstance(value, bool) and bool in leaves:
        return value
    guess = nearest(str(value), map(str, allowed))
    hint = f" (nearest: {guess})" if guess else ""
    raise MisfitError(f"must be one of {', '.join(map(str, allowed))}, but is {_shown(value, text)}{hint}")


def _matches(candidate: Any, choice: Any) -> bool:
    # PEFT writes a choice with a number in it as "pissa_niter_[number of iters]".
    if isinstance(candidate, str) and isinstance(choice, str) and "[" in choice:
        return candidate.startswith(choice.partition("[")[0])
    return bool(candidate == choice)


def _fit_bool(value: bool, leaves: list[Any]) -> bool:
    # `resume_from_checkpoint: true` is text by its type, and TRL hands the truth value on.
    if bool in leaves or _has_other(leaves) or (str in leaves and float not in leaves and int not in leaves):
        return value
    raise _misfit(leaves, value)


def _fit_number(value: float, leaves: list[Any], text: str | None) -> Any:
    if float in leaves or (int in leaves and isinstance(value, int)):
        return value
    if int in leaves and float(value).is_integer():
        return int(value)
    if str in leaves and int not in leaves:
        return str(value) if text is None else text
    if (bool in leaves and value in (0, 1)) or _has_other(leaves):
        return value
    raise _misfit(leaves, value)


def _fit_text(value: str, leaves: list[Any]) -> Any:
    if str in leaves or _has_other(leaves) or any(_item(leaf) is str for leaf in leaves):
        return value
    if type(None) in leaves and value.lower() in ("none", "null"):
        return None
    if bool in leaves and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    if int in leaves or float in leaves:
        try:
            number = float(value)
        except ValueError:
            raise _misfit(leaves, value) from None
        # int(value) keeps all digits of a large number.
        return int(value) if value.strip("+-").isdecimal() else _fit_number(number, leaves, None)
    raise _misfit(leaves, value)


def _fit_list(value: list[Any], leaves: list[Any]) -> list[Any]:
    for leaf in leaves:
        if (get_origin(leaf) or leaf) is not list:
            continue
        item = _item(leaf)
        if item is str:
            for entry in value:
                if not isinstance(entry, str):
                    raise MisfitError(f"takes a list of text, but it holds {_shown(entry)}")
        elif dataclasses.is_dataclass(item):
            return [_fit_entry(entry, item, index) for index, entry in enumerate(value)]
        return value
    if _has_other(leaves):
        return value
    raise _misfit(leaves, value)


def _fit_entry(entry: Any, cls: Any, index: int) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise MisfitError(f"takes a list of mappings, but entry {index} is {_shown(entry)}")
    return fit_fields(cls, entry, f"Entry {index} of the list")


def _fit_mapping(value: Mapping[Any, Any], leaves: list[Any]) -> Any:
    for leaf in leaves:
        if (get_origin(leaf) or leaf) is dict:
            return value
    for leaf in leaves:
        if isinstance(leaf, type) and dataclasses.is_dataclass(leaf):
            return leaf(**fit_fields(leaf, value, f"The mapping for {leaf.__name__}"))
    if _has_other(leaves):
        return value
    raise _misfit(leaves, value)


def _leaves(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [leaf for part in get_args(hint) for leaf in _leaves(part)]
    # An enumeration whose field has no choices takes its values as text.
    return [str] if isinstance(hint, type) and issubclass(hint, Enum) else [hint]


def _literals(leaf: Any) -> tuple[Any, ...]:
    return get_args(leaf) if get_origin(leaf) is Literal else ()


def _item(leaf: Any) -> Any:
    """The type of a list's items, or `None`."""
    if get_origin(leaf) is not list:
        return None
    item = get_args(leaf)[0]
    return str if str in _leaves(item) else item


def _has_other(leaves: list[Any]) -> bool:
    """Whether a type is among them that this module knows nothing about, so that its owner has to check."""
    known = (bool, int, float, str, list, dict, type(None))
    return any(
        (get_origin(leaf) or leaf) not in known and not _literals(leaf) and not dataclasses.is_dataclass(leaf)
        for leaf in leaves
    )


def _misfit(leaves: list[Any], value: Any) -> MisfitError:
    names = dict.fromkeys(_NAMES.get(get_origin(leaf) or leaf, "") for leaf in leaves)
    return MisfitError(f"takes {' or '.join(filter(None, names)) or 'another type'}, but is {_shown(value)}")


def _shown(value: Any, text: str | None = None) -> str:
    kind = {type(None): "empty", list: "a list", dict: "a mapping"}.get(type(value))
    return kind or (repr(value) if text is None or isinstance(value, str) else repr(text))
