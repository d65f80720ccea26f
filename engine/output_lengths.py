"""How long completions turn out, learned from the finished ones: what a batcher's forecast rests on."""

from __future__ import annotations

# Until rows have finished, half of `max_tokens` is expected, as if so many rows had shown it. The first rows to
# finish are short ones: a few of them must not decide.
_PRIOR_ROWS = 16


class OutputLengths:
    """Mean completion of an engine's rows, in tokens."""

    def __init__(self) -> None:
        self._num_asked = self._asked_tokens = 0
        self._num_finished = self._finished_tokens = 0

    def asked(self, max_tokens: int) -> None:
        """A row came that may generate so many tokens."""
        self._num_asked += 1
        self._asked_tokens += max_tokens

    def finished(self, num_tokens: int) -> None:
        """A row ended after so many."""
        self._num_finished += 1
        self._finished_tokens += num_tokens

    def mean(self) -> float:
        """Tokens expected of a row; 1 before any row came."""
        prior = self._asked_tokens / self._num_asked / 2 if self._num_asked else 1.0
        return (_PRIOR_ROWS * prior + self._finished_tokens) / (_PRIOR_ROWS + self._num_finished)
