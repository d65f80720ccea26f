"""Computes the layers of a decoder in one call of `kernels.decoder_layers`, where its family has such layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self
from weakref import ReferenceType, ref

from torch import Tensor

from ...kernels.decoder_layers import DecoderLayers, LayerParts, LayerShape
from ...kernels.packed_weight.panels import StoredWeight
from ...kernels.segment_lora import PreparedLora
from ..model_config.model import ModelConfig
from ..model_config.names import LayerNorms
from .layers import DecoderLayer
from .step_batch import StepBatch


class CompiledLayers:
    """The layers of a decoder, with the weights that they have at each step."""

    def __init__(self, model: ModelConfig, layers: Sequence[DecoderLayer], tensors: Mapping[str, Tensor]) -> None:
        self._model, self._layers, self._tensors = model, layers, tensors
        self._names = [f"{norm}.weight" for layer in layers for norm in _norms_of(layer.norms) if norm]
        self._names += [layer.sinks for layer in layers if layer.sinks]
        # Weak: weights that are replaced are freed at once, layer by layer.
        self._weights: list[ReferenceType[object] | None] = []
        self._compiled: DecoderLayers | None = None

    @classmethod
    def of(cls, model: ModelConfig, layers: Sequence[DecoderLayer], tensors: Mapping[str, Tensor]) -> Self | None:
        """The layers, or None where compiled kernels do not know layers of this family. `tensors`: by checkpoint name;
        they may be replaced between two steps, as may the layers' weights.
        """
        norms = model.names.norms
        is_known = (
            model.is_uniform
            and model.norm_kind == "rms"
            and model.activation == "silu"
            and model.has_gate
            and norms.before_attention is not None
            and norms.before_mlp is not None
            and (norms.query is None or model.head_norm == "head")
            and not (model.is_parallel or model.has_interleaved_rope)
            and (model.residual_scale, model.query_growth) == (1.0, None)
            and (norms.query is None) == (norms.key is None)
            and norms.attention_output is norms.after_attention is norms.mlp_output is norms.after_mlp is None
        )
        return cls(model, layers, tensors) if is_known else None

    def forward_(
        self,
        x: Tensor,
        batch: StepBatch,
        pool: Tensor,
        rotaries: Sequence[tuple[Tensor, Tensor]],
        lora: PreparedLora,
        add_up: Callable[[Tensor], Tensor] | None,
    ) -> int:
        """Take `x` [T, hidden] through the first layers, in place; returns how many: all, or all but the last where it
        goes on with fewer rows. `add_up`: the sum of what members of a group give.
        """
        spans, tables = batch.attention[0, self._model.sliding_windows[0]].spans, lora.tables
        if spans is None or tables is None:
            return 0
        compiled = self._with_live_weights()
        if compiled is None:
            return 0
        num_layers = len(self._layers) - (batch.asked is not None)
        compiled.forward_(x, num_layers, rotaries, pool, batch.key_places[0], spans, tables, add_up)
        return num_layers

    def _with_live_weights(self) -> DecoderLayers | None:
        linears = [linear for layer in self._layers for linear in layer.linears.values()]
        weights: list[object] = [part for linear in linears for part in (linear.packed, linear.bias)]
        weights += [self._tensors[name] for name in self._names]
        if len(weights) != len(self._weights) or not all(map(_is_still, self._weights, weights)):
            self._weights = [None if weight is None else ref(weight) for weight in weights]
            self._compiled = self._made()
        return self._compiled

    def _made(self) -> DecoderLayers | None:
        """The layers with their live weights; None where compiled kernels cannot read one of these."""
        model = self._model
        layers = []
        for layer in self._layers:
            linears = [(linear.packed, linear.bias) for linear in layer.linears.values()]
            stored = [(weight, bias) for weight, bias in linears if isinstance(weight, StoredWeight)]
            if len(stored) < len(linears):
                return None
            norms = [None if norm is None else self._tensors[f"{norm}.weight"] for norm in _norms_of(layer.norms)]
            before_attention, before_mlp, query, key = norms
            assert before_attention is not None, "no norm before attention"
            assert before_mlp is not None, "no norm before the MLP"
            window = model.sliding_windows[layer.index]
            sinks = self._tensors[layer.sinks] if layer.sinks else None
            layers.append(LayerParts(stored, before_attention, before_mlp, query, key, layer.rope, window, sinks))
        shape = LayerShape(
            model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size,
            model.norm_eps, model.attention_scale, model.attention_softcap or 0.0,
        )  # fmt: skip
        return DecoderLayers(shape, layers)


def _is_still(reference: ReferenceType[object] | None, weight: object) -> bool:
    """Whether the weight is what it was. One that is gone was not None."""
    return weight is None if reference is None else weight is not None and reference() is weight


def _norms_of(norms: LayerNorms) -> tuple[str | None, ...]:
    return norms.before_attention, norms.before_mlp, norms.query, norms.key
