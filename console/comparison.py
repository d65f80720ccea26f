"""`compare` of two jobs or two adapters: checks what is given, and prints how their answers differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from ..jobs.comparison import Comparison, compare_answers
from ..jobs.errors import JobRequestError
from ..jobs.store import JobStore
from ..system.untrusted import printable, shortened
from .terminal import plain_console

# Characters of an answer in a cell of a comparison.
_CELL_CHARACTERS = 160
_COUNTED = ("equal", "different", "only first", "only second", "mean tokens, first", "second")


def compare_outputs(
    first: JobStore,
    second: JobStore | None,
    adapters: Sequence[str],
    on: str | None,
    for_float32: Sequence[str],
    *,
    as_json: bool = False,
) -> bool:
    """Compare two outputs, or two adapters of the first, print how their answers differ, and return whether none does.
    `for_float32`: given options that only a comparison with float32 has.

    Raises `JobRequestError`, also where rows cannot be joined, and `StorageError`.
    """
    if for_float32:
        raise JobRequestError(f"{for_float32[0]}: only for one job, whose rows are answered in float32. Leave it out.")
    if len(adapters) > 2 or (second is None and len(adapters) < 2):
        raise JobRequestError(
            f"--adapter was given {len(adapters)} times: expected two adapters of one job, or at most two with the "
            "outputs of two jobs."
        )
    sides = (adapters[0], adapters[-1]) if adapters else (None, None)
    found = compare_answers(first, second or first, adapters=sides, on=on)
    print_comparison(found, as_json=as_json)
    return found.is_equal


def print_comparison(found: Comparison, *, as_json: bool = False) -> None:
    """Print how the answers of two sides differ, as tables of adapters and finish reasons with examples, or as JSON."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1, default=str))
        return
    console = plain_console()
    console.print(f"first:  {found.sides[0]}\nsecond: {found.sides[1]}", soft_wrap=True)
    for change in found.changes:
        console.print(f"  {change}", soft_wrap=True)
    table = Table("adapter", *_COUNTED)
    for name, part in (*found.adapters.items(), ("all", found)):
        table.add_row(Text(printable(name or "(base model)")), *_counts(part))
    console.print(table)
    if found.num_other_adapter:
        console.print(f"{found.num_other_adapter} rows were answered by another adapter on each side.")
    for (first, second), count in found.finish_reasons.items():
        console.print(f"finish reason {first if first == second else f'{first}, then {second}'}: {count} rows")
    for key, *both in found.examples:
        console.print(_example(key, *both))
    console.print(f"Joined by {found.key}: {found}.", soft_wrap=True)


def _counts(part: Comparison) -> list[str]:
    tokens = [f"{total / part.num_both:.1f}" if part.num_both else "-" for total in part.completion_tokens]
    return [*map(str, (part.num_equal, part.num_different, *part.num_alone)), *tokens]


def _example(key: str, first: dict[str, Any], second: dict[str, Any]) -> Table:
    """A differing row: both answers from a little before their first difference on."""
    rows = (first, second)
    adapters = dict.fromkeys(row["adapter"] or "base model" for row in rows)
    table = Table(title=printable(f"{key} ({', '.join(adapters)})"), title_justify="left", expand=True, show_lines=True)
    texts = [row["error"] or row["completion"] or "" for row in rows]
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(equal - _CELL_CHARACTERS // 4, 0)
    for name, row in zip(("first", "second"), rows, strict=True):
        table.add_column(f"{name}, {row['finish_reason']}")
    shown = [shortened(" ".join(text[start:].split()), _CELL_CHARACTERS) for text in texts]
    table.add_row(*(Text(printable(("…" if start else "") + text)) for text in shown))
    return table
