"""Validators of the fields of `JobSpec`: each takes a value as users may write it, and returns that of the field.

The field validators of pydantic call them. They raise ValueError with the expectation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

from ...engine.request import SAMPLING_OPTIONS
from ...engine.text.chat.conversation import read_message_templates, read_tools, read_variables, written
from ..storage.redaction import redacted_url
from .problems import with_suggestion
from .stages import read_allowed, read_stages, read_until
from .values import (
    ALL_SETTINGS,
    COLUMN_ROLES,
    SETTING_ROLES,
    ErrorBudget,
    InputTable,
    pairs_of,
    parse_storage_options,
)

#: Options of JSON -> function that reads the value.
JSON_READERS: dict[str, Callable[[Any], Any]] = {
    "tools": read_tools,
    "chat_template_kwargs": read_variables,
    "messages_template": read_message_templates,
    "stages": read_stages,
    "until": read_until,
    "allowed_adapters": read_allowed,
}


def one_or_all(values: list[Any] | tuple[Any, ...]) -> Any:
    """The one value of a list of one; a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)


def read_place(value: Any) -> Any:
    """A number names no place, though it is taken for other texts."""
    if isinstance(value, int | float):
        raise ValueError("expected text")
    return value


def read_adapters(value: Any) -> Any:
    """A list of `NAME=URL` becomes a mapping; a list of one folder becomes that folder."""
    if not isinstance(value, list | tuple):
        return value
    unnamed = [str(item) for item in value if not _has_name(str(item))]
    if len(value) == 1 and unnamed:
        return unnamed[0]
    example = "pirate=s3://bucket/adapters/pirate"
    if unnamed:
        raise ValueError(f"{redacted_url(unnamed[0])!r}: expected NAME=URL, for example {example}")
    return pairs_of(value, "NAME=URL", example) or None


def _has_name(item: str) -> bool:
    """Whether an item is `NAME=URL`. Paths (`runs/lr=3/a`) and URLs (`https://host/a?key=…`) may have a "=", too."""
    name, equals, url = item.partition("=")
    return bool(equals) and "://" not in name and ("/" not in name or "://" in url)


def read_input(value: Any) -> Any:
    """A list of one input is that input. A list with a number is refused as a number is: it is no name of a file."""
    if not isinstance(value, list | tuple):
        return value
    wrong = [one for one in value if not isinstance(one, str | InputTable)]
    return wrong[0] if wrong else one_or_all(value)


def check_input(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """No input may be empty text."""
    if not all(value):
        raise ValueError("expected text that is not empty")
    return value


def keep_tables(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Tables stay the objects that they are: pydantic would make plain text of them."""
    found, given = check(value), value if isinstance(value, list | tuple) else [value]
    kept = [
        one if isinstance(one, InputTable) else text
        for one, text in zip(given, (found,) if isinstance(found, str) else found, strict=True)
    ]
    return one_or_all(kept)


def read_columns(value: Any) -> Any:
    """A list of `role=name` becomes a mapping. No name, or null, says that no column has the role."""
    if isinstance(value, list | tuple):
        return pairs_of(value, "role=name", "prompt=text", may_be_empty=True)
    if isinstance(value, dict):
        return {role: "" if name is None else name for role, name in value.items()}
    return {} if value is None else value


def check_roles(value: dict[str, str]) -> dict[str, str]:
    """Each key must be the role of a column."""
    unknown = [with_suggestion(f"{role!r} is not a role", role, COLUMN_ROLES) for role in value]
    wrong = [text for role, text in zip(value, unknown, strict=True) if role not in COLUMN_ROLES]
    if wrong:
        has_guess = all("did you mean" in text for text in wrong)
        raise ValueError("; ".join([*wrong, *([] if has_guess else [f"roles are {', '.join(COLUMN_ROLES)}"])]))
    return value


def read_names(value: Any, info: ValidationInfo) -> Any:
    """One name becomes a tuple of one. Names of settings may be given in one text, separated by commas."""
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if info.field_name != "row_settings" or not all(isinstance(name, str) for name in names):
        return names
    return tuple(part.strip() for name in names for part in name.split(",") if part.strip())


def check_settings(value: tuple[str, ...]) -> tuple[str, ...]:
    """Each name must be that of a setting, or `ALL_SETTINGS`; a name that is given twice is kept once."""
    choices = (ALL_SETTINGS, *SETTING_ROLES)
    wrong = [with_suggestion(f"{name!r} is not a setting", name, choices) for name in value if name not in choices]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}; expected {ALL_SETTINGS}, or some of {', '.join(SETTING_ROLES)}")
    return tuple(dict.fromkeys(value))


def read_json(value: Any, info: ValidationInfo) -> Any:
    """Lists and mappings become JSON; text stays as it is written."""
    return None if value is None else written(value, JSON_READERS[info.field_name or ""](value))


def read_sampling(value: Any, info: ValidationInfo) -> Any:
    """Converts a value as users give it to the type of its option of sampling."""
    return SAMPLING_OPTIONS[info.field_name or ""].read(value)


def read_error_budget(value: Any) -> Any:
    """A number becomes text, which must be an error budget."""
    text = str(value) if isinstance(value, int | float | str) else value
    if isinstance(text, str):
        ErrorBudget.parse(text)
    return text


def read_json_object(value: Any) -> Any:
    """Text becomes the mapping that it is as JSON; None an empty one."""
    return parse_storage_options(value) if value is None or isinstance(value, str) else value
