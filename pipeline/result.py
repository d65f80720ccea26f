"""`JobResult`: the account of a finished job, counted from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from ..engine.adapter_use import AdapterUse
from ..jobs.outcome import AdapterOutcome, KindOfError, outcome_lines
from ..jobs.progress import RowTotals, counted
from ..system.html import facts_table
from ..system.untrusted import shortened

_SENTENCE_CHARS = 200
# Adapters in the table that a notebook shows.
_ADAPTERS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class JobResult:
    """The account of a finished job: counts of its rows, and times of the run that finished it."""

    #: URL of the output folder.
    output: str
    #: Id of the job.
    job_id: str
    #: Rows of the output; each completion of a row with several counts.
    num_rows: int
    #: Error rows.
    num_errors: int
    #: Part files.
    num_parts: int
    #: Tokens of all prompts.
    prompt_tokens: int
    #: Tokens of all completions.
    completion_tokens: int
    #: Kinds of error rows, with the first row of each kind.
    errors: tuple[KindOfError, ...]
    #: Counts of each adapter that rows have, in order of names.
    adapters: tuple[AdapterOutcome, ...]
    #: Seconds of the run that finished the job, from the beginning of its command to the end.
    seconds: float
    #: Rows that earlier runs had done.
    num_reused: int
    #: Seconds from the first shard opened to the last part written, as planned for all rows; None when not known.
    predicted_s: float | None = None
    #: Seconds from the first shard opened to the last part written, as measured for this run's rows; None when not
    #: known, since several coordinators drove the run.
    working_s: float | None = None
    #: Seconds below which no scheduler could have answered this run's rows with engines as fast as these were, by the
    #: measured costs of their steps; None when not known.
    bound_s: float | None = None
    #: Seconds predicted again from the first steps of the run; None when the plan's costs of steps were no guess.
    corrected_s: float | None = None
    #: Share of places in the engines' batches that had rows while shards were queued, from 0 to 1; None when no shards
    #: were queued for long enough.
    batch_fill: float | None = None
    #: Share of this run's prompt tokens that were reused, from 0 to 1; None when not counted.
    prefix_hit_rate: float | None = None
    #: Costs of adapters on all workers while the run had them.
    adapter_use: AdapterUse = field(default_factory=AdapterUse)
    #: Beginning of the run that finished the job, ISO 8601, UTC; "" in summaries of earlier versions.
    started_at: str = ""
    #: End of that run, as `started_at`.
    ended_at: str = ""
    #: Seconds of each phase of the run, which add up to `seconds`: opening, starting, indexing, planning, loading
    #: engines, answering (`working_s`), finishing. Empty when several coordinators drove the run.
    phases_s: Mapping[str, float] = field(default_factory=dict)
    #: Rows of this run per second of `working_s`; None when that is not known.
    rows_per_s: float | None = None
    #: Prompt tokens, reused ones too, per second of `working_s`; None when that is not known, or rows were done before.
    prompt_tokens_per_s: float | None = None
    #: Generated tokens per second of `working_s`; None as `prompt_tokens_per_s`.
    completion_tokens_per_s: float | None = None
    #: Phrase for people that says how the plan's costs of steps were found; "" in summaries of earlier versions.
    cost_origin: str = ""
    #: Name of each stage -> its `requests`, `errors`, `prompt_tokens` and `completion_tokens`, those of all rounds;
    #: empty for a job without stages.
    stages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def totals(self) -> RowTotals:
        """Counts of the job's rows, in the form in which all displays show them."""
        return RowTotals.of_summary(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobResult:
        """The result that `to_json` wrote."""
        errors = tuple(KindOfError(**kind) for kind in raw["errors"])
        adapters = tuple(AdapterOutcome.from_json(count) for count in raw["adapters"])
        use = AdapterUse(**raw.get("adapter_use", {}))
        return cls(**{**raw, "errors": errors, "adapters": adapters, "adapter_use": use})

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        counts = ((self.num_rows, "row"), (self.num_errors, "error"), (self.num_parts, "part"))
        shown = ", ".join(counted(number, noun) for number, noun in counts)
        return f"<JobResult: {shown}, {self.seconds:,.1f} s, {self.output}>"

    def _repr_html_(self) -> str:
        errors = (f"{kind.num_rows:,} x {kind.kind}, first at {kind.location}: {_short(kind)}" for kind in self.errors)
        adapters = (f"{count.adapter or 'base model'}: {count.num_rows:,}" for count in self.adapters)
        facts = {
            "output": self.output,
            "rows": self.num_rows,
            "error rows": self.num_errors,
            "errors": "\n".join(errors),
            "rows by adapter": "\n".join([*islice(adapters, _ADAPTERS_SHOWN), *(["…"] * any(adapters))]),
            "parts": self.num_parts,
            "prompt tokens": self.prompt_tokens,
            "generated tokens": self.completion_tokens,
            "seconds": f"{self.seconds:,.1f}",
        }
        return facts_table(f"Job {self.job_id}", facts)

    def to_text(self) -> str:
        """Lines for people: counts and output of the job, its time and rates, what came out of each adapter, its errors
        by kind.
        """
        answered = (
            f"{self.num_rows - self.num_errors:,} of {self.num_rows:,}" if self.num_errors else f"{self.num_rows:,}"
        )
        parts = "1 part" if self.num_parts == 1 else f"{self.num_parts:,} parts"
        lines = [f"{answered} rows answered in {parts}: {self.output}"]
        if self.num_reused:
            lines.append(f"{self.num_reused:,} of them were done before this run")
        lines += outcome_lines(self.to_json())
        if self.num_errors:
            rows = "1 error row" if self.num_errors == 1 else f"{self.num_errors:,} error rows"
            lines.append(f"{rows}; select with `error IS NOT NULL`:")
            lines += [
                f"  {kind.num_rows:,} x {kind.kind}, first at {kind.location}: {_short(kind)}" for kind in self.errors
            ]
        return "\n".join(lines)


def _short(kind: KindOfError) -> str:
    return shortened(" ".join(kind.sentence.split()), _SENTENCE_CHARS)
