"""The plain twin of `DecoderLayers.forward_`: the operators of each layer one after the other, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..gated import silu_gate
from ..paged_attention.compiled import attend_spans
from ..paged_attention.types import SpanTable
from ..rms_norm import rms_norm
from ..rotary import rotate_and_store_
from ..segment_lora.cpu import SegmentTable
from .types import LayerParts, LayerShape


def forward(
    shape: LayerShape,
    layers: Sequence[LayerParts],
    x: Tensor,
    rotaries: Sequence[tuple[Tensor, Tensor]],
    pool: Tensor,
    places: tuple[Tensor, Tensor],
    spans: SpanTable,
    tables: Sequence[SegmentTable],
    add_up: Callable[[Tensor], Tensor] = lambda y: y,
) -> None:
    """Take `x` [T, hidden] through all `layers`, in place, and store their keys and values."""

    def linear(site: int, h: Tensor) -> Tensor:
        weight, bias = layers[site // 4].linears[site % 4]
        y = weight.multiply(h, bias)
        for table in tables:
            table.add_(y, h, site)
        return y

    for i, layer in enumerate(layers):
        heads = linear(4 * i, rms_norm(x, layer.attention_norm, shape.norm_eps)).view(len(x), -1, shape.head_dim)
        q, k = heads[:, : shape.num_heads], heads[:, shape.num_heads : -shape.num_kv_heads]
        for h, norm in ((q, layer.query_norm), (k, layer.key_norm)):
            if norm is not None:
                h.copy_(rms_norm(h, norm, shape.norm_eps))
        rotary = None if layer.rotary is None else rotaries[layer.rotary]
        rotate_and_store_(heads, rotary, pool, places, i, shape.num_heads)
        rule = layer.window, shape.attention_scale, shape.attention_softcap, layer.sinks
        x += add_up(linear(4 * i + 1, attend_spans(q, pool, spans, i, shape.num_kv_heads, *rule)))
        active = silu_gate(linear(4 * i + 2, rms_norm(x, layer.mlp_norm, shape.norm_eps)))
        x += add_up(linear(4 * i + 3, active))
