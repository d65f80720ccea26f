"""Compiled attention of a step against one query and one head at a time in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lorabatch.kernels.packed_weight import can_multiply
from lorabatch.kernels.paged_attention.compiled import attend_spans, can_attend_compiled
from lorabatch.kernels.paged_attention.types import SpanTable

pytestmark = pytest.mark.skipif(
    not can_attend_compiled(64, torch.float32), reason="compiled kernels were not built on this machine"
)
LAYER, NUM_LAYERS, CAPACITY = 1, 2, 160
Span = tuple[int, int]  # new tokens, tokens stored before
# decoding rows of several contexts, whole prompts, chunks after a prefix
MIXED: list[Span] = [(1, 0), (1, 30), (7, 0), (1, 129), (9, 6), (70, 65)]


class Step:
    """Random queries, and a pool in which places behind each sequence's last token hold NaN."""

    def __init__(self, spans: Sequence[Span], heads: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
        num_heads, self.num_kv_heads, self.head_dim = heads
        self.per_kv = num_heads // self.num_kv_heads
        #: Queries and weights are rounded to bf16, as keys and values are.
        self.in_pairs = dtype == torch.bfloat16 and self.head_dim % 32 == 0 and can_multiply("bfloat16")
        extent = NUM_LAYERS * 2 * self.num_kv_heads * CAPACITY * self.head_dim
        self.pool = torch.randn(len(spans) * extent).to(dtype)
        views = self.pool.view(len(spans), NUM_LAYERS, 2, self.num_kv_heads, CAPACITY, self.head_dim)
        self.keys, self.values = views[:, LAYER, 0], views[:, LAYER, 1]
        rows, first = [], 0
        for i, (new, past) in enumerate(spans):
            views[i, :, :, :, new + past :] = torch.nan
            rows.append((first, new, past, i * extent, CAPACITY))
            first += new
        self.rows = rows
        self.packed = torch.randn(first, num_heads + 2 * self.num_kv_heads, self.head_dim)
        self.q = self.packed[:, :num_heads]
        #: Attention sink of each query head; None for none.
        self.sinks: torch.Tensor | None = None

    def attend(self, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        table = SpanTable.of(self.rows, self.per_kv)
        return attend_spans(self.q, self.pool, table, LAYER, self.num_kv_heads, window, 0.3, softcap, self.sinks).view(
            self.q.shape
        )

    def expected(self, window: int | None, softcap: float | None) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=torch.float64)
        q = self.rounded(self.q.double())
        for i, (start, new, past, _, _) in enumerate(self.rows):
            for t in range(new):
                end = past + t + 1
                begin = 0 if window is None else max(end - window, 0)
                for head in range(self.q.shape[1]):
                    keys = self.keys[i, head // self.per_kv, begin:end].double()
                    scores = 0.3 * (keys @ q[start + t, head])
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    largest = scores.max() if self.sinks is None else scores.max().maximum(self.sinks[head].double())
                    weights = (scores - largest).exp()
                    sink = 0.0 if self.sinks is None else (self.sinks[head].double() - largest).exp()
                    values = self.values[i, head // self.per_kv, begin:end].double()
                    out[start + t, head] = self.rounded(weights) @ values / (weights.sum() + sink)
        return out

    def check(self, window: int | None = None, softcap: float | None = None) -> None:
        error = (self.attend(window, softcap).double() - self.expected(window, softcap)).abs()
        assert error.max() < self.tolerance()
        assert error.mean() < 1e-4  # of weights that are rounded up and down

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.bfloat16().double() if self.in_pairs else numbers

    def tolerance(self) -> float:
        """In pairs a weight between two numbers of bf16 may be rounded to the other one, a 256th of it apart, and is
        multiplied by values of up to 4.5."""
        return 4.5 / 256 / 2 if self.in_pairs else 1e-5


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_decode_and_prefill_in_one_step(window: int | None, softcap: float | None, stored: torch.dtype) -> None:
    step = Step(MIXED, (6, 2, 64), stored)
    step.check(window, softcap)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (100, 2.0)])
@pytest.mark.parametrize("heads", [(6, 2, 64), (5, 1, 96)])
def test_sinks_take_their_share_of_the_weights(
    heads: tuple[int, int, int], window: int | None, softcap: float | None, stored: torch.dtype
) -> None:
    step = Step(MIXED, heads, stored)
    without = step.attend(window, softcap)
    step.sinks = torch.linspace(-3.0, 4.0, heads[0])
    step.check(window, softcap)
    assert (step.attend(window, softcap) - without).abs().max() > 0.1
    step.sinks = torch.full((heads[0],), -1e4)
    torch.testing.assert_close(step.attend(window, softcap), without)


@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (2, 2, 128), (14, 2, 16), (4, 4, 80), (8, 1, 256), (5, 1, 96), (12, 1, 32)]
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_groups_and_heads_of_many_sizes(heads: tuple[int, int, int], stored: torch.dtype) -> None:
    Step(MIXED, heads, stored).check()


def test_scores_far_apart_do_not_overflow() -> None:
    step = Step(MIXED, (4, 2, 64))
    step.q.mul_(200)
    assert (step.attend().double() - step.expected(None, None)).abs().max() < 1e-3  # scores of 2,000 in fp32


@pytest.mark.parametrize("window", [None, 19, 20])
@pytest.mark.parametrize("heads", [(6, 2, 64), (3, 3, 80), (12, 1, 128)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_gets_the_same_bits_alone_and_however_its_prompt_is_cut(
    window: int | None, heads: tuple[int, int, int], stored: torch.dtype
) -> None:
    """Blocks of few queries and of many are computed by different loops."""
    step = Step(MIXED, heads, stored)
    step.sinks = torch.randn(heads[0]) if window == 19 else None
    together = step.attend(window)
    everything = step.rows
    for start, new, past, offset, capacity in everything:
        for cut in {0, new // 2, new - 1} - {new}:
            pieces = [(start, cut, past, offset, capacity)] if cut else []
            step.rows = [*pieces, (start + cut, new - cut, past + cut, offset, capacity)]
            apart = step.attend(window)[start : start + new]
            assert torch.equal(apart, together[start : start + new]), f"row at {start} cut at {cut}"


def test_heads_that_the_vectors_do_not_divide_are_left_to_torch() -> None:
    assert not can_attend_compiled(40, torch.float32)
    assert not can_attend_compiled(64, torch.float16)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_is_reported_as_by_torch(wrong: float, softcap: float | None) -> None:
    """It must not become a weight like any other: the row that it belongs to is an error."""
    num_kv_heads, head_dim, past = 2, 64, 40
    for place in (0, 17, past):
        pool = torch.randn(2 * num_kv_heads * CAPACITY * head_dim)
        keys, values = pool.view(2, num_kv_heads, CAPACITY, head_dim)[:, :, : past + 1]
        keys[0, place] = wrong
        q = torch.rand(1, 4, head_dim) + 0.1
        found = attend_spans(q, pool, SpanTable.of([(0, 1, past, 0, CAPACITY)], 2), 0, num_kv_heads, None, 0.3, softcap)
        scores = 0.3 * (q[0].view(num_kv_heads, 2, head_dim) @ keys.transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = (scores.softmax(-1) @ values).view(1, -1)
        assert torch.equal(found.isnan(), expected.isnan()), place
        assert bool(found.isnan().any()) == (wrong != torch.inf or softcap is None)
        assert not found[:, 2 * head_dim :].isnan().any(), "the other key head's queries see no such score"
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-5)
