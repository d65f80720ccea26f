"""Computes layers of the gated delta rule on a CPU, whose states are in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.gated_delta import DeltaParameters, DeltaRows, gated_delta
from ..model_config.model import ModelConfig


class DeltaLayers:
    """The layers of a decoder that are of the gated delta rule. `tensors`: by checkpoint name; they may be replaced
    between two steps.
    """

    def __init__(self, model: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors
        # Tensors of the checkpoint that the parameters of each layer were made of, and these.
        self._parameters: dict[int, tuple[list[Tensor], DeltaParameters]] = {}

    def walk(self, projected: Tensor, layer: int, pool: Tensor, rows: DeltaRows) -> Tensor:
        """Outputs of the tokens in one layer, [T, num_values], from its projections [T, projected]; updates the rows'
        states in `pool` (flat).
        """
        sizes = self._model.layers[layer].delta
        assert sizes is not None, f"layer {layer} is not of the gated delta rule"
        of_layer = replace(rows, places=rows.places + self._model.state_starts[layer])
        return gated_delta(projected, sizes, self._parameters_of(layer), pool.view(torch.float32), of_layer)

    def _parameters_of(self, layer: int) -> DeltaParameters:
        below = f"{self._model.names.layers}.{layer}.{self._model.names.delta}"
        names = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        stored = [self._tensors[f"{below}.{name}"] for name in names]
        known = self._parameters.get(layer)
        if known is None or any(old is not new for old, new in zip(known[0], stored, strict=True)):
            conv, decay_log, step_bias, norm = (tensor.float() for tensor in stored)
            conv = conv.squeeze(1).t().contiguous()
            made = DeltaParameters(conv, decay_log, step_bias, norm, self._model.norm_eps)
            known = self._parameters[layer] = stored, made
        return known[1]
