"""What an MLP does between its two multiplications."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from ..kernels.gated import silu_gate
from .model_config import Activation, ModelConfig

Activate = Callable[[Tensor], Tensor]

_FUNCTIONS: Mapping[Activation, Activate] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


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
