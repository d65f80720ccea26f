"""Steps in flight: what counts as stored and pending, and what is read when."""

from __future__ import annotations

from typing import Any

from lorabatch.engine.memory.pool import PageRun
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.runner import LaunchedStep, StepsInFlight
from lorabatch.engine.runner.sampler import SampledTokens
from lorabatch.engine.sequence import Sequence


def sequence(max_tokens: int = 3) -> Sequence:
    return Sequence(Request("row", (1, 2, 3, 4), None, SamplingParams(max_tokens=max_tokens)))


def launched(steps: StepsInFlight, row: Sequence, num_tokens: int, token: int | None) -> None:
    sampled = () if token is None else (row,)
    tokens = [] if token is None else [token]
    entry = StepEntry(row, num_tokens, PageRun(0, 1), None)
    assert entry.yields_token == (token is not None)
    none: list[tuple[Any, ...]] = [()] * len(tokens)
    steps.add(LaunchedStep(sampled, lambda: SampledTokens(tokens, [0.0] * len(tokens), none, none)), [entry])


def test_a_row_goes_on_by_tokens_that_only_the_device_knows() -> None:
    steps, row = StepsInFlight(), sequence()
    launched(steps, row, 3, None)
    assert (row.num_stored, row.num_pending, row.is_decoding) == (3, 0, False)
    launched(steps, row, 1, 10)
    assert (row.num_stored, row.total_tokens, row.is_decoding) == (4, 5, True)
    launched(steps, row, 1, 11)
    assert (row.num_stored, row.total_tokens, row.num_pending, row.awaits_end) == (5, 6, 2, False)
    launched(steps, row, 1, 12)
    assert row.awaits_end, "its third and last token is on its way"
    assert [token for _, token, *_ in steps.read(keep=1)] == [10, 11]
    assert row.num_pending == 1
    assert [token for _, token, *_ in steps.read(keep=0)] == [12]
    assert (row.num_pending, row.token_ids) == (0, []), "what a token means is the engine's to say"


def test_a_step_without_sampled_rows_is_read_as_nothing() -> None:
    steps, row = StepsInFlight(), sequence()
    launched(steps, row, 2, None)
    assert list(steps.read(keep=0)) == []
