"""The generic decoder of the Llama-shaped families: one forward pass over a step.

Legend: T tokens of the step, H query heads, K key/value heads, D head_dim. `pool` is the flat page memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from ..kernels.paged_attention.cpu import paged_attention
from ..kernels.rms_norm import rms_norm
from ..kernels.rotary import rotary_tables, rotate_
from ..kernels.segment_lora import LoraSegment, add_lora_
from .config import ModelConfig
from .errors import UnsupportedModelError
from .linear import Linear
from .packed_sites import PACKED_SITES, packed_members
from .rope import rotary_frequencies
from .step_batch import AdapterSpan, StepBatch


@dataclass(slots=True)
class DecoderLayer:
    """One layer: packed linear layers by site and its norms by checkpoint name below the layer."""

    linears: dict[str, Linear]
    prefix: str


class Decoder:
    """Base model with live weights. `tensors` holds what is not a packed linear layer, by checkpoint name."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], *, is_packed: bool) -> None:
        self.model = model
        self.layers = [
            DecoderLayer(
                {site: _packed_linear(model, weights, layer, site, is_packed) for site in PACKED_SITES},
                f"model.layers.{layer}.",
            )
            for layer in range(model.num_layers)
        ]
        embeddings = weights["model.embed_tokens.weight"]
        head = embeddings if model.is_tied else weights.pop("lm_head.weight")
        self.lm_head = Linear(head, None, is_packed=is_packed)
        self.tensors = dict(weights)
        frequencies, self._attention_factor = rotary_frequencies(model)
        self._frequencies = frequencies.to(embeddings.device)
        self._dtype = embeddings.dtype
        if model.activation not in ("silu", "gelu_pytorch_tanh"):
            raise UnsupportedModelError(
                f"config.json hidden_act={model.activation!r}: not supported. Supported: silu, gelu_pytorch_tanh."
            )

    def forward(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Logits of the sampled rows, [num_sampled, vocab_size]; stores the step's keys and values in `pool`."""
        x = self.tensors["model.embed_tokens.weight"][batch.token_ids]  # [T, hidden]
        angles = batch.positions.float()[:, None] * self._frequencies
        rotary = rotary_tables(angles, self._attention_factor, self._dtype)
        kv_rows = batch.kv_rows.clone()
        for index, layer in enumerate(self.layers):
            x += self._attend(x, layer, index, batch, pool, rotary, kv_rows)
            x += self._mlp(x, layer, index, batch)
            kv_rows += batch.kv_layer_stride
        last = x.index_select(0, batch.sampled_rows)
        return self.lm_head(self._norm(last, "model.norm.weight"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.tensors[name], self.model.norm_eps)

    def _attend(
        self,
        x: Tensor,
        layer: DecoderLayer,
        index: int,
        batch: StepBatch,
        pool: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_rows: Tensor,
    ) -> Tensor:
        model = self.model
        h = self._norm(x, layer.prefix + "input_layernorm.weight")
        qkv = _linear(layer, "qkv", h, index, batch.spans).view(
            len(x), model.num_heads + 2 * model.num_kv_heads, model.head_dim
        )
        rotated = qkv[:, : model.num_heads + model.num_kv_heads]
        if model.has_qk_norm:
            q, k = rotated[:, : model.num_heads], rotated[:, model.num_heads :]
            q.copy_(self._norm(q, layer.prefix + "self_attn.q_norm.weight"))
            k.copy_(self._norm(k, layer.prefix + "self_attn.k_norm.weight"))
        rotate_(rotated, *rotary)
        stored = qkv[:, model.num_heads :].reshape(-1, model.head_dim)  # [T * 2K, D]
        pool.view(-1, model.head_dim).index_copy_(0, kv_rows.view(-1), stored)
        plan = batch.attention[model.sliding_windows[index]]
        attended = paged_attention(
            qkv[:, : model.num_heads], pool, plan, index, model.num_kv_heads, model.head_dim**-0.5
        )
        return _linear(layer, "o", attended, index, batch.spans)

    def _mlp(self, x: Tensor, layer: DecoderLayer, index: int, batch: StepBatch) -> Tensor:
        h = self._norm(x, layer.prefix + "post_attention_layernorm.weight")
        gate, up = _linear(layer, "gate_up", h, index, batch.spans).chunk(2, dim=-1)
        active = silu(gate) if self.model.activation == "silu" else gelu(gate, approximate="tanh")
        return _linear(layer, "down", active.mul_(up), index, batch.spans)


def _linear(layer: DecoderLayer, site: str, x: Tensor, index: int, spans: tuple[AdapterSpan, ...]) -> Tensor:
    """Packed linear layer with the unmerged LoRA of every adapter of the step."""
    y = layer.linears[site](x)
    if spans:
        add_lora_(y, x, [LoraSegment(s.start, s.end, s.adapter.sites[index].get(site)) for s in spans])
    return y


def _packed_linear(model: ModelConfig, weights: dict[str, Tensor], layer: int, site: str, is_packed: bool) -> Linear:
    """Join the members' weights (taken out of `weights`) into one layer."""
    modules = [member.module for member in packed_members(model, layer, site)]
    weight = torch.cat([weights.pop(f"{module}.weight") for module in modules])
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    assert len(biases) in (0, len(modules)), f"{site}: {len(biases)} of {len(modules)} members have a bias"
    return Linear(weight, torch.cat(biases) if biases else None, is_packed=is_packed)
