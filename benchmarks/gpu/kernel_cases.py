"""Each kernel at the sizes of one layer of a step, with the bytes and flops it cannot avoid, and its plain twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.kernels.gated_delta import DeltaParameters, DeltaRows, DeltaSizes
from lorabatch.kernels.gated_delta import reference as delta_reference
from lorabatch.kernels.gated_delta.triton import walk_by_triton
from lorabatch.kernels.layouts.lora_table import DOWN, GATE_UP, O_PROJ, QKV
from lorabatch.kernels.lora_gate_up import lora_gate_up
from lorabatch.kernels.lora_gate_up import reference as gate_up_reference
from lorabatch.kernels.lora_qkv import lora_qkv_
from lorabatch.kernels.lora_qkv import reference as qkv_reference
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_residual import reference as residual_reference
from lorabatch.kernels.lora_shrink import lora_shrink
from lorabatch.kernels.lora_shrink import reference as shrink_reference
from lorabatch.kernels.paged_attention import AttentionRule, attend_pages
from lorabatch.kernels.paged_attention import reference as attention_reference
from lorabatch.kernels.rms_norm import reference as norm_reference
from lorabatch.kernels.rms_norm.fused import add_rms_norm
from lorabatch.kernels.sampling import SamplingRows, sample_tokens
from lorabatch.kernels.sampling import reference as sampling_reference


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel with inputs of the sizes of a step, and its reference."""

    #: Name in the results.
    name: str
    #: Bytes that the kernel cannot avoid moving.
    num_bytes: float
    #: Floating-point operations that the kernel cannot avoid.
    flops: float
    #: Calls the kernel and returns what is compared. A kernel that works in place does so on the same buffer at every
    #: call, so only the first result is comparable.
    run: Callable[[], Tensor]
    #: Calls the reference and returns what is compared.
    twin: Callable[[], Tensor]


def kernel_cases(layer: StepLayer, ranks: list[int]) -> list[KernelCase]:
    """Cases for the operators of `layer`, whose sequences are dealt to adapters of `ranks`; of a layer with prompts
    those that have other tiles there."""
    cases = [
        _shrink(layer, ranks),
        _qkv(layer, ranks),
        _attention(layer),
        _residual(layer, ranks, "o", O_PROJ),
        _gate_up(layer, ranks),
        _residual(layer, ranks, "down", DOWN),
        _windowed_attention(layer),
        _delta(layer),
    ]
    if layer.new_tokens > 1:
        return cases
    return [
        *cases,
        _norm(layer),
        _argmax(layer),
        _sampling(layer, "top-p sampling", top_p=0.9, top_k=0),
        _sampling(layer, "top-k sampling", top_p=1.0, top_k=40),
    ]


def _like(layer: StepLayer, features: int) -> Tensor:
    pool = layer.table.pool
    return torch.randn(len(layer.finish.slots), features, device=pool.device).to(pool.dtype)


def _used_ranks(layer: StepLayer, ranks: list[int]) -> int:
    """Sum of the ranks of adapters that have rows: each is read once."""
    return sum(ranks[: layer.batch])


def _shrink(layer: StepLayer, ranks: list[int]) -> KernelCase:
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


def _qkv(layer: StepLayer, ranks: list[int]) -> KernelCase:
    in_features, members = layer.shape.sites[QKV]
    y, x, item = _like(layer, sum(members)), _like(layer, in_features), layer.table.pool.element_size()
    lora_shrink(x, layer.table, layer.segments, layer.scratch, 0, QKV)
    place = layer.finish, layer.shape.layout, layer.table, layer.segments, layer.scratch.clone(), 0
    num_queries = layer.shape.num_heads * layer.shape.head_dim

    def twin() -> Tensor:
        out = y.clone()
        qkv_reference.qkv(out, *place)
        return out[:, :num_queries]

    rank_sum = _used_ranks(layer, ranks)
    return KernelCase(
        "LoRA qkv + rotation",
        num_bytes=item * (rank_sum * sum(members) + 2 * y.numel()),
        flops=2.0 * len(y) * sum(members) * rank_sum / max(len(ranks), 1),
        run=lambda: lora_qkv_(y, *place).flatten(1),
        twin=twin,
    )


def _gate_up(layer: StepLayer, ranks: list[int]) -> KernelCase:
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


def _residual(layer: StepLayer, ranks: list[int], name: str, site: int) -> KernelCase:
    in_features, (out_features,) = layer.shape.sites[site]
    y, x, item = _like(layer, out_features), _like(layer, in_features), layer.table.pool.element_size()
    residual = _like(layer, out_features)
    stream = residual.clone()
    lora_shrink(x, layer.table, layer.segments, layer.scratch, 0, site)
    scratch = layer.scratch.clone()

    def twin() -> Tensor:
        out = torch.empty(y.shape, dtype=torch.float64, device=y.device)
        residual_reference.add_residual(out, y, residual, None, layer.table, layer.segments, scratch, 0, site)
        return out

    rank_sum = _used_ranks(layer, ranks)
    return KernelCase(
        f"LoRA {name} + residual",
        num_bytes=item * (rank_sum * out_features + 3 * y.numel()),
        flops=2.0 * len(y) * out_features * rank_sum / max(len(ranks), 1),
        run=lambda: lora_residual_(y, stream, None, layer.table, layer.segments, scratch, 0, site),
        twin=twin,
    )


def _attention(layer: StepLayer) -> KernelCase:
    name = "attention decode" if layer.new_tokens == 1 else "attention prompts"
    return _attention_by(layer, name, layer.rule, None)


def _windowed_attention(layer: StepLayer) -> KernelCase:
    """With all that families add to it: a window of half the context, a softcap and sinks."""
    rule = AttentionRule(layer.rule.scale, window=max(1, layer.context // 2), softcap=5.0)
    sinks = torch.randn(layer.shape.num_heads, device=layer.table.pool.device)
    return _attention_by(layer, "windowed attention with softcap and sinks", rule, sinks)


def _attention_by(layer: StepLayer, name: str, rule: AttentionRule, sinks: Tensor | None) -> KernelCase:
    shape, pool = layer.shape, layer.table.pool
    q = _like(layer, shape.num_heads * shape.head_dim).view(-1, shape.num_heads, shape.head_dim)
    place = (pool, layer.block_tables, layer.work, layer.partials, shape.layout)

    def twin() -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        attention_reference.attend(out, q, *place, 0, rule, sinks)
        return out.flatten(1)

    # a query reads the keys before it, or those of its window; a row's keys are read once
    ends = torch.arange(layer.context - layer.new_tokens, layer.context, dtype=torch.float64) + 1
    keys = ends.clamp(max=rule.window or layer.context)
    read = layer.context - float((ends - keys)[0])
    stored = 2 * layer.batch * read * shape.num_kv_heads * shape.head_dim
    num_bytes = pool.element_size() * (stored + 2 * q.numel())
    flops = 4.0 * q.numel() * float(keys.mean())
    return KernelCase(name, num_bytes, flops, lambda: attend_pages(q, *place, layer=0, rule=rule, sinks=sinks), twin)


def _delta(layer: StepLayer) -> KernelCase:
    """The gated delta rule with the layer's heads: its key heads, and query heads as value heads."""
    shape, device, tokens = layer.shape, layer.table.pool.device, layer.new_tokens
    sizes = DeltaSizes(shape.num_kv_heads, shape.num_heads, shape.head_dim, shape.head_dim, taps=4)
    rows = DeltaRows(
        torch.arange(layer.batch + 1, device=device) * tokens,
        torch.arange(layer.batch, device=device) * sizes.state_elements,
        torch.zeros(layer.batch, dtype=torch.bool, device=device),
    )
    parameters = DeltaParameters(
        torch.randn(sizes.taps, sizes.channels, device=device),
        torch.linspace(0.0, 2.0, sizes.value_heads, device=device),
        torch.ones(sizes.value_heads, device=device),
        torch.ones(sizes.value_size, device=device),
        1e-6,
    )
    projected = _like(layer, sizes.projected)
    states = torch.randn(layer.batch * sizes.state_elements, device=device)
    state = sizes.num_values * sizes.key_size
    moved = projected.element_size() * (projected.numel() + layer.batch * tokens * sizes.num_values)
    return KernelCase(
        "gated delta rule",
        num_bytes=8.0 * states.numel() + moved,
        # of each number of a state: forget, look up, correct, look up
        flops=7.0 * layer.batch * tokens * state,
        run=lambda: walk_by_triton(projected, sizes, parameters, states, rows),
        twin=lambda: delta_reference.walk(projected.clone(), sizes, parameters, states.clone(), rows),
    )


def _norm(layer: StepLayer) -> KernelCase:
    x, y, weight = _like(layer, layer.shape.hidden), _like(layer, layer.shape.hidden), layer.norms[0]
    stream = x.clone()
    return KernelCase(
        "RMSNorm + residual",
        num_bytes=4.0 * x.numel() * x.element_size(),
        flops=0.0,
        run=lambda: add_rms_norm(stream, y, weight, 1e-5),
        twin=lambda: norm_reference.norm(x.clone(), y, weight, 1e-5, 0.0),
    )


def _argmax(layer: StepLayer) -> KernelCase:
    logits = _like(layer, layer.shape.vocab)
    return _choice("argmax", logits, _rows(logits, temperature=0.0, top_p=1.0, top_k=0), lambda: logits.argmax(-1))


def _sampling(layer: StepLayer, name: str, *, top_p: float, top_k: int) -> KernelCase:
    logits = _like(layer, layer.shape.vocab)
    rows = _rows(logits, temperature=0.7, top_p=top_p, top_k=top_k)
    return _choice(name, logits, rows, lambda: sample_tokens(logits, rows))


def _rows(logits: Tensor, *, temperature: float, top_p: float, top_k: int) -> SamplingRows:
    count, device = len(logits), logits.device
    streams = torch.arange(count, device=device)
    return SamplingRows(
        temperature=torch.full((count,), temperature, device=device),
        top_k=torch.full((count,), top_k, dtype=torch.int32, device=device),
        top_p=torch.full((count,), top_p, dtype=torch.float64, device=device),
        seeds=torch.zeros_like(streams),
        streams=streams,
        positions=torch.zeros_like(streams),
    )


def _choice(name: str, logits: Tensor, rows: SamplingRows, run: Callable[[], Tensor]) -> KernelCase:
    def twin() -> Tensor:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        sampling_reference.sample(tokens, logits, rows)
        return tokens

    return KernelCase(
        name,
        num_bytes=float(logits.numel() * logits.element_size()),
        flops=0.0,
        run=run,
        twin=twin,
    )
