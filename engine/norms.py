"""The norm of a family, by its kind. Parameters are looked up by name at each call: merging may replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.functional import layer_norm

from ..kernels.rms_norm import rms_norm, rms_norm_from_zero
from .model_config import ModelConfig

Norm = Callable[[Tensor, str], Tensor]


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
