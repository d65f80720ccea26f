"""Reads values of a job's options that are more than text or a number: pairs, names of columns, storage options,
workers' speeds, the error budget, TLS files, tables of a Python program. Touches no storage but to see whether a file
is there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unicodedata import category

from ...engine.request import SAMPLING_OPTIONS
from ...engine.structured_output import CONSTRAINTS, FORMS, constraint_of
from ...engine.text.chat.conversation import RENDERING_OPTIONS
from ...system.untrusted import shortened
from ..errors import JobRequestError

#: Prefix of the names of lorabatch's internal columns.
OUR_PREFIX = "__lb_"
_MOST_PREFIX_CHARACTERS = 64
_MOST_CURRENCY_CHARACTERS = 8
#: Roles of columns that hold prompts.
PROMPT_ROLES = ("prompt", "messages", "prompt_token_ids")
# Columns of a job have one type for all rows, and so `teacher_top_k` is no setting of a row.
SAMPLING_COLUMNS = (*(name for name in SAMPLING_OPTIONS if name != "teacher_top_k"), *FORMS)
#: Settings that a column may give for its row, only when the job asks for it; `tools` beside `messages` always may.
SETTING_ROLES = (*RENDERING_OPTIONS, *SAMPLING_COLUMNS, "continuation")
COLUMN_ROLES = ("id", "adapter", *PROMPT_ROLES, *SETTING_ROLES)
#: Value of `row_settings` that stands for every column with a setting's name.
ALL_SETTINGS = "all"
#: Options that make prompts of columns.
TEMPLATE_OPTIONS = ("prompt_template", "messages_template")
TLS_FIELDS = ("tls_ca", "tls_cert", "tls_key")
#: Begin of the URL of a table that a program gave as input. A hash of the table's content follows once it is known.
TABLE_SCHEME = "table://"
_TABLE_ATTRIBUTES = ("__arrow_c_stream__", "__arrow_c_array__", "npartitions", "with_format")


class InputTable(str):
    """A table of this program in the place of an input's URL: the text names its type for messages."""

    #: The table.
    data: Any

    def __new__(cls, data: Any) -> Self:
        """Makes the text from the table's type, such as `table://pandas.DataFrame`."""
        kind = type(data)
        name = (
            kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        )
        table = super().__new__(cls, TABLE_SCHEME + name)
        table.data = data
        return table

    def __getnewargs__(self) -> tuple[Any]:
        """The argument for copies of the object."""
        return (self.data,)

    @property
    def kind(self) -> str:
        """The table's type: its package and its class."""
        return self.removeprefix(TABLE_SCHEME)


def plain_value(value: Any) -> Any:
    """A value of an option with text in place of `os.PathLike` objects, and Python's own numbers and lists in place of
    those of numpy, pandas, Polars and Arrow, also inside lists and mappings.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    to_list = getattr(value, "tolist", None) or getattr(value, "to_list", None)
    return to_list() if callable(to_list) and not isinstance(value, type) else value


def with_tables(value: Any) -> Any:
    """A value of the option `input` with an `InputTable` in place of each table; a list of dictionaries is a table."""
    if _is_table(value):
        return InputTable(value)
    if isinstance(value, list | tuple):
        is_rows = bool(value) and all(isinstance(row, Mapping) and not _is_table(row) for row in value)
        return InputTable(value) if is_rows else [with_tables(item) for item in value]
    return value


def _is_table(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(column, list) or _is_table(column) for column in value.values())
    is_pandas = type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns")
    return is_pandas or any(hasattr(value, name) for name in _TABLE_ATTRIBUTES)


def pairs_of(
    value: list[Any] | tuple[Any, ...], shape: str, example: str, *, may_be_empty: bool = False
) -> dict[str, str]:
    """The mapping behind items such as `NAME=URL`. Raises ValueError, with the `shape` that was expected and an
    `example`, for others and for names that are given twice. `may_be_empty`: whether `NAME=` is right.
    """
    pairs: dict[str, str] = {}
    for item in value:
        name, equals, target = str(item).partition("=")
        if not (name and equals and (target or may_be_empty)):
            raise ValueError(f"{item!r}: expected {shape}, for example {example}")
        if name in pairs:
            raise ValueError(f"{name!r} is given twice: {pairs[name]!r} and {target!r}; keep one")
        pairs[name] = target
    return pairs


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """Keyword arguments for fsspec from a JSON object; none from None. Raises ValueError without showing the text."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        # the text may hold keys
        raise ValueError(f"expected a JSON object; not JSON at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def replace_forms(values: dict[str, Any]) -> list[str]:
    """Replaces each form of structured output in `values` by its sampling option. Returns problems, as sentences."""
    problems = []
    for form in FORMS:
        value = values.pop(form, None)
        if value is None:
            continue
        try:
            options = constraint_of(form, value)
        except ValueError as error:
            problems.append(str(error))
            continue
        given = [name for name in CONSTRAINTS if values.get(name)]
        if given:
            problems.append(f"{form}, {given[0]}: expected at most one of them")
        values.update(options)
    return problems


def markers_of(value: Any) -> Any:
    """`START,END` from a mapping of start and end, or from a list of the two; other values as they are. Raises
    ValueError for a start marker with a comma.
    """
    if isinstance(value, dict) and value.keys() <= {"start", "end"}:
        value = [value.get("start", ""), value.get("end")]
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value):
        if "," in value[0]:
            raise ValueError("expected a start marker without a comma")
        return ",".join(value)
    return value


def check_prefix(text: str) -> str:
    """The text. Raises ValueError for one that cannot begin the names of output columns."""
    if text.startswith(OUR_PREFIX) or not text.isprintable() or len(text) > _MOST_PREFIX_CHARACTERS:
        raise ValueError(
            f"expected at most {_MOST_PREFIX_CHARACTERS} printable characters that do not begin with {OUR_PREFIX}"
        )
    return text


#: Expectation of an amount of money, for messages.
MONEY = "a number, 0 or more, and its currency if you like, such as 2.5 or '2.5 EUR'"


def parse_price(value: str | float | None, name: str = "gpu_hour_price") -> tuple[float, str] | None:
    """An amount of money and its currency, "" for one that is not named: "2.5 EUR", "2.5" or 2.5; None for no amount.
    `name`: the option that has it.

    Raises `JobRequestError`.
    """
    if value is None:
        return None
    number, _, currency = str(value).strip().partition(" ")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    currency = currency.strip()
    is_currency = len(currency) <= _MOST_CURRENCY_CHARACTERS and all(
        c.isalpha() or category(c) == "Sc" for c in currency
    )
    if not (0 <= price < math.inf and is_currency):
        raise JobRequestError(f"{name}={shortened(repr(value), 60)}: expected {MONEY}.")
    return price, currency


def parse_speeds(text: str) -> tuple[float, ...]:
    """Slowness of each worker from its speed, as in `1,0.5`. Raises `JobRequestError`."""
    expected = "expected a number above 0 for each worker, 1 for one as fast as the cost model says. Write for example"
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise JobRequestError(f"speeds={text!r}: {expected} --speeds 1,0.5.") from None
    if not all(0 < speed < math.inf for speed in speeds):
        raise JobRequestError(f"speeds={text!r}: {expected} --speeds 1,0.5.")
    return tuple(1.0 / speed for speed in speeds)


def check_speeds(slowness: Sequence[float] | None, num_workers: int) -> None:
    """Raise `JobRequestError` unless every worker has a speed, or none."""
    if slowness is not None and len(slowness) != num_workers:
        raise JobRequestError(
            f"speeds: {len(slowness)} given for {num_workers} workers, expected one for each. Give {num_workers} of "
            f"them, or --workers {len(slowness)}."
        )


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """The error rows that a job allows. Exactly one of `count` and `percent` is set."""

    #: Rows.
    count: int | None = None
    #: Share of the job's rows, 0 to 100.
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """Parses a budget such as `"25"` (rows) or `"10%"`. Raises ValueError with the expectation."""
        text = text.strip()
        expected = f"{text!r}: expected a count of rows such as 25, or a share of them such as 10%"
        try:
            budget = cls(percent=float(text[:-1])) if text.endswith("%") else cls(count=int(text))
        except ValueError:
            raise ValueError(expected) from None
        if budget.percent is not None and not 0.0 <= budget.percent <= 100.0:
            raise ValueError(expected)
        if budget.count is not None and budget.count < 0:
            raise ValueError(expected)
        return budget

    def limit(self, num_rows: int) -> int:
        """The most error rows allowed among `num_rows`."""
        if self.count is not None:
            return self.count
        assert self.percent is not None, f"{self} has neither count nor percentage"
        return int(num_rows * self.percent / 100.0)

    def allows(self, num_errors: int, num_rows: int) -> bool:
        """Whether a job of `num_rows` may go on with `num_errors` of them wrong."""
        return num_errors <= self.limit(num_rows)

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent is not None else f"{self.count} rows"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files that open a `tls://` cluster, as paths on this machine; all three or none."""

    #: Certificate of the authority that signed the cluster's certificates.
    tls_ca: str | None = None
    #: The client's certificate.
    tls_cert: str | None = None
    #: The client's private key.
    tls_key: str | None = None

    def problems(self, cluster: str) -> list[str]:
        """Problems with the files for this cluster's address, as plain sentences."""
        given = {name: value for name in TLS_FIELDS if (value := getattr(self, name)) is not None}
        problems = [
            f"{name}={path!r}: no such file. Name a PEM file on this machine with --{name.replace('_', '-')}."
            for name, path in given.items()
            if not Path(path).is_file()
        ]
        missing = [name for name in TLS_FIELDS if given and name not in given]
        if missing:
            problems.append(f"{', '.join(missing)}: required beside {', '.join(given)}. Give all three PEM files.")
        if given and not cluster.startswith("tls://"):
            problems.append(f"cluster={cluster!r}: TLS files are for an address such as tls://10.0.0.5:8786.")
        return problems
