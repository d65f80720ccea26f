"""One decoder layer on the device, one step: base products by torch, everything else by the kernels.

A decode step is what the engine runs per layer in a graph: LoRA's first half beside the base product, contexts split
where the engine splits them. So a step of the engine is `num_layers` times it plus the head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from lorabatch.benchmarks.gpu.adapters import random_table
from lorabatch.benchmarks.gpu.shapes import PAGE_TOKENS, ModelShape
from lorabatch.engine.runner.gpu_plan import DECODE_TILE_ROWS, PREFILL_TILE_ROWS, split_keys_of
from lorabatch.engine.runner.gpu_runner import full_rows_of
from lorabatch.kernels.launch import beside
from lorabatch.kernels.layouts.lora_table import DOWN, GATE_UP, O_PROJ, QKV, LoraTable
from lorabatch.kernels.layouts.segments import SegmentLimits, Segments, plan_segments
from lorabatch.kernels.lora_gate_up import lora_gate_up
from lorabatch.kernels.lora_qkv import HeadFinish, lora_qkv_
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_shrink import lora_shrink
from lorabatch.kernels.merge import LoraPair, MergeJob
from lorabatch.kernels.paged_attention import AttentionRule, allocate_partials, attend_pages
from lorabatch.kernels.paged_attention.work import AttentionWork, Span, WorkLimits, plan_attention, tile_rows_for
from lorabatch.kernels.rms_norm.fused import add_rms_norm

_EPS = 1e-5
_SPLITS = 16  # of a contraction at most: scratch does not limit them, as in an engine


class StepLayer:
    """Weights, pages and step metadata of one layer for `batch` sequences of `context` tokens, of which the step
    computes the last `new_tokens`: one in decode, all of a prompt.

    `ranks`: one adapter each, sequences are dealt to them in turn; no ranks: the base model alone, without shrinks.
    """

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        context: int,
        ranks: list[int],
        dtype: torch.dtype,
        device: torch.device,
        num_programs: int,
        new_tokens: int = 1,
    ) -> None:
        self.shape, self.has_lora = shape, bool(ranks)
        self.batch, self.context, self.new_tokens = batch, context, new_tokens
        pages = -(-context // PAGE_TOKENS)
        self.table = random_table(shape, ranks, batch * pages, dtype, device)
        self.weights = [
            torch.empty(sum(members), n, dtype=dtype, device=device).normal_(0, n**-0.5) for n, members in shape.sites
        ]
        self.norms = torch.ones(2, shape.hidden, dtype=dtype, device=device)
        residents = np.arange(batch, dtype=np.int32) % len(ranks) if ranks else np.full(batch, -1, np.int32)
        tile_rows = DECODE_TILE_ROWS if new_tokens == 1 else PREFILL_TILE_ROWS
        self.segments = _segments(self.table, residents.repeat(new_tokens), num_programs, tile_rows, device)
        self.scratch = self.segments.allocate_scratch()
        order = torch.randperm(batch * pages).to(torch.int32).view(batch, pages)
        self.block_tables = order.to(device)
        positions = torch.arange(context - new_tokens, context)
        slots = (order[:, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).flatten()
        angles = torch.rand(len(slots), shape.head_dim // 2, device=device)
        self.finish = HeadFinish(angles.cos(), angles.sin(), slots.int().to(device))
        self.work = _attention_work(shape, batch, context, new_tokens, dtype, device)
        self.partials = allocate_partials(self.work.limits.max_items, shape.num_heads, shape.head_dim, device)
        self.rule = AttentionRule(shape.head_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer for the residual stream `x` [batch * new_tokens, hidden], which is kept."""
        x = x.clone()
        h = add_rms_norm(x, None, self.norms[0], _EPS)
        y = self._linear(h, QKV)
        q = lora_qkv_(y, self.finish, self.shape.layout, self.table, self.segments, self.scratch, 0)
        pool = self.table.pool
        h = attend_pages(
            q, pool, self.block_tables, self.work, self.partials, self.shape.layout, layer=0, rule=self.rule
        )
        y = self._linear(h, O_PROJ)
        x = lora_residual_(y, x, None, self.table, self.segments, self.scratch, 0, O_PROJ)
        h = add_rms_norm(x, None, self.norms[1], _EPS)
        y = self._linear(h, GATE_UP)
        h = lora_gate_up(y, None, "silu", self.table, self.segments, self.scratch, 0)
        y = self._linear(h, DOWN)
        return lora_residual_(y, x, None, self.table, self.segments, self.scratch, 0, DOWN)

    def merge_jobs(self, resident: int) -> tuple[list[Tensor], list[MergeJob]]:
        """Buffers for weights with one adapter merged in, and the jobs that fill them."""
        live = [torch.empty_like(weight) for weight in self.weights]
        jobs = []
        for site, (base, merged) in enumerate(zip(self.weights, live, strict=True)):
            for a, b, scale, columns in self._pairs(resident, site):
                jobs.append(MergeJob(merged[columns], base[columns], (LoraPair(a, b, scale),)))
        return live, jobs

    def without_lora(self, weights: list[Tensor]) -> None:
        """Serve every row by `weights` alone from now on."""
        self.weights, self.has_lora = weights, False
        residents = np.full(len(self.finish.slots), -1, np.int32)
        self.segments = _segments(self.table, residents, 1, self.segments.limits.tile_rows, self.scratch.device)

    def _linear(self, h: Tensor, site: int) -> Tensor:
        if not self.has_lora:
            return linear(h, self.weights[site])
        with beside(h.device) as join:
            lora_shrink(h, self.table, self.segments, self.scratch, 0, site)
        y = linear(h, self.weights[site])
        join()
        return y

    def _pairs(self, resident: int, site: int) -> list[tuple[Tensor, Tensor, float, slice]]:
        """A, B, scale and output rows of each linear layer of a site; chunks joined again."""
        in_features = self.shape.sites[site][0]
        first, count = self.table.sites[resident, 0, site].tolist()[:2]
        joined: dict[int, list[tuple[Tensor, Tensor, float, slice]]] = {}
        for index in range(first, first + count):
            a_at, b_at, rows, column, width = self.table.chunks[index].tolist()
            a = self.table.pool[a_at : a_at + rows * in_features].view(rows, in_features)
            b = self.table.pool[b_at : b_at + rows * width].view(rows, width)
            columns = slice(column, column + width)
            joined.setdefault(column, []).append((a, b, float(self.table.scales[index]), columns))
        return [
            (torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]).t().contiguous(), *pieces[0][2:])
            for pieces in joined.values()
        ]


def _segments(
    table: LoraTable, residents: np.ndarray, num_programs: int, tile_rows: int, device: torch.device
) -> Segments:
    counts = table.sites[:, 0, :, 1].cpu().numpy().astype(np.int32)
    num_rows = len(residents)
    most = int(counts.max(initial=1)) * num_rows
    limits = SegmentLimits(num_rows, most, scratch_rows=max(most, 1) * _SPLITS, tile_rows=tile_rows)
    host = plan_segments(residents, np.full(num_rows, -1, np.int32), counts, limits, num_programs)
    return Segments(limits, host.buffer.to(device))


def _attention_work(
    shape: ModelShape, batch: int, context: int, new_tokens: int, dtype: torch.dtype, device: torch.device
) -> AttentionWork:
    is_decode = new_tokens == 1
    contexts = np.full(batch if is_decode else 0, context, np.int64)
    split_keys = split_keys_of(contexts, full_rows_of(device, shape.num_kv_heads))
    items = batch * (new_tokens + (context // split_keys if split_keys else 0))
    limits = WorkLimits(items, batch, tile_rows_for(shape.layout, dtype, is_decode), split_keys)
    spans = [Span(row * new_tokens, new_tokens, context - new_tokens, row) for row in range(batch)]
    host = plan_attention(spans, shape.layout.queries_per_key_head, limits)
    return AttentionWork(limits, host.buffer.to(device))
