"""Outcome of a job by adapter: finish reasons, lengths of answers, kinds of errors and examples, counted and in words.

`summary.json`, the last lines of `run`, `status` and the report all show these counts, and none counts by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, Self

from ..system.untrusted import shortened
from .progress import AdapterCount, added_up, clock, counted, time_left

#: Answers of each adapter that are shown.
NUM_EXAMPLES = 3
#: Characters that `summary.json` keeps of the end of a prompt, and of the beginning of an answer.
EXAMPLE_CHARACTERS = 300
# Adapters in the tables of `run` and `status`, those with examples, and characters of each text of an example.
_ADAPTERS_SHOWN, _ADAPTERS_WITH_EXAMPLES, _CHARACTERS_SHOWN = 10, 5, 70
_NAME_CHARACTERS = 40
_SCORES_SHOWN = 30
#: Name of the base model where adapters are named.
BASE_NAME = "(base model)"


@dataclass(frozen=True, slots=True)
class KindOfError:
    """Rows with one kind of error, and the first of them: its place and its sentence."""

    kind: str
    num_rows: int
    location: str
    sentence: str


@dataclass(frozen=True, slots=True)
class AdapterOutcome:
    """Counts of one adapter's rows, an entry of `adapters` in `summary.json`."""

    #: Name of the adapter; "" for the base model.
    adapter: str
    #: Rows of the adapter; each completion of a row with several counts.
    num_rows: int
    #: Rows without an answer.
    num_errors: int
    #: Tokens of the answers.
    completion_tokens: int
    #: Tokens of the prompts.
    prompt_tokens: int = 0
    #: Finish reason -> rows.
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    #: Tokens of an answer: `shortest`, `mean`, `median`, `p95`, `longest`. Median and 95th percentile are exact to a
    #: fifth. Empty without an answer.
    answer_tokens: Mapping[str, float] = field(default_factory=dict)
    #: Answers that `max_tokens` ended, but for those whose length was asked for (`continuation`, `ignore_eos`).
    num_cut: int = 0
    #: Least and most tokens at which answers were cut; None when none was.
    cut_at: tuple[int, int] | None = None
    #: Kind of error -> rows.
    errors: Mapping[str, int] = field(default_factory=dict)
    #: Up to `NUM_EXAMPLES` answers: `id`, `prompt_end` (None: not known), `answer`, `finish_reason`.
    examples: tuple[Mapping[str, Any], ...] = ()
    #: Seconds of one engine for these rows by the cost model, as `plan` reckons them; None when not known.
    engine_s: float | None = None
    #: Rows per second while rows were answered; those of all adapters add up to the job's. None when not known.
    rows_per_s: float | None = None
    #: Prompt tokens per second, as `rows_per_s`.
    prompt_tokens_per_s: float | None = None
    #: Score of the answers: `num_scored` of them, `mean` and `interval` over `num_rows` rows; `to_base` and `to_best`,
    #: comparisons with another `adapter` on the same rows (`score_statistics.paired`), where there is one; `flips`,
    #: some rows whose score is not that of the base model, or else of the best adapter. None without a score.
    score: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """The counts that `summary.json` has; keys of newer versions are dropped."""
        known = {name: raw[name] for name in (f.name for f in fields(cls)) if name in raw}
        cut_at = known.get("cut_at")
        return cls(**known | {"cut_at": cut_at and (cut_at[0], cut_at[1]), "examples": tuple(raw.get("examples", ()))})

    @property
    def name(self) -> str:
        """Name of the adapter for people, cut to a readable length."""
        return shortened(self.adapter or BASE_NAME, _NAME_CHARACTERS)

    @property
    def count(self) -> AdapterCount:
        """The adapter's rows and tokens, as a running job counts them."""
        num_cut = self.finish_reasons.get("length", 0)
        return AdapterCount(self.adapter, self.num_rows, self.num_errors, self.completion_tokens, num_cut)

    @property
    def num_ended(self) -> int:
        """Answers that ended by themselves, or that have the length that was asked for."""
        return self.num_rows - self.num_errors - self.num_cut


def outcome_lines(summary: Mapping[str, Any]) -> list[str]:
    """Lines on a job that is done, from its `summary.json`: its time, its rates beside prediction and bound, answers
    that were cut off, and the table and the examples of its adapters.
    """
    counts = [AdapterOutcome.from_json(count) for count in summary["adapters"]]
    note = cut_note(counts)
    lines = [time_line(summary), rate_line(summary), *prediction_lines(summary), stage_line(summary), note]
    lines += [*outcome_table(counts), *score_table(counts)]
    return [line for line in [*lines, *example_lines(counts)] if line]


def time_line(summary: Mapping[str, Any]) -> str:
    """A line with the seconds of the run and its parts, its beginning and its end."""
    phases = ", ".join(f"{name} {s:,.1f}" for name, s in (summary.get("phases_s") or {}).items())
    line = f"took {summary['seconds']:,.1f} s" + (f" ({phases})" if phases else "")
    started, ended = summary.get("started_at"), summary.get("ended_at")
    return line + (f", from {plain_time(started)} to {plain_time(ended)}" if started and ended else "")


def stage_line(summary: Mapping[str, Any]) -> str:
    """A line with the requests of each stage; "" for a job without stages."""
    stages = summary.get("stages") or {}
    texts = (
        f"{name} {counts['requests']:,} requests"
        + (f" ({counts['errors']:,} errors)" if counts["errors"] else "")
        + f", {counts['prompt_tokens']:,} prompt tokens, {counts['completion_tokens']:,} generated"
        for name, counts in stages.items()
    )
    return f"stages: {'; '.join(texts)}" if stages else ""


def plain_time(text: str) -> str:
    """A time of a record for people: "2026-11-29 10:36:34 UTC"."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def rate_line(summary: Mapping[str, Any]) -> str:
    """A line with tokens, and with rows and tokens per second while rows were answered, where these are known."""
    tokens = f"{summary['prompt_tokens']:,} prompt tokens, {summary['completion_tokens']:,} generated"
    names = {"rows": "rows", "prompt_tokens": "prompt tokens", "completion_tokens": "generated tokens"}
    rates = [(summary.get(f"{key}_per_s"), name) for key, name in names.items()]
    known = [f"{_rate(rate)} {name}/s" for rate, name in rates if rate is not None]
    line = tokens + (f"; while rows were answered {', '.join(known)}" if known else "")
    if (rate := summary.get("prefix_hit_rate")) is not None:
        line += f"; {rate:.1%} of prompt tokens were reused, not computed"
    if (fill := summary.get("batch_fill")) is not None:
        line += f"; batches were {fill:.1%} full while shards were queued"
    return line


def _rate(rate: float) -> str:
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def prediction_lines(summary: Mapping[str, Any]) -> list[str]:
    """Lines that compare the seconds of answering with those predicted, and with the lower bound; each says on what it
    rests. None where the seconds are not known.
    """
    working_s, predicted_s = summary.get("working_s"), summary.get("predicted_s")
    if not working_s:
        return []
    lines = []
    # The prediction is for all rows, not for this run's only.
    if predicted_s and not summary.get("num_reused"):
        origin = re.split("[,;]", str(summary.get("cost_origin") or ""))[0]
        line = f"answering took {working_s:,.1f} s, {working_s / predicted_s:.2f} times the {predicted_s:,.1f} s that "
        basis = f"; costs of steps: {origin}" if origin else ""
        line += f"the plan predicted (lengths of answers as expected{basis})"
        if corrected_s := summary.get("corrected_s"):
            line += f"; with the costs of the run's first steps it was {corrected_s:,.1f} s"
        lines.append(line)
    lines.append(bound_line(working_s, summary.get("bound_s")))
    return lines


def bound_line(working_s: float, bound_s: float | None) -> str:
    """A sentence on the lower bound of a run that says on what it rests."""
    if not bound_s:
        return "the least seconds in which these engines could have answered these rows are not known"
    return (
        f"with the speed that engines had in this run, and answers as long as they are, no schedule takes less than "
        f"{bound_s:,.1f} s to answer these rows; this run took {working_s / bound_s:.2f} times that"
    )


def cost_shares(counts: Sequence[AdapterOutcome]) -> tuple[list[float], str]:
    """Share of each adapter in the costs of a job, from 0 to 1, and a phrase that says by what: seconds of the cost
    model where they are known, else generated tokens, as in summaries of earlier versions.
    """
    seconds = [count.engine_s for count in counts]
    if all(s is not None for s in seconds) and sum(s or 0.0 for s in seconds) > 0:
        weights, basis = [s or 0.0 for s in seconds], "seconds of the cost model, as in a plan"
    else:
        weights, basis = [float(count.completion_tokens) for count in counts], "generated tokens"
    whole = sum(weights)
    return [weight / whole if whole else 0.0 for weight in weights], basis


def cut_note(counts: Sequence[AdapterOutcome]) -> str:
    """A sentence on answers that `max_tokens` cut off, with what to do; "" when none was."""
    cut = [(count, count.cut_at) for count in counts if count.cut_at is not None and count.num_cut]
    if not cut:
        return ""
    number = sum(count.num_cut for count, _ in cut)
    least, most = min(at[0] for _, at in cut), max(at[1] for _, at in cut)
    limit = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    tokens = "token" if most == 1 else "tokens"
    cut.sort(key=lambda one: (-one[0].num_cut, one[0].adapter))
    shown = cut[:_ADAPTERS_WITH_EXAMPLES]
    names = ", ".join(f"{count.name if count.adapter else 'base model'} {count.num_cut:,}" for count, _ in shown)
    more = f" and {len(cut) - _ADAPTERS_WITH_EXAMPLES} more" if len(cut) > _ADAPTERS_WITH_EXAMPLES else ""
    answers = "1 answer was" if number == 1 else f"{number:,} answers were"
    return (
        f"{answers} cut off at {limit} {tokens} ({names}{more}): their finish_reason is 'length'. Raise --max-tokens, "
        "or max_tokens of these rows, and start over if they should end by themselves"
    )


def outcome_table(counts: Sequence[AdapterOutcome]) -> list[str]:
    """A table of plain text with a line for each adapter, the most rows first, and the columns that are known of any;
    empty without rows.
    """
    if not counts:
        return []
    shown = sorted(counts, key=lambda count: (-count.num_rows, count.adapter))[:_ADAPTERS_SHOWN]
    head = ("adapter", "rows", "ended", "cut off", "errors", "answer tokens", "rows/s", "prompt tokens/s")
    rows = [_cells(count) for count in shown]
    known = [column for column in range(len(head)) if any(row[column] != "-" for row in rows)]
    cells = [[row[column] for column in known] for row in (head, *rows)]
    lines = _aligned(cells)
    if len(counts) > len(shown):
        lines.append(f"… and {len(counts) - len(shown):,} more adapters; summary.json and `lorabatch report` have all")
    return lines


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _cells(count: AdapterOutcome) -> tuple[str, ...]:
    return (
        count.name,
        f"{count.num_rows:,}",
        f"{count.num_ended:,}" if count.finish_reasons else "-",
        f"{count.num_cut:,}" if count.finish_reasons else "-",
        ", ".join(f"{number:,} {kind}" for kind, number in count.errors.items()) or f"{count.num_errors:,}",
        lengths_text(count),
        "-" if count.rows_per_s is None else f"{count.rows_per_s:,.1f}",
        "-" if count.prompt_tokens_per_s is None else f"{count.prompt_tokens_per_s:,.0f}",
    )


def score_table(counts: Sequence[AdapterOutcome]) -> list[str]:
    """A table of plain text with the score of each adapter, the best first; empty without scores."""
    scored = by_score(counts)
    if not scored:
        return []
    head = ("adapter", "score", "95 %", "of rows", "to base", "better, worse", "to best", "better, worse")
    rows = [
        (count.name, *score_cells(score), *paired_cells(score.get("to_base")), *paired_cells(score.get("to_best")))
        for count, score in scored[:_SCORES_SHOWN]
    ]
    known = [column for column in range(len(head)) if any(row[column] != "-" for row in rows)]
    more = len(scored) - _SCORES_SHOWN
    return [
        *_aligned([[row[column] for column in known] for row in (head, *rows)]),
        *([f"… and {more:,} more adapters with a score"] if more > 0 else []),
    ]


def by_score(counts: Sequence[AdapterOutcome]) -> list[tuple[AdapterOutcome, Mapping[str, Any]]]:
    """Adapters with a score, and it, the best first."""
    scored = [(count, count.score) for count in counts if count.score is not None]
    return sorted(scored, key=lambda one: (-one[1]["mean"], one[0].adapter))


def score_cells(score: Mapping[str, Any]) -> tuple[str, str, str]:
    """Mean, interval and number of rows of a score."""
    low, high = score["interval"]
    return f"{score['mean']:.1%}", f"{low:.1%} to {high:.1%}", f"{score['num_rows']:,}"


def paired_cells(found: Mapping[str, Any] | None) -> tuple[str, str]:
    """Difference with its interval, and numbers of rows that are better and worse; "-" without a comparison."""
    if not found:
        return "-", "-"
    low, high = found["interval"]
    return f"{found['difference']:+.1%} ({low:+.1%} to {high:+.1%})", f"{found['num_better']:,}, {found['num_worse']:,}"


def lengths_text(count: AdapterOutcome) -> str:
    """Lengths of the answers in a few words, such as "3 to 48, mean 13.6"; "-" without any."""
    found = count.answer_tokens
    if not found:
        return "-"
    if found["shortest"] == found["longest"]:
        return f"{found['longest']:,.0f}"
    return f"{found['shortest']:,.0f} to {found['longest']:,.0f}, mean {found['mean']:,.1f}"


def example_lines(counts: Sequence[AdapterOutcome]) -> Iterator[str]:
    """Lines with the examples of the adapters that have most rows, each with the end of its prompt and its answer as
    JSON strings, so that control characters and line breaks are written out.
    """
    shown = sorted(counts, key=lambda count: (-count.num_rows, count.adapter))
    for count in [count for count in shown if count.examples][:_ADAPTERS_WITH_EXAMPLES]:
        yield f"{count.name}:"
        header = _common_end([example.get("prompt_end") or "" for example in count.examples])
        for example in count.examples:
            prompt = example.get("prompt_end")
            if prompt is not None and header:
                prompt = prompt.removesuffix(header) + "…"
            asked = f"{example.get('id')}: " + ("" if prompt is None else f"{_shown(prompt, is_end=True)} -> ")
            yield f"  {asked}{_shown(str(example.get('answer')), is_end=False)}"


def _common_end(prompts: Sequence[str]) -> str:
    """The end that prompts have in common from a special token such as `<|im_end|>` on: the header of an answer; ""
    without one.
    """
    last = zip(*(reversed(prompt) for prompt in prompts), strict=False)
    common = [characters[0] for characters in takewhile(lambda of_place: len(set(of_place)) == 1, last)]
    end = "".join(reversed(common)) if len(prompts) > 1 else ""
    found = re.search(r"<[^\s<>]+>", end)
    return end[found.start() :] if found else ""


def _shown(text: str, *, is_end: bool) -> str:
    """A text as a JSON string on one line, cut at its beginning or its end."""
    if is_end and len(text) > _CHARACTERS_SHOWN:
        text = "…" + text[1 - _CHARACTERS_SHOWN :]
    return json.dumps(shortened(text, _CHARACTERS_SHOWN), ensure_ascii=False)


def canary_line(facts: Mapping[str, Any]) -> str:
    """A sentence on a job's canary: its rows, and what they say of the whole job. `facts`: content of `canary.json`."""
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
