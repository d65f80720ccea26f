"""`JobResult`: the account of a finished job, counted from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from ..jobs.progress import AdapterCount, RowTotals, counted
from ..system.html import facts_table


@dataclass(frozen=True, slots=True)
class KindOfError:
    """Rows with one kind of error, and the first of them: its place and its sentence."""

    kind: str
    num_rows: int
    location: str
    sentence: str


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
    adapters: tuple[AdapterCount, ...]
    #: Seconds of the run that finished the job.
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
        adapters = tuple(AdapterCount(**count) for count in raw["adapters"])
        return cls(**{**raw, "errors": errors, "adapters": adapters})

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
        """A few lines for people: counts and output of the job, its times, and its errors by kind."""
        answered = (
            f"{self.num_rows - self.num_errors:,} of {self.num_rows:,}" if self.num_errors else f"{self.num_rows:,}"
        )
        lines = [f"{answered} rows answered in {self.num_parts:,} parts: {self.output}"]
        if self.num_reused:
            lines.append(f"{self.num_reused:,} of them were done before this run")
        computed = self.completion_tokens / self.seconds if self.seconds > 0 and not self.num_reused else 0.0
        rate = f" ({computed:,.0f} generated tokens/s)" if computed else ""
        lines.append(
            f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} generated, {self.seconds:,.1f} s{rate}"
        )
        if self.working_s:
            rows = "this run's rows, " if self.num_reused else ""
            lines.append(f"{rows}from the first shard opened to the last part written: {self._comparison()}")
        if self.batch_fill is not None:
            lines.append(f"batches were {self.batch_fill:.1%} full while shards were queued")
        if self.prefix_hit_rate is not None:
            lines.append(f"{self.prefix_hit_rate:.1%} of prompt tokens were reused, not computed")
        if self.num_errors:
            rows = "1 error row" if self.num_errors == 1 else f"{self.num_errors:,} error rows"
            lines.append(f"{rows}; select with `error IS NOT NULL`:")
            lines += [
                f"  {kind.num_rows:,} x {kind.kind}, first at {kind.location}: {_short(kind)}" for kind in self.errors
            ]
        return "\n".join(lines)

    def _comparison(self) -> str:
        """A clause with the measured seconds beside the predicted ones and the lower bound."""
        assert self.working_s, f"measured {self.working_s} s"
        parts = [f"measured {self.working_s:,.1f} s"]
        # The prediction is for all rows, not for this run's only.
        if self.predicted_s and not self.num_reused:
            parts.append(f"predicted {self.predicted_s:,.1f} s ({self.working_s / self.predicted_s:.2f} times as long)")
            if self.corrected_s:
                ratio = self.working_s / self.corrected_s
                parts.append(f"after the first steps {self.corrected_s:,.1f} s ({ratio:.2f} times as long)")
        if self.bound_s:
            parts.append(f"lower bound {self.bound_s:,.1f} s ({self.working_s / self.bound_s:.2f} times as long)")
        else:
            parts.append("lower bound not known")
        return ", ".join(parts)


def _short(kind: KindOfError) -> str:
    sentence = " ".join(kind.sentence.split())
    return sentence if len(sentence) <= _SENTENCE_CHARS else sentence[: _SENTENCE_CHARS - 1] + "…"
