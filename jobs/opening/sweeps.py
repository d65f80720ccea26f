"""Checks a sweep, a job in which several adapters answer every row, and the column by which answers are scored."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

import pyarrow as pa
import pyarrow.types as t

from ...system.untrusted import shown_name
from ..errors import JobRequestError
from ..input.columns import EXPECTED_FIELD, EXPECTED_ROLE
from ..input.partitions import ADAPTER_ROLE, with_adapter_column
from ..options.problems import with_suggestion
from ..record import InputRecord
from ..spec import JobSpec

#: Value of `for_each_adapter` that stands for every adapter of the job.
ALL_ADAPTERS = "all"
_NAMES_SHOWN = 10


def swept_adapters(spec: JobSpec, names: Collection[str]) -> tuple[str | None, ...]:
    """Adapters that answer every row, the base model (None) first, then by name; empty for a job that is no sweep.
    `names`: those of all adapters of the job.

    Raises `JobRequestError` for a name or glob that fits no adapter.
    """
    known = tuple(sorted(names))
    problems, found = [], set()
    for pattern in spec.for_each_adapter:
        fitting = [name for name in known if pattern in (ALL_ADAPTERS, name) or fnmatchcase(name, pattern)]
        found.update(fitting)
        if not fitting:
            shown = ", ".join(known[:_NAMES_SHOWN]) + (", …" if len(known) > _NAMES_SHOWN else "")
            problem = with_suggestion(f"for_each_adapter={pattern!r}: no adapter has this name", pattern, known)
            problems.append(f"{problem.removesuffix('?')}{'?' * problem.endswith('?') or '.'} The job has {shown}.")
    if problems:
        raise JobRequestError(*problems)
    base = (None,) if spec.include_base and spec.for_each_adapter else ()
    return (*base, *sorted(found))


def swept_input(spec: JobSpec, given: InputRecord) -> InputRecord:
    """The input of a sweep with a column for the names of the adapters that answer.

    Raises `JobRequestError` for input whose own column names an adapter for each row.
    """
    column = given.roles.get(ADAPTER_ROLE)
    if column is not None:
        raise JobRequestError(
            f"for_each_adapter, column {column!r} (adapter): each says which adapters answer a row. Leave "
            "for_each_adapter out, or make the column data with --column adapter= and --output-prefix, or rename it."
        )
    return with_adapter_column(given, spec.output_prefix)


def right_role(spec: JobSpec, schema: pa.Schema) -> dict[str, str]:
    """The role of the column of right answers, if the input has it."""
    return {EXPECTED_ROLE: spec.expected} if spec.expected is not None and spec.expected in schema.names else {}


def right_problems(spec: JobSpec, schema: pa.Schema) -> list[str]:
    """Problems of the column of right answers, as sentences: it is not there, or its type is that of no answers."""
    name = spec.expected
    if name is None or (spec.split_answer and name not in schema.names and name.endswith(EXPECTED_FIELD.name)):
        return []
    if name not in schema.names:
        return [
            f"expected={name!r}: the input has no such column. Name one of {', '.join(map(shown_name, schema.names))}, "
            f"or {EXPECTED_FIELD.name} beside --split-answer."
        ]
    kind = _plain(schema.field(name).type)
    kind = _plain(kind.value_type) if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) else kind
    is_text = t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind) or t.is_null(kind)
    is_number = t.is_integer(kind) or (t.is_floating(kind) and spec.score_by in ("number", "json"))
    if is_text or is_number or spec.score_by == "json":
        return []
    return [
        f"expected={name!r}: the column has type {schema.field(name).type}, expected texts or numbers, or lists of "
        f"them (score_by={spec.score_by!r}). Write the column with that type."
    ]


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if t.is_dictionary(kind) else kind
