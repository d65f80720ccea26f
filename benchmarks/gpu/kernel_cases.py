"""Each kernel at the sizes of one decode layer, with the bytes and flops that it cannot avoid, and its plain twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lorabatch.benchmarks.gpu.layer import DecodeLayer
from lorabatch.kernels.layouts.lora_table import DOWN, GATE_UP, QKV
from lorabatch.kernels.lora_gate_up import lora_gate_up
from lorabatch.kernels.lora_gate_up import reference as gate_up_reference
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_residual import reference as residual_reference
from lorabatch.kernels.lora_shrink import lora_shrink
from lorabatch.kernels.lora_shrink import reference as shrink_reference
from lorabatch.kernels.paged_attention import attend_pages
from lorabatch.kernels.paged_attention import reference as attention_reference
from lorabatch.kernels.rms_norm import reference as norm_reference
from lorabatch.kernels.rms_norm.fused import add_rms_norm
from lorabatch.kernels.sampling import SamplingRows, sample_tokens
from lorabatch.kernels.sampling import reference as sampling_reference


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`run` calls the kernel, `twin` its reference; both return what is compared. Kernels that work in place do so
    on the same buffer at every `run`, so only the first is comparable."""

    name: str
    num_bytes: float
    flops: float
    run: Callable[[], Tensor]
    twin: Callable[[], Tensor]


def kernel_cases(layer: DecodeLayer, ranks: list[int], context: int) -> list[KernelCase]:
    """Cases for the operators of `layer`, whose rows are dealt to adapters of `ranks`."""
    return [
        _shrink(layer, ranks),
        _gate_up(layer, ranks),
        _residual(layer, ranks),
        _attention(layer, context),
        _norm(layer),
        _sampling(layer, "top-p sampling", top_p=0.9, top_k=0),
        _sampling(layer, "top-k sampling", top_p=1.0, top_k=40),
    ]


def _like(layer: DecodeLayer, features: int) -> Tensor:
    pool = layer.table.pool
    return torch.randn(len(layer.finish.slots), features, device=pool.device).to(pool.dtype)


def _used_ranks(layer: DecodeLayer, ranks: list[int]) -> int:
    """Sum of the ranks of adapters that have rows: each is read once."""
    return sum(ranks[: len(layer.finish.slots)])


def _shrink(layer: DecodeLayer, ranks: list[int]) -> KernelCase:
    in_features, members = layer.shape.sites[QKV]
    x, item = _like(layer, in_features), layer.table.pool.element_size()
    rank_rows = _used_ranks(layer, ranks) * len(members)

    def run(shrink: Callable[..., None], scratch: Tensor) -> Tensor:
        shrink(x, layer.table, layer.segments, scratch, 0, QKV)
        return scratch

    layer.scratch.zero_()  # what no chunk fills is compared too
    return KernelCase(
        "LoRA shrink qkv",
        num_bytes=item * (rank_rows * in_features + x.numel()),
        flops=2.0 * len(x) * in_features * rank_rows / max(len(ranks), 1),
        run=lambda: run(lora_shrink, layer.scratch),
        twin=lambda: run(shrink_reference.shrink, torch.zeros_like(layer.scratch)),
    )


def _gate_up(layer: DecodeLayer, ranks: list[int]) -> KernelCase:
    in_features, members = layer.shape.sites[GATE_UP]
    y, x, item = _like(layer, sum(members)), _like(layer, in_features), layer.table.pool.element_size()
    lora_shrink(x, layer.table, layer.segments, layer.scratch, 0, GATE_UP)
    scratch = layer.scratch.clone()

    def twin() -> Tensor:
        out = torch.empty(len(y), members[0], dtype=torch.float64, device=y.device)
        gate_up_reference.gate_up(out, y, None, "silu", layer.table, layer.segments, scratch, 0)
        return out

    rank_sum = _used_ranks(layer, ranks)
    return KernelCase(
        "LoRA gate_up + silu",
        num_bytes=item * (rank_sum * sum(members) + y.numel() * 1.5),
        flops=2.0 * len(y) * sum(members) * rank_sum / max(len(ranks), 1),
        run=lambda: lora_gate_up(y, None, "silu", layer.table, layer.segments, scratch, 0),
        twin=twin,
    )


def _residual(layer: DecodeLayer, ranks: list[int]) -> KernelCase:
    in_features, (out_features,) = layer.shape.sites[DOWN]
    y, x, item = _like(layer, out_features), _like(layer, in_features), layer.table.pool.element_size()
    residual = _like(layer, out_features)
    stream = residual.clone()
    lora_shrink(x, layer.table, layer.segments, layer.scratch, 0, DOWN)
    scratch = layer.scratch.clone()

    def twin() -> Tensor:
        out = torch.empty(y.shape, dtype=torch.float64, device=y.device)
        residual_reference.add_residual(out, y, residual, None, layer.table, layer.segments, scratch, 0, DOWN)
        return out

    rank_sum = _used_ranks(layer, ranks)
    return KernelCase(
        "LoRA down + residual",
        num_bytes=item * (rank_sum * out_features + 3 * y.numel()),
        flops=2.0 * len(y) * out_features * rank_sum / max(len(ranks), 1),
        run=lambda: lora_residual_(y, stream, None, layer.table, layer.segments, scratch, 0, DOWN),
        twin=twin,
    )


def _attention(layer: DecodeLayer, context: int) -> KernelCase:
    shape, pool = layer.shape, layer.table.pool
    q = _like(layer, shape.num_heads * shape.head_dim).view(-1, shape.num_heads, shape.head_dim)
    place = (pool, layer.block_tables, layer.work, layer.partials, shape.layout)

    def twin() -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        attention_reference.attend(out, q, *place, 0, layer.rule)
        return out.flatten(1)

    num_bytes = pool.element_size() * (2 * len(q) * context * shape.num_kv_heads * shape.head_dim + 2 * q.numel())
    flops = 4.0 * q.numel() * context
    return KernelCase(
        "attention decode", num_bytes, flops, lambda: attend_pages(q, *place, layer=0, rule=layer.rule), twin
    )


def _norm(layer: DecodeLayer) -> KernelCase:
    x, y, weight = _like(layer, layer.shape.hidden), _like(layer, layer.shape.hidden), layer.norms[0]
    stream = x.clone()
    return KernelCase(
        "RMSNorm + residual",
        num_bytes=4.0 * x.numel() * x.element_size(),
        flops=0.0,
        run=lambda: add_rms_norm(stream, y, weight, 1e-5),
        twin=lambda: norm_reference.norm(x.clone(), y, weight, 1e-5, 0.0),
    )


def _sampling(layer: DecodeLayer, name: str, *, top_p: float, top_k: int) -> KernelCase:
    logits = _like(layer, layer.shape.vocab)
    count, device = len(logits), logits.device
    streams = torch.arange(count, device=device)
    rows = SamplingRows(
        temperature=torch.full((count,), 0.7, device=device),
        top_k=torch.full((count,), top_k, dtype=torch.int32, device=device),
        top_p=torch.full((count,), top_p, dtype=torch.float64, device=device),
        seeds=torch.zeros_like(streams),
        streams=streams,
        positions=torch.zeros_like(streams),
    )

    def twin() -> Tensor:
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        sampling_reference.sample(tokens, logits, rows)
        return tokens

    return KernelCase(
        name,
        num_bytes=float(logits.numel() * logits.element_size()),
        flops=0.0,
        run=lambda: sample_tokens(logits, rows),
        twin=twin,
    )
