"""Attention over pages against one token and one head at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.paged_attention import AttentionRule, allocate_partials, attend_pages
from lorabatch.kernels.paged_attention.reference import attend
from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention, tile_rows_for

LAYOUT = PageLayout(num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2, page_tokens=4)
RULE = AttentionRule(scale=0.25)
# (new tokens, tokens stored before): decoding rows of several contexts, whole prompts, chunks after a prefix
MIXED = [(1, 0), (1, 30), (7, 0), (1, 5), (9, 6)]
# Several tiles of each size, several blocks before and behind the first query, and tiles that a prompt leaves half full
LONG = [(1, 75), (150, 70), (43, 0)]


def check(
    step: Sequence[tuple[int, int]],
    layout: PageLayout,
    rule: AttentionRule,
    limits: WorkLimits,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[..., None],
    has_sinks: bool = False,
) -> None:
    sinks = torch.randn(layout.num_heads, device=device).to(dtype) if has_sinks else None
    num_tokens = sum(new for new, _ in step)
    packed = torch.randn(num_tokens, layout.num_heads + 3, layout.head_dim, device=device).to(dtype)
    q = packed[:, : layout.num_heads]
    counts = [-(-(new + past) // layout.page_tokens) for new, past in step]
    num_pages = sum(counts) + 8
    pool = torch.randn(num_pages * layout.page_elements, device=device).to(dtype)
    order = torch.randperm(num_pages).tolist()
    tables = torch.full((len(step), max(counts) + 1), -1, dtype=torch.int32)  # an entry that is read by mistake faults
    spans, row = [], 0
    for index, (new, past) in enumerate(step):
        pages = [order.pop() for _ in range(counts[index])]
        tables[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        last = (new + past) % layout.page_tokens
        if last:  # places behind the last token hold NaN
            shape = (layout.num_layers * 2 * layout.num_kv_heads, layout.page_tokens, layout.head_dim)
            page = pool[pages[-1] * layout.page_elements :][: layout.page_elements].view(shape)
            page[:, last:] = torch.nan
        spans.append(Span(row, new, past, index))
        row += new
    host = plan_attention(spans, layout.num_heads // layout.num_kv_heads, limits)
    work = type(host)(limits, host.buffer.to(device))
    partials = allocate_partials(limits.max_items, layout.num_heads, layout.head_dim, device)
    for scratch in partials:
        scratch.fill_(torch.nan)
    expected = torch.empty(q.shape, dtype=torch.float64, device=device)
    attend(expected, q, pool, tables.to(device), work, partials, layout, 1, rule, sinks)
    found = attend_pages(q, pool, tables.to(device), work, partials, layout, 1, rule, sinks=sinks)
    for span in spans:  # over long contexts numbers are smaller
        rows = slice(span.row, span.row + span.num_queries)
        assert_close(found[rows], expected.flatten(1)[rows])


@pytest.mark.parametrize("split_keys", [0, 8, 512])
@pytest.mark.parametrize(
    "rule",
    [RULE, AttentionRule(0.25, window=6), AttentionRule(0.4, softcap=1.5), AttentionRule(0.3, window=3, softcap=2.0)],
    ids=["plain", "window", "softcap", "both"],
)
def test_decode_and_prefill_in_one_step(
    assert_close: Callable[..., None], dtype: torch.dtype, device: torch.device, rule: AttentionRule, split_keys: int
) -> None:
    check(MIXED, LAYOUT, rule, WorkLimits(40, 8, 16, split_keys), dtype, device, assert_close)


@pytest.mark.parametrize("split_keys", [0, 8])
@pytest.mark.parametrize("rule", [RULE, AttentionRule(0.3, window=3, softcap=2.0)], ids=["plain", "both"])
def test_sinks_take_their_share_of_the_weights_once(
    assert_close: Callable[..., None], dtype: torch.dtype, device: torch.device, rule: AttentionRule, split_keys: int
) -> None:
    check(MIXED, LAYOUT, rule, WorkLimits(40, 8, 16, split_keys), dtype, device, assert_close, has_sinks=True)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 20), (2, 2, 8), (7, 1, 16)])
def test_groups_and_heads_of_odd_sizes(
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    layout = PageLayout(num_heads, num_kv_heads, head_dim, num_layers=2, page_tokens=4)
    check([(1, 9), (6, 3)], layout, RULE, WorkLimits(40, 8, 16, 8), dtype, device, assert_close)


def test_one_token_alone(assert_close: Callable[..., None], dtype: torch.dtype, device: torch.device) -> None:
    check([(1, 0)], LAYOUT, RULE, WorkLimits(4, 4, 16, 8), dtype, device, assert_close)


def of_heads(head_dim: int) -> PageLayout:
    return PageLayout(num_heads=4, num_kv_heads=2, head_dim=head_dim, num_layers=2, page_tokens=16)


# Head size, number format, rows of a tile: up to the tile of prompts. In bf16 the interpreter cuts weights and sums off
# instead of rounding them.
SHORT = {(64, torch.bfloat16, 128), (96, torch.float32, 64), (128, torch.float16, 128), (256, torch.float16, 64)}
TILES = [
    pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.long])
    for case in product((64, 96, 128, 256), (torch.float32, torch.float16, torch.bfloat16), (16, 64, 128))
    if case[2] <= tile_rows_for(of_heads(case[0]), case[1], is_decode=False)
]


@pytest.mark.parametrize("rule", [AttentionRule(0.1), AttentionRule(0.1, window=50)], ids=["plain", "window"])
@pytest.mark.parametrize(("head_dim", "dtype", "tile_rows"), TILES, ids=str)
def test_tiles_of_prompts_over_contexts_of_several_blocks(
    assert_close: Callable[..., None],
    device: torch.device,
    rule: AttentionRule,
    head_dim: int,
    dtype: torch.dtype,
    tile_rows: int,
) -> None:
    check(LONG, of_heads(head_dim), rule, WorkLimits(80, 8, tile_rows, 32), dtype, device, assert_close)
