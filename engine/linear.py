"""A linear layer whose weight can be replaced and restored bit for bit.

`pristine` is never written to. On CPU in fp32 the layer computes with a copy in oneDNN's packed layout, which on
the measured machine lifts 64-row multiplications from 140 to 200 GFLOP/s; replacing means packing another
weight, restoring means taking the packed pristine copy again. Elsewhere the layer computes with `pristine` itself
until the first replacement, then with a live buffer of a fixed address.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

_PACKING_HINT_ROWS = 64
# Fewer rows take other paths in oneDNN: one row rounds otherwise, and no row may depend on its company; all layers of
# SmolLM2-135M take 43 ms with two rows, 33 with three, 30 with four to six (one core, AVX-512).
_FEWEST_PACKED_ROWS = 4


class Linear:
    """`y = x W^T + bias`, `x` [num_tokens, in_features], W [out_features, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_packed: bool) -> None:
        self.pristine = weight
        self.pristine_bias = bias
        self.bias = bias
        self._is_packed = is_packed
        self._packed_pristine = _pack(weight) if is_packed else weight
        self._live = self._packed_pristine

    @property
    def live(self) -> Tensor:
        """The weight in use, in the plain layout, [out_features, in_features]."""
        return self._live.to_dense() if self._is_packed else self._live

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            if 0 < len(x) < _FEWEST_PACKED_ROWS:
                return self(pad(x, (0, 0, 0, _FEWEST_PACKED_ROWS - len(x))))[: len(x)]
            return torch.ops.mkldnn._linear_pointwise(x, self._live, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return linear(x, self._live, self.bias)

    def live_buffer(self) -> Tensor:
        """The buffer that the layer computes with from now on, to be filled with a merged weight. Its address stays."""
        assert not self._is_packed, "a packed weight has no plain buffer"
        self.bias = self.pristine_bias
        if self._live is self.pristine or self._live.shape != self.pristine.shape:
            self._live = torch.empty_like(self.pristine)
        return self._live

    def replace(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compute with `weight` (and `bias`) from now on."""
        self.bias = bias
        if self._is_packed:
            self._live = _pack(weight)
            return
        if self._live is self.pristine or self._live.shape != weight.shape:
            # an adapter with a resized vocabulary brings a head of another height
            self._live = torch.empty_like(weight)
        self._live.copy_(weight)

    def restore(self) -> None:
        """Compute with the pristine weight again."""
        self.bias = self.pristine_bias
        if self._is_packed:
            self._live = self._packed_pristine
        elif self._live.shape != self.pristine.shape:
            self._live = self.pristine
        elif self._live is not self.pristine:
            self._live.copy_(self.pristine)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed layout for this kind of weight."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_HINT_ROWS)
    return packed
