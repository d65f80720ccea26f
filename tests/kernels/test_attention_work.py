"""Attention's work lists cover every query and key once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), max_size=6),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([0, 16, 64]),
)
def test_every_query_sees_all_its_keys_exactly_once(
    step: list[tuple[int, int]], queries_per_key_head: int, split_keys: int
) -> None:
    spans, row = [], 0
    for sequence, (new, past) in enumerate(step):
        spans.append(Span(row, new, past, sequence))
        row += new
    work = plan_attention(spans, queries_per_key_head, WorkLimits(400, 20, 16, split_keys))
    seen: dict[tuple[int, int], list[int]] = {}
    for first, count, position, sequence, begin, end, _ in work.items[: int(work.header[0])].tolist():
        assert count * queries_per_key_head <= 16
        for token in range(count):
            keys = range(begin, min(end, position + token + 1))
            seen.setdefault((first + token, sequence), []).extend(keys)
    for span in spans:
        for token in range(span.num_queries):
            keys = seen.pop((span.row + token, span.sequence))
            assert sorted(keys) == list(range(span.position + token + 1))
    assert not seen


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_partials_belong_to_one_combine_each(contexts: list[int]) -> None:
    spans = [Span(i, 1, past, i) for i, past in enumerate(contexts)]
    work = plan_attention(spans, 4, WorkLimits(200, 8, 16, 32))
    items = work.items[: int(work.header[0])].tolist()
    partial_rows = {item[6]: item[0] for item in items if item[6] >= 0}
    covered: list[int] = []
    for row, first, count in work.combines[: int(work.header[1])].tolist():
        assert all(partial_rows[p] == row for p in range(first, first + count))
        covered.extend(range(first, first + count))
    assert sorted(covered) == sorted(partial_rows)


def test_a_buffer_that_is_too_small_says_so() -> None:
    with pytest.raises(ValueError, match="needs 3 items"):
        plan_attention([Span(0, 9, 0, 0)], 4, WorkLimits(2, 1, 16, 32))


def test_a_tile_must_hold_a_group_of_heads() -> None:
    with pytest.raises(ValueError, match="tile_rows=16"):
        plan_attention([], 32, WorkLimits(2, 1, 16, 32))
