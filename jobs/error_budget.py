"""How many rows of a job may end in errors: a count, or a percentage of its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """Exactly one of `count` and `percent` is set."""

    count: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """From `"25"` (rows) or `"10%"`. Raises ValueError with the expectation."""
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
        assert self.percent is not None
        return int(num_rows * self.percent / 100.0)

    def allows(self, num_errors: int, num_rows: int) -> bool:
        """Whether a job of `num_rows` may go on with `num_errors` of them wrong."""
        return num_errors <= self.limit(num_rows)

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent is not None else f"{self.count} rows"
