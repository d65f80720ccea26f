"""The layers of a decoder: linear layers with replaceable weights, activations and norms.

A linear layer's `pristine` weight is never written to. On CPU in fp32 the layer computes with a packed copy; replacing
means packing another weight, restoring means taking the packed pristine copy again. Elsewhere the layer computes with
`pristine` itself until the first replacement, then with a live buffer of a fixed address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, relu, silu

from ...kernels.gated import silu_gate
from ...kernels.packed_weight import PackedWeight, pack
from ...kernels.rms_norm import rms_norm, rms_norm_from_zero
from ..model_config.model import Activation, ModelConfig

Activate = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor, str], Tensor]
_FUNCTIONS: Mapping[Activation, Activate] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class Linear:
    """`y = x W^T + bias`, `x` [num_tokens, in_features], W [out_features, in_features].

    `is_packed`: only for weights that `can_pack`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_packed: bool) -> None:
        self.pristine = weight
        self.pristine_bias = bias
        self.bias = bias
        self._live = weight
        self._packed_pristine: PackedWeight | None = pack(weight) if is_packed else None
        self._packed = self._packed_pristine

    @property
    def live(self) -> Tensor:
        """The weight in use, in the plain layout, [out_features, in_features]."""
        return self._live if self._packed is None else self._packed.dense()

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._live, self.bias) if self._packed is None else self._packed.multiply(x, self.bias)

    def live_buffer(self) -> Tensor:
        """The buffer that the layer computes with from now on, to be filled with a merged weight. Its address stays."""
        assert self._packed is None, "a packed weight has no plain buffer"
        self.bias = self.pristine_bias
        if self._live is self.pristine or self._live.shape != self.pristine.shape:
            self._live = torch.empty_like(self.pristine)
        return self._live

    def replace(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compute with `weight` (and `bias`) from now on."""
        self.bias = bias
        if self._packed is not None:
            self._packed = pack(weight)
            return
        if self._live is self.pristine or self._live.shape != weight.shape:
            # an adapter with a resized vocabulary has a head of another height
            self._live = torch.empty_like(weight)
        self._live.copy_(weight)

    def restore(self) -> None:
        """Compute with the pristine weight again."""
        self.bias = self.pristine_bias
        if self._packed is not None:
            self._packed = self._packed_pristine
        elif self._live.shape != self.pristine.shape:
            self._live = self.pristine
        elif self._live is not self.pristine:
            self._live.copy_(self.pristine)


def activation_of(model: ModelConfig) -> Activate:
    """From the packed output of the first layer, gate beside up [T, 2 * inner], to [T, inner].

    Without a gate the input is [T, inner] already.
    """
    function = _FUNCTIONS[model.activation]
    if not model.has_gate:
        return function
    if model.activation == "silu":
        return silu_gate

    def gated(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return function(gate).mul_(up)

    return gated


def norm_of(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Norm:
    """`norm(x, module)` over the last dimension of x, with the parameters of `module` in `tensors`."""
    eps = model.norm_eps
    if model.norm_kind == "layer":
        return lambda x, module: layer_norm(
            x, x.shape[-1:], tensors.get(f"{module}.weight"), tensors.get(f"{module}.bias"), eps
        )
    if model.norm_kind == "rms_from_zero":
        return lambda x, module: rms_norm_from_zero(x, tensors[f"{module}.weight"], eps)
    return lambda x, module: rms_norm(x, tensors[f"{module}.weight"], eps)
