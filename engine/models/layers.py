"""The layers of a decoder: linear layers with replaceable weights, activations and norms.

A linear layer's `pristine` weight is never written to. On CPU in fp32 the layer has a packed copy, in the checkpoint's
own number format, and a plain one in fp32 once an adapter was merged into it; replacing means packing another weight,
restoring means taking the packed pristine copy again. Elsewhere the layer computes with `pristine` itself until the
first replacement, then with a live buffer of a fixed address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, relu, silu

from ...kernels.gated import silu_gate
from ...kernels.native.segments import SiteSegments
from ...kernels.packed_weight import PackedWeight, Products, pack
from ...kernels.packed_weight.blocks import BlockWeight
from ...kernels.packed_weight.fp8 import Fp8Weight, can_be_fp8
from ...kernels.packed_weight.panels import StoredWeight
from ...kernels.rms_norm import rms_norm, rms_norm_from_zero
from ..model_config.layer import LayerConfig
from ..model_config.model import Activation, ModelConfig
from ..model_config.names import LayerNorms, PackedSite

# Stands for the plain weight of a packed layer.
_NO_WEIGHT = torch.empty(0)
Activate = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor, str], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
#: Functions of the MLP, by name.
FUNCTIONS: Mapping[Activation, Activate] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


class Linear:
    """`y = x W^T + bias`, and the LoRA of a step's segments where they are given; `x` [num_tokens, in_features],
    W [out_features, in_features].

    `weight`: packed, or plain where torch or Triton multiply. `products`: how a packed weight is multiplied. Merged
    weights are never rounded to 8 bits, by more than what adapters change: they are multiplied in fp32, on a GPU in the
    type that the base's weights had.
    """

    def __init__(self, weight: Tensor | PackedWeight, bias: Tensor | None, products: Products | None = None) -> None:
        plain, packed = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        self._merged_products: Products = "float32" if products in (None, "int8") else products
        self._plain_pristine = _NO_WEIGHT if plain is None else plain
        self._live = self._plain_pristine
        self._packed_pristine = packed
        self._packed = packed
        self.pristine_bias = bias
        self.bias = bias
        #: Multiplies by a plain weight, as `torch.nn.functional.linear` does.
        self.multiply: Multiply = linear

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features] of the pristine weight."""
        if self._packed_pristine is not None:
            return self._packed_pristine.shape
        out_features, in_features = self._plain_pristine.shape
        return out_features, in_features

    @property
    def pristine(self) -> Tensor:
        """The base's weight in the plain layout, never to be written to. A copy of a packed weight is made when it is
        first asked for, and kept: a layer that an adapter was merged into will see others. A copy of one in blocks or
        in 8-bit floating point is not kept: it would be up to eight times as large.
        """
        if self._packed_pristine is None or self._plain_pristine is not _NO_WEIGHT:
            return self._plain_pristine
        dense = self._packed_pristine.dense()
        if not isinstance(self._packed_pristine, BlockWeight | Fp8Weight):
            self._plain_pristine = dense
        return dense

    @property
    def live(self) -> Tensor:
        """The weight in use, in the plain layout, [out_features, in_features]."""
        return self._live if self._packed is None else self._packed.dense()

    @property
    def packed(self) -> PackedWeight | None:
        """The weight in use, where it is packed."""
        return self._packed

    @property
    def adds_lora(self) -> bool:
        """Whether the layer's product adds LoRA by itself: compiled kernels do, to products of their own."""
        return isinstance(self._packed, StoredWeight)

    def __call__(self, x: Tensor, lora: SiteSegments | None = None) -> Tensor:
        """The layer's output for `x`, with `lora` added where the layer `adds_lora`."""
        if lora is not None:
            assert isinstance(self._packed, StoredWeight), "compiled kernels add LoRA to their own products"
            return self._packed.multiply(x, self.bias, lora)
        if self._packed is not None:
            return self._packed.multiply(x, self.bias)
        return self.multiply(x, self._live, self.bias)

    @property
    def address(self) -> int:
        """Address of the weight in use, on a GPU."""
        return (self._packed.codes if isinstance(self._packed, Fp8Weight) else self.live).data_ptr()

    def quantize(self) -> None:
        """Hold a plain weight in floating point numbers of 8 bits from now on, and multiply in them, where its shape
        allows."""
        if can_be_fp8(self._plain_pristine):
            self._packed = self._packed_pristine = Fp8Weight(self._plain_pristine)
            self._live = self._plain_pristine = _NO_WEIGHT

    @property
    def has_buffer(self) -> bool:
        """Whether adapters can be merged into `live_buffer`."""
        return self._packed_pristine is None

    def live_buffer(self) -> Tensor:
        """The buffer that the layer computes with from now on, to be filled with a merged weight. Its address stays."""
        assert self.has_buffer, "a packed weight has no plain buffer"
        self.bias = self.pristine_bias
        if self._live is self._plain_pristine or self._live.shape != self._plain_pristine.shape:
            self._live = torch.empty_like(self._plain_pristine)
        return self._live

    def replace(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compute with `weight` (and `bias`) from now on."""
        self.bias = bias
        if isinstance(self._packed_pristine, Fp8Weight):
            self._packed, self._live = None, weight.to(self._packed_pristine.dtype)
            return
        if self._packed is not None:
            self._packed = pack(weight, self._merged_products)
            return
        if self._live is self._plain_pristine or self._live.shape != weight.shape:
            # an adapter with a resized vocabulary has a head of another height
            self._live = torch.empty_like(weight)
        self._live.copy_(weight)

    def restore(self) -> None:
        """Compute with the pristine weight again."""
        self.bias = self.pristine_bias
        if self._packed_pristine is not None:
            self._packed, self._live = self._packed_pristine, self._plain_pristine
        elif self._live.shape != self._plain_pristine.shape:
            self._live = self._plain_pristine
        elif self._live is not self._plain_pristine:
            self._live.copy_(self._plain_pristine)

    def free_live(self) -> None:
        """Compute with the pristine weight again, and keep no buffer for merged ones."""
        self.restore()
        self._live = self._plain_pristine


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a decoder."""

    #: Number of the layer.
    index: int
    #: Its mixer and its sizes.
    config: LayerConfig
    #: Packed linear layers by site, in order.
    linears: dict[PackedSite, Linear]
    #: Full names of its norms.
    norms: LayerNorms
    #: Full name of its attention sinks; "" without.
    sinks: str
    #: Number of the rope that turns its heads; None where nothing turns them.
    rope: int | None
    #: Packed sites of a layer of the model; not each layer has all of them.
    sites: tuple[PackedSite, ...]
    #: Place of the keys and values that it reads, see `ModelConfig.key_places`; None where it does not attend.
    keys: tuple[int, int] | None

    def site_number(self, site: PackedSite) -> int:
        """Number of one of its packed linear layers among those of all layers, as adapters count them."""
        return self.index * len(self.sites) + self.sites.index(site)


def activation_of(model: ModelConfig) -> Activate:
    """The function from the packed output of the first layer, gate beside up [T, 2 * inner], to [T, inner]. Without a
    gate the input is [T, inner] already.
    """
    function = FUNCTIONS[model.activation]
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
    if model.norm_kind == "layer_no_bias":
        # weights may be those of each head
        return lambda x, module: layer_norm(x, x.shape[-1:], eps=eps) * tensors[f"{module}.weight"]
    if model.norm_kind == "rms_from_zero":
        return lambda x, module: rms_norm_from_zero(x, tensors[f"{module}.weight"], eps)
    return lambda x, module: rms_norm(x, tensors[f"{module}.weight"], eps)
