"""A linear layer whose weight can be replaced and restored bit for bit.

`pristine` is never written to. On CPU in fp32 the layer computes with a packed copy; replacing means packing another
weight, restoring means taking the packed pristine copy again. Elsewhere the layer computes with `pristine` itself
until the first replacement, then with a live buffer of a fixed address.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..kernels.packed_weight import PackedWeight, pack


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
            # an adapter with a resized vocabulary brings a head of another height
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
