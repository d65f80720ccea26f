"""Decoder layers as tensors, and as the records that compiled kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..native import ADDRESS, COUNT, NUMBER
from ..native.linears import LinearRecord
from ..packed_weight.panels import StoredWeight

_NONE = -1


class LayerShape(ctypes.Structure):
    """The sizes and constants that all layers of a model share; `LayerShape` of `cpu.c`."""

    _fields_ = (
        ("hidden", COUNT),
        ("num_heads", COUNT),
        ("num_kv_heads", COUNT),
        ("head_dim", COUNT),
        ("inner", COUNT),
        ("norm_eps", NUMBER),
        ("attention_scale", NUMBER),
        ("attention_softcap", NUMBER),
    )

    #: Features of the residual stream.
    hidden: int
    #: Query heads.
    num_heads: int
    #: Key heads, and value heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Features between the two products of the MLP.
    inner: int
    #: Number added to the mean square in norms.
    norm_eps: float
    #: Factor of attention scores.
    attention_scale: float
    #: Cap of attention scores; 0 for no cap.
    attention_softcap: float

    @property
    def num_activations(self) -> int:
        """Numbers of a token that live between the kernels of a layer."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return max(2 * (queries + keys), 3 * self.inner)


class LayerParts(NamedTuple):
    """The weights and constants of one layer."""

    #: Weights and biases of queries with keys and values, attention's output, gate with up, and the MLP's output.
    linears: Sequence[tuple[StoredWeight, Tensor | None]]
    #: Weight of the norm before attention, [hidden].
    attention_norm: Tensor
    #: Weight of the norm before the MLP, [hidden].
    mlp_norm: Tensor
    #: Weight of the norm of query heads, [head_dim]; None for no norm.
    query_norm: Tensor | None
    #: Weight of the norm of key heads, [head_dim]; None for no norm.
    key_norm: Tensor | None
    #: Number of the layer's rotary table among a step's; None for a layer that does not rotate.
    rotary: int | None
    #: Latest tokens that the layer attends to; None for all.
    window: int | None
    #: Attention sinks, fp32 [num_heads]; None for none.
    sinks: Tensor | None = None


class LayerRecord(ctypes.Structure):
    """`Layer` of `cpu.c`."""

    _fields_ = (
        ("linears", LinearRecord * 4),
        ("norms", ADDRESS * 4),
        ("sinks", ADDRESS),
        ("number", COUNT),
        ("rotary", COUNT),
        ("window", COUNT),
    )

    @classmethod
    def of(cls, number: int, layer: LayerParts) -> LayerRecord:
        """The record of layer `number`; valid as long as the tensors that `layer` names."""
        linears = (LinearRecord * 4)(*(weight.record(bias) for weight, bias in layer.linears))
        norms = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        addresses = (ADDRESS * 4)(*(None if norm is None else norm.data_ptr() for norm in norms))
        sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        rotary = _NONE if layer.rotary is None else layer.rotary
        return cls(linears, addresses, sinks, number, rotary, layer.window or 0)


class StepRecord(ctypes.Structure):
    """`LayerStep` of `cpu.c`."""

    _fields_ = (
        ("x", ADDRESS),
        ("num_tokens", COUNT),
        ("rotaries", ADDRESS),
        ("pool", ADDRESS),
        ("pool_type", COUNT),
        ("kv_rows", ADDRESS),
        ("kv_strides", ADDRESS),
        ("spans", ADDRESS),
        ("block_starts", ADDRESS),
        ("num_spans", COUNT),
        ("block_tokens", COUNT),
        ("num_threads", COUNT),
        ("tables", ADDRESS),
        ("num_tables", COUNT),
        ("y", ADDRESS),
        ("activations", ADDRESS),
        ("scratch", ADDRESS),
    )
