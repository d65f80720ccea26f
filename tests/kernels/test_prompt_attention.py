"""Libraries for attention over prompts: what they are given, by twins on the CPU of what their documentation says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.paged_attention import attend_pages
from lorabatch.kernels.paged_attention.libraries import (
    attend_by_flashinfer,
    attend_by_varlen,
    choose_prompt_attention,
    has_windows,
)
from lorabatch.kernels.paged_attention.reference import attend
from lorabatch.kernels.paged_attention.types import AttentionRule, allocate_partials
from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention

LAYOUT = PageLayout(num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3, page_tokens=4)
CPU = torch.device("cpu")
# New tokens of each sequence, all of its tokens, and the pages of all.
Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
FULL, LAYER = AttentionRule(0.3), 1
WINDOWED = AttentionRule(0.3, window=5)
CAPPED = AttentionRule(0.3, window=7, softcap=2.0)


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, softcap: float | None) -> Tensor:
    """The last of the keys is the last query's own; `left`: keys seen before a query's own, -1 for all."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None, :]
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """As torch 2.13's on a GPU."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0, "causal"
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    parts = []
    for i in range(len(cu_seq_q) - 1):
        keys = slice(int(cu_seq_k[i]), int(cu_seq_k[i + 1]))
        q = query[int(cu_seq_q[i]) : int(cu_seq_q[i + 1])]
        scale = query.shape[2] ** -0.5 if scale is None else scale
        parts.append(attend_sequence(q, key[keys], value[keys], scale, window_size[0], None))
    return torch.cat(parts)


def older_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """As torch 2.10's: no groups of heads, no scale, no windows."""
    assert is_causal
    return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))


class Wrapper:
    """As FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` of layout HND."""

    def plan(self, *lists: Any, **options: Any) -> None:
        self.lists, self.options = lists, options

    def run(self, q: Tensor, paged: tuple[Tensor, Tensor]) -> Tensor:
        queries, starts, pages, last, num_heads, num_kv_heads, head_dim, page_tokens = self.lists
        assert all(lst.dtype == torch.int32 and lst.device == CPU for lst in (queries, starts, pages, last))
        assert q.is_contiguous()
        assert q.shape[1:] == (num_heads, head_dim)
        assert paged[0].shape[1:] == (num_kv_heads, page_tokens, head_dim)
        assert self.options["causal"]
        parts = []
        for i in range(len(queries) - 1):
            own = pages[int(starts[i]) : int(starts[i + 1])].long()
            num_keys = (len(own) - 1) * page_tokens + int(last[i])
            k, v = (side[own].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:num_keys] for side in paged)
            scale, left = self.options["sm_scale"], self.options["window_left"]
            part = q[int(queries[i]) : int(queries[i + 1])]
            parts.append(attend_sequence(part, k, v, scale, left, self.options["logits_soft_cap"]))
        return torch.cat(parts)


@pytest.fixture
def step() -> tuple[Tensor, Tensor, Spans]:
    """Queries as a view of a packed product, a pool, and four sequences: a whole prompt, the rest of one, one token of
    one, and a prompt of whole pages."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = np.array([9, 5, 1, 8]), np.array([9, 18, 7, 8])
    num_pages = int((-(-num_keys // LAYOUT.page_tokens)).sum())
    pages = torch.randperm(20, generator=generator)[:num_pages].numpy()
    pool = torch.randn(20 * LAYOUT.page_elements + 5, generator=generator)
    packed = torch.randn(int(num_queries.sum()), 8, LAYOUT.head_dim, generator=generator)
    return packed[:, : LAYOUT.num_heads], pool, (num_queries, num_keys, pages)


def by_reference(q: Tensor, pool: Tensor, spans: Spans, rule: AttentionRule) -> Tensor:
    num_queries, num_keys, pages = spans
    counts = -(-num_keys // LAYOUT.page_tokens)
    tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    for row, own in zip(tables, np.split(pages, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = torch.from_numpy(own)
    rows = np.cumsum(num_queries) - num_queries
    columns = (rows, num_queries, num_keys - num_queries, np.arange(len(rows)))
    work = plan_attention([Span(*map(int, c)) for c in zip(*columns, strict=True)], 2, WorkLimits(64, 8, 16, 0))
    out = torch.empty(q.shape)
    partials = allocate_partials(1, LAYOUT.num_heads, LAYOUT.head_dim, CPU)
    attend(out, q, pool, tables, work, partials, LAYOUT, LAYER, rule)
    return out.view(len(q), -1)


@pytest.mark.parametrize("rule", [FULL, WINDOWED])
def test_varlen_attends_to_the_keys_of_the_pages(
    step: tuple[Tensor, Tensor, Spans], rule: AttentionRule, assert_close: Callable[..., None]
) -> None:
    q, pool, spans = step
    library = attend_by_varlen(varlen, *spans, LAYOUT, CPU)
    no_lists: Any = None
    found = attend_pages(q, pool, no_lists, no_lists, no_lists, LAYOUT, LAYER, rule, library)
    assert_close(found, by_reference(q, pool, spans, rule))


def test_older_versions_of_varlen_get_what_they_know(
    step: tuple[Tensor, Tensor, Spans], assert_close: Callable[..., None]
) -> None:
    q, pool, spans = step
    assert not has_windows(older_varlen)
    found = attend_by_varlen(older_varlen, *spans, LAYOUT, CPU)(q, pool, LAYER, FULL)
    assert_close(found, by_reference(q, pool, spans, FULL))


def test_the_installed_torch_s_varlen_has_the_arguments_that_it_is_given() -> None:
    """Positions and names; only a GPU can call it."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == list(inspect.signature(varlen).parameters)[:7]
    assert {"window_size", "is_causal"} & set(names)


def test_flashinfer_plans_each_rule_of_a_step_once(
    step: tuple[Tensor, Tensor, Spans], assert_close: Callable[..., None]
) -> None:
    q, pool, spans = step
    wrappers: list[Wrapper] = []

    @cache
    def wrapper_of(_rule: AttentionRule) -> Wrapper:
        wrappers.append(Wrapper())
        return wrappers[-1]

    for _ in range(2):
        library = attend_by_flashinfer(wrapper_of, torch.float32, *spans, LAYOUT, CPU)
        for rule in (FULL, CAPPED, FULL):
            assert_close(library(q, pool, LAYER, rule), by_reference(q, pool, spans, rule))
    assert len(wrappers) == 2


def choose(**changed: Any) -> tuple[Any, str | None]:
    asked = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "layout": LAYOUT, "rules": frozenset([FULL])}
    return choose_prompt_attention(**(asked | {"is_exact": False, "has_sinks": False} | changed))


def test_ours_serves_unless_a_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORABATCH_PROMPT_ATTENTION", raising=False)
    assert choose() == (None, None)
    monkeypatch.setenv("LORABATCH_PROMPT_ATTENTION", "varlen")
    found, problem = choose()
    assert (found.func, problem) == (attend_by_varlen, None)


@pytest.mark.parametrize(
    ("asked", "changed", "reason"),
    [
        ("fa4", {}, "must be one of own, varlen, flashinfer"),
        ("varlen", {"device": CPU}, "needs a GPU"),
        ("varlen", {"is_exact": True}, "mode exact"),
        ("varlen", {"has_sinks": True}, "no attention sinks"),
        ("flashinfer", {"dtype": torch.float32}, "16 bits, not in torch.float32"),
        ("flashinfer", {"layout": PageLayout(4, 2, 20, 3, 4)}, "heads of 20 numbers"),
        ("varlen", {"rules": frozenset([CAPPED])}, "no cap of scores"),
        ("flashinfer", {}, "not installed here"),
    ],
)
def test_where_a_library_cannot_serve_ours_does_and_the_reason_is_said(
    asked: str, changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORABATCH_PROMPT_ATTENTION", asked)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found, problem = choose(**changed)
    assert found is None
    assert problem is not None
    assert asked in problem
    assert reason in problem
    assert "the own kernel serves" in problem


def test_windows_need_a_version_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABATCH_PROMPT_ATTENTION", "varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older_varlen)
    assert choose(rules=frozenset([FULL]))[0] is not None
    found, problem = choose(rules=frozenset([FULL, WINDOWED]))
    assert found is None
    assert "no sliding windows" in (problem or "")
