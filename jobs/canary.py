"""The account of a job's canary, the content of `canary.json`, and its lines for people.

Keys: `adapters` (as in `summary.json`), `errors` (kinds, as there), `seconds` (from the first shard opened),
`predicted_s` (of the whole job, by its plan), `left_s` (seconds left, least and most, once the canary was counted),
`cost` and `currency` (of the whole job, with a price), `event` (the scheduler's), `confirmed` (None: nobody was asked).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .options.conditions import added_up
from .outcome import AdapterOutcome, cut_note, example_lines, outcome_table
from .progress import clock, counted, time_left


def canary_line(facts: Mapping[str, Any]) -> str:
    """A sentence on the canary: its rows, and what they say of the whole job."""
    counts = [AdapterOutcome.from_json(count) for count in facts["adapters"]]
    whole = added_up("", (count.count for count in counts))
    rows, answers = counted(whole.num_rows, "row"), whole.num_rows - whole.num_errors
    of = "1 adapter" if len(counts) == 1 else f"{len(counts)} adapters"
    parts = [f"{rows} of {of} answered in {facts['seconds']:,.1f} s", counted(whole.num_errors, "error")]
    if answers:
        parts.append(f"{whole.num_cut:,} cut off, {whole.completion_tokens / answers:,.1f} tokens an answer")
    left = facts.get("left_s")
    if left is not None:
        words = time_left(left[0], (left[1], left[2]))
        parts.append(f"{words}; the plan predicted {clock(facts['predicted_s'])} in all")
    if (cost := facts.get("cost")) is not None:
        parts.append(f"about {cost:,.2f} {facts.get('currency') or 'in the currency of the price'} in all".strip())
    return "; ".join([", ".join(parts[:3]), *parts[3:]])


def canary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Lines on the canary: its sentence, a table of its adapters, examples, and kinds of errors."""
    counts = [AdapterOutcome.from_json(count) for count in facts["adapters"]]
    kinds = [
        f"{kind['num_rows']:,} x {kind['kind']}, first at {kind['location']}: {' '.join(kind['sentence'].split())}"
        for kind in facts["errors"]
    ]
    lines = [canary_line(facts), cut_note(counts), *outcome_table(counts), *example_lines(counts), *kinds]
    return [line for line in lines if line]
