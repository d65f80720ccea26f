"""What a row overrides survives its journey, and nothing else travels."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import SamplingParams
from lorabatch.pipeline.dataset.row_checks import row_sampling, sampling_overrides

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**40),
    min_tokens=st.integers(0, 9),
    temperature=st.floats(0, 4, allow_nan=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    logprobs=st.booleans(),
    ignore_eos=st.booleans(),
)


@given(job=PARAMS, row=PARAMS)
def test_overrides_read_back_give_the_rows_own_sampling(job: SamplingParams, row: SamplingParams) -> None:
    assert row_sampling(job, sampling_overrides(job, row)) == row


@given(job=PARAMS)
def test_a_row_that_overrides_nothing_carries_nothing(job: SamplingParams) -> None:
    assert sampling_overrides(job, replace(job)) is None
