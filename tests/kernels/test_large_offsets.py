"""A pool of more than 2^31 numbers, as an H200 has: what is behind them is found. Only places in use take memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.layouts.lora_table import DOWN, LoraTable
from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.layouts.segments import Segments
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_shrink import lora_shrink
from lorabatch.kernels.paged_attention import AttentionRule, allocate_partials, attend_pages
from lorabatch.kernels.paged_attention.reference import attend
from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention

BEHIND = (1 << 31) + 4096
LAYOUT = PageLayout(num_heads=2, num_kv_heads=1, head_dim=16, num_layers=1, page_tokens=4)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """fp16 zeros that the system hands out as they are touched."""
    if not is_interpreted():
        return torch.zeros(BEHIND + (1 << 16), dtype=torch.float16, device="cuda")
    # the interpreter works on CPU tensors in place and then copies each storage onto itself, all of it
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    return torch.from_numpy(np.zeros(BEHIND + (1 << 16), dtype=np.float16))


def test_chunks_behind_two_billion_numbers(
    pool: torch.Tensor, make_table: Callable[..., LoraTable], group: Callable[..., Segments], dtype: torch.dtype
) -> None:
    if dtype != torch.float16:
        pytest.skip("of 2-byte numbers a pool has most")
    near = make_table(DOWN, 24, [(0, 40)], [(20,)])
    pool[BEHIND : BEHIND + len(near.pool)] = near.pool
    chunks = near.chunks.clone()
    chunks[:, :2] += BEHIND
    far = replace(near, pool=pool, pool_fp32=pool.view(torch.float32), chunks=chunks)
    x, y = (torch.randn(3, n, device=pool.device).to(dtype) for n in (24, 40))
    found = []
    for table in (near, far):
        segments = group(table, [0, -1, 0])
        scratch = segments.allocate_scratch()
        lora_shrink(x, table, segments, scratch, 1, DOWN)
        found.append(lora_residual_(y.clone(), None, None, table, segments, scratch, 1, DOWN))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1][0], y[0])


def test_pages_behind_two_billion_numbers(pool: torch.Tensor, device: torch.device) -> None:
    page = BEHIND // LAYOUT.page_elements + 1
    keys, values, q = (torch.randn(4, heads, 16, device=device).half() for heads in (1, 1, 2))
    at = page * LAYOUT.page_elements
    stored = pool[at : at + LAYOUT.page_elements].view(2, 4, 16)
    stored.copy_(torch.stack((keys[:, 0], values[:, 0])))
    work = plan_attention([Span(0, 4, 0, 0)], 2, WorkLimits(4, 4, 16, 512))
    work = replace(work, buffer=work.buffer.to(device))
    partials = allocate_partials(4, 2, 16, device)
    tables = torch.tensor([[page]], dtype=torch.int32, device=device)
    found = attend_pages(q, pool, tables, work, partials, LAYOUT, 0, AttentionRule(0.25))
    small = stored.flatten().clone()
    expected = torch.empty(q.shape, dtype=torch.float64, device=device)
    attend(expected, q, small, tables * 0, work, partials, LAYOUT, 0, AttentionRule(0.25))
    assert (found.double() - expected.flatten(1)).abs().max() < 4e-3
