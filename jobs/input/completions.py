"""Joins the completions of one row into lists in one row of the output, and takes them apart again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

#: Columns with one value for a row, however many completions it has; every other column is a list of one item each.
OF_ROWS = ("prompt_tokens", "error", "adapter_sha256", "mode", "attempts")


def listed(field: pa.Field) -> pa.Field:
    """The output field of a job whose completions are lists. `field`: the field of one completion."""
    return field if field.name in OF_ROWS else pa.field(field.name, pa.list_(field.type))


def as_lists(columns: Mapping[str, pa.Array], first: NDArray[np.int64], num_completions: int) -> dict[str, pa.Array]:
    """Columns of completions as columns of rows. `first`: place of each row's first completion.

    A row's error is the first of its completions' errors, its mode is `mixture` when its completions' modes differ, and
    its attempts are the largest number of a completion.
    """
    places = np.append(first, num_completions)
    offsets, starts = pa.array(places, pa.int32()), pa.array(first)
    found = {}
    for name, column in columns.items():
        if name not in OF_ROWS:
            found[name] = pa.ListArray.from_arrays(offsets, column)
        elif name in ("error", "mode", "attempts"):
            values = column.to_pylist()
            of_rows = [_of_row(name, values[start:end]) for start, end in pairwise(places.tolist())]
            found[name] = pa.array(of_rows, column.type)
        else:
            found[name] = column.take(starts)
    return found


def _of_row(name: str, values: Sequence[Any]) -> Any:
    if name == "attempts":
        return max(values)
    known = [value for value in values if value is not None]
    if name == "mode" and len(set(known)) > 1:
        return "mixture"
    return known[0] if known else None


def completions(row: Mapping[str, Any], lists: Collection[str]) -> Iterator[dict[str, Any]]:
    """The completions of a row, each with the row's other values. `lists`: columns with an item for each completion.
    The row's error goes to the completions that ended in an error.
    """
    reasons = row["finish_reason"]
    for number, reason in enumerate(reasons):
        found = {name: value[number] if name in lists else value for name, value in row.items()}
        yield found | {"error": row["error"] if reason == "error" else None}
