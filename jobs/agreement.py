"""`Agreement`: how answers in a number format differ from those in float32, measured on rows of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from ..system.html import facts_table

#: Tokens of an answer, and the log-probability of each.
Answer = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """One comparison of a job's answers in a number format with the answers of the same rows in float32."""

    #: Job whose rows were compared.
    job_id: str
    #: Format in which linear layers multiplied.
    products: str
    #: Rows that were answered in both formats.
    num_rows: int
    #: Rows whose answers have the same tokens in both formats.
    num_equal: int
    #: Share of the float32 answers' tokens that come before the first differing token of their answer, 0 to 1.
    leading_share: float
    #: Mean absolute difference of these leading tokens' log-probabilities, in nats; None without leading tokens.
    logprob_distance: float | None

    @classmethod
    def of(cls, job_id: str, products: str, pairs: Sequence[tuple[Answer, Answer]]) -> Agreement:
        """Compares pairs of answers to a row: in the format, in float32. Raises ValueError when there are no pairs."""
        if not pairs:
            raise ValueError("no answers to compare")
        leading = [_num_leading(ours, reference) for (ours, _), (reference, _) in pairs]
        num_tokens = sum(len(reference) for _, (reference, _) in pairs)
        distances = [
            abs(a - b)
            for ((_, ours), (_, reference)), count in zip(pairs, leading, strict=True)
            for a, b in zip(ours[:count], reference[:count], strict=True)
        ]
        return cls(
            job_id,
            products,
            len(pairs),
            sum(list(ours) == list(reference) for (ours, _), (reference, _) in pairs),
            sum(leading) / num_tokens if num_tokens else 1.0,
            fmean(distances) if distances else None,
        )

    def __str__(self) -> str:
        equal = f"{self.num_equal} of {self.num_rows} answers are those of float32"
        text = f"{self.products}: {equal}, {self.leading_share:.1%} of tokens come before a first difference"
        if self.logprob_distance is not None:
            text += f", and their log-probabilities differ by {self.logprob_distance:.4f}"
        return f"{text} ({self.job_id})"

    def __repr__(self) -> str:
        return f"<Agreement: {self.products}, {self.num_equal} of {self.num_rows} answers equal, {self.job_id}>"

    def _repr_html_(self) -> str:
        distance = None if self.logprob_distance is None else f"{self.logprob_distance:.4f}"
        facts = {
            "rows": self.num_rows,
            "answers as in float32": self.num_equal,
            "tokens before a first difference": f"{self.leading_share:.1%}",
            "difference of their log-probabilities": distance,
        }
        return facts_table(f"Job {self.job_id}: {self.products} beside float32", facts)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object, the form in which they are stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Agreement:
        """The agreement that `to_json` wrote. Raises TypeError or ValueError for anything else."""
        found = cls(**raw)
        if not (isinstance(found.num_rows, int) and found.num_rows > 0 and 0 <= found.leading_share <= 1):
            raise ValueError(f"{raw}: expected rows that were compared")
        return found


def _num_leading(ours: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, reference, strict=False)))
