"""Computes one forward pass by GPU kernels: LoRA, heads, residuals and activations are fused with the products.

Legend: T tokens of the step, H query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.invariant_linear import invariant_linear
from ...kernels.launch import beside
from ...kernels.layouts.lora_table import CHUNK_RANK, LoraTable
from ...kernels.layouts.pages import PageLayout
from ...kernels.lora_gate_up import Activation, lora_gate_up
from ...kernels.lora_qkv import HeadFinish, lora_qkv_
from ...kernels.lora_residual import lora_residual_
from ...kernels.lora_shrink import lora_shrink
from ...kernels.paged_attention import AttentionRule, allocate_partials, attend_pages
from ...kernels.rms_norm.fused import add_rms_norm
from ..errors import EngineError
from ..model_config.model import ModelConfig
from ..model_config.names import COMMON_SITES, PackedSite
from .decoder import Decoder
from .gpu_step import GpuStep
from .layers import DecoderLayer, Linear
from .rope import Rope

_SITE_NUMBERS = {site: number for number, site in enumerate(COMMON_SITES)}
_FUSED_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of a forward pass besides weights: the adapters' table (and through it the pool) and scratch. One step
    runs at a time.
    """

    table: LoraTable
    layout: PageLayout
    scratch: Tensor
    partials: tuple[Tensor, Tensor]

    @classmethod
    def allocate(cls, layout: PageLayout, table: LoraTable, scratch_rows: int, max_partials: int) -> GpuMemory:
        """Scratch of `scratch_rows` rows of 16 numbers, and room for `max_partials` pieces of contexts."""
        device = table.pool.device
        scratch = torch.empty(scratch_rows, CHUNK_RANK, dtype=torch.float32, device=device)
        partials = allocate_partials(max_partials, layout.num_heads, layout.head_dim, device)
        return cls(table, layout, scratch, partials)


def check_on_gpu(model: ModelConfig) -> None:
    """Raises `EngineError` for a model that GPU kernels do not compute."""
    asks = {
        "layers of the gated delta rule": model.has_recurrent_layers,
        "inputs of each layer": model.names.layer_inputs is not None,
        "gates of attention's output": any(
            layer.attention.has_output_gate for layer in model.layers if layer.attention
        ),
        "neighbouring features rotated together": model.has_interleaved_rope,
        "attention and MLP side by side": model.is_parallel,
        "norms of queries and keys over all heads": model.head_norm in ("whole", "own_head"),
        "norms of queries and keys behind their rotation": model.head_norm == "rotated_head",
    }
    asks["layers of several sizes"] = not (model.is_uniform or any(asks.values()))
    found = [what for what, is_asked in asks.items() if is_asked]
    if found:
        raise EngineError(
            f"model_type={model.family!r}: has {' and '.join(found)}, which GPU kernels do not compute yet. Use CPU "
            "workers (--device cpu)."
        )


class GpuDecoder(Decoder):
    """A decoder that computes prepared steps (`gpu_step`)."""

    merges_by_kernel = True

    def quantize(self) -> None:
        """Hold the layers' linear weights in floating point numbers of 8 bits from now on, and multiply in them."""
        for layer in self.layers:
            for linear in layer.linears.values():
                linear.quantize()

    def fix_products(self) -> None:
        """Multiply so that a row's bits depend on that row alone, from now on."""
        for linear in self._all_linears():
            linear.multiply = invariant_linear

    def _all_linears(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer.linears.values()), *self.linears.values()]

    def weight_addresses(self) -> tuple[int, ...]:
        """Addresses of the live weights, at which captured graphs read them."""
        linears = self._all_linears()
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return (
            *(linear.address for linear in linears),
            *(tensor.data_ptr() for tensor in (*biases, *self.tensors.values())),
        )

    def forward_step(self, step: GpuStep, memory: GpuMemory) -> Tensor:
        """Logits of the rows that are asked for them, [num_logits, vocab_size]; stores keys and values of the step in
        the pool, and the hidden states of pooled rows in `states`.
        """
        return self.logits(self.forward_to_head(step, memory))

    def forward_to_head(self, step: GpuStep, memory: GpuMemory) -> Tensor:
        """The rows that are asked for logits as the head reads them, [num_logits, hidden]; stores what `forward_step`
        does.
        """
        x = self._embed(step.token_ids, step.positions)  # [T, hidden]
        rotaries = [self._angles(rope, step) for rope in self._ropes]
        no_angles = torch.empty(len(x), 0, dtype=torch.float32, device=x.device)
        for layer in self.layers:
            norms = layer.norms
            angles = (no_angles, no_angles) if layer.rope is None else rotaries[layer.rope]
            attended = self._attend_pages(self._norm(x, norms.before_attention), layer, step, memory, angles)
            if step.sampled_segments is not None and layer is self.layers[-1]:
                # what other rows would give here is read by nothing
                x, attended = (rows.index_select(0, step.sampled_rows) for rows in (x, attended))
                step = replace(step, segments=step.sampled_segments)
                if not len(x):
                    return self._outputs(x, 0)
            x = self._join(x, attended, "o", norms.attention_output, layer, step, memory)
            x = self._norm(x, norms.after_attention)
            active = self._activate(self._norm(x, norms.before_mlp), layer, step, memory)
            x = self._join(x, active, "down", norms.mlp_output, layer, step, memory)
            x = self._norm(x, norms.after_mlp)
        x = x if step.sampled_segments is not None else x.index_select(0, step.sampled_rows)
        return self._outputs(x, len(x) - step.num_pooled)

    @staticmethod
    def _angles(rope: Rope, step: GpuStep) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the step's rows, each [T, F]."""
        cos, sin = rope.tables(step.positions, step.row_lengths, torch.float32)
        return cos.flatten(1).contiguous(), sin.flatten(1).contiguous()

    def _norm(self, x: Tensor, module: str | None) -> Tensor:
        """RMS norms in one kernel."""
        if module is None or self.model.norm_kind in ("layer", "layer_no_bias"):
            return super()._norm(x, module)
        offset = 1.0 if self.model.norm_kind == "rms_from_zero" else 0.0
        return add_rms_norm(x, None, self.tensors[f"{module}.weight"], self.model.norm_eps, offset)

    def _attend_pages(
        self, h: Tensor, layer: DecoderLayer, step: GpuStep, memory: GpuMemory, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        model, table, norms = self.model, memory.table, layer.norms
        y = self._product(h, "qkv", layer, step, memory)
        finish = HeadFinish(
            *angles,
            step.slots,
            q_norm=None if norms.query is None else self.tensors[f"{norms.query}.weight"],
            k_norm=None if norms.key is None else self.tensors[f"{norms.key}.weight"],
            norm_eps=model.norm_eps,
            norm_offset=1.0 if model.norm_kind == "rms_from_zero" else 0.0,
        )
        q = lora_qkv_(y, finish, memory.layout, table, step.segments, memory.scratch, layer.index)
        if model.query_growth is not None:
            q *= self._query_factors(step.positions)
        rule = AttentionRule(model.attention_scale, model.sliding_windows[layer.index], model.attention_softcap)
        return attend_pages(
            q, table.pool, step.block_tables, step.attention, memory.partials, memory.layout, layer.index, rule,
            step.library, self._sinks(layer),
        )  # fmt: skip

    def _activate(self, h: Tensor, layer: DecoderLayer, step: GpuStep, memory: GpuMemory) -> Tensor:
        y = self._product(h, "gate_up", layer, step, memory)
        fused = _FUSED_ACTIVATIONS.get(self.model.activation) if self.model.has_gate else None
        place = (memory.table, step.segments, memory.scratch, layer.index)
        if fused is not None:
            return lora_gate_up(y, None, fused, *place)
        return self._activation(lora_residual_(y, None, None, *place, _SITE_NUMBERS["gate_up"])).contiguous()

    def _join(
        self,
        x: Tensor,
        h: Tensor,
        site: PackedSite,
        norm: str | None,
        layer: DecoderLayer,
        step: GpuStep,
        memory: GpuMemory,
    ) -> Tensor:
        """The residual stream after a layer's output: in one kernel unless a norm or a sum stands between them."""
        y = self._product(h, site, layer, step, memory)
        place = (memory.table, step.segments, memory.scratch, layer.index, _SITE_NUMBERS[site])
        if norm is None and self._sums is None and self.model.residual_scale == 1.0:
            return lora_residual_(y, x, None, *place)
        return self._added(x, self._norm(self._added_up(lora_residual_(y, None, None, *place)), norm))

    def _product(self, h: Tensor, site: PackedSite, layer: DecoderLayer, step: GpuStep, memory: GpuMemory) -> Tensor:
        """The base product, and beside it LoRA's first half, which goes to scratch, where the kernel that reads the
        product finds it.
        """
        if not step.has_lora:
            return layer.linears[site](h)
        with beside(h.device) as join:
            lora_shrink(h, memory.table, step.segments, memory.scratch, layer.index, _SITE_NUMBERS[site])
        y = layer.linears[site](h)
        join()
        return y
