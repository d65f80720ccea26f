"""`JobResult`: the account of a finished job, counted from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..jobs.progress import RowTotals


@dataclass(frozen=True, slots=True)
class KindOfError:
    """Rows with one kind of error, and the first of them: its place and its sentence."""

    kind: str
    num_rows: int
    location: str
    sentence: str


_SENTENCE_CHARS = 200


@dataclass(frozen=True, slots=True)
class AdapterCount:
    """Rows of one adapter ("": base model), those among them that are errors, and the tokens generated for them."""

    adapter: str
    num_rows: int
    num_errors: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """The account of a finished job. `errors`: kinds of error rows, with the first of each kind.

    `seconds`: of the run that finished it; `num_reused`: rows that earlier runs had done. `predicted_s`, `working_s`:
    from the first shard opened to the last part written, as planned for all rows and as it was for this run's (None:
    not known, since several coordinators drove it).
    `corrected_s`: predicted again from the first steps of the run, where what steps cost was a guess before.
    `bound_s`: below which no scheduler could have answered this run's rows with engines as fast as these were, by what
    their steps took (None: not known).
    `batch_fill`: how full the engines' batches were while shards were queued, from 0 to 1 (None: there were none).
    `prefix_hit_rate`: share of this run's prompt tokens that were reused (None: not counted).
    """

    output: str
    job_id: str
    num_rows: int
    num_errors: int
    num_parts: int
    prompt_tokens: int
    completion_tokens: int
    errors: tuple[KindOfError, ...]
    adapters: tuple[AdapterCount, ...]
    seconds: float
    num_reused: int
    predicted_s: float | None = None
    working_s: float | None = None
    bound_s: float | None = None
    corrected_s: float | None = None
    batch_fill: float | None = None
    prefix_hit_rate: float | None = None

    @property
    def totals(self) -> RowTotals:
        """Its rows, as they are shown everywhere."""
        return RowTotals.of_summary(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobResult:
        """The result that `to_json` wrote."""
        errors = tuple(KindOfError(**kind) for kind in raw["errors"])
        adapters = tuple(AdapterCount(**count) for count in raw["adapters"])
        return cls(**{**raw, "errors": errors, "adapters": adapters})

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """A few lines for people: what is where, and what went wrong."""
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
        """What was measured beside what was predicted and what no run could have beaten."""
        assert self.working_s
        parts = [f"measured {self.working_s:,.1f} s"]
        # The plan is of all rows.
        if self.predicted_s and not self.num_reused:
            parts.append(f"predicted {self.predicted_s:,.1f} s ({self.working_s / self.predicted_s:.2f} times that)")
            if self.corrected_s:
                ratio = self.working_s / self.corrected_s
                parts.append(f"after the first steps {self.corrected_s:,.1f} s ({ratio:.2f} times that)")
        if self.bound_s:
            parts.append(f"lower bound {self.bound_s:,.1f} s ({self.working_s / self.bound_s:.2f} times that)")
        else:
            parts.append("lower bound not known")
        return ", ".join(parts)


def _short(kind: KindOfError) -> str:
    sentence = " ".join(kind.sentence.split())
    return sentence if len(sentence) <= _SENTENCE_CHARS else sentence[: _SENTENCE_CHARS - 1] + "…"
