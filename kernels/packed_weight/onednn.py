"""Packs weights into torch's own layout, for processors without compiled kernels of ours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_PACKING_HINT_ROWS = 64
# Least rows of a product. Fewer rows take other paths in oneDNN, which round one row otherwise, and no row may depend
# on the rows beside it.
_FEWEST_ROWS = 4


class OneDnnWeight:
    """A packed weight in oneDNN's layout, multiplied in fp32 by operators of torch that are not documented."""

    def __init__(self, weight: Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_HINT_ROWS)

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        return self._out_features, self._in_features

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + bias`, fp32 [num_tokens, out_features]."""
        if 0 < len(x) < _FEWEST_ROWS:
            return self.multiply(pad(x, (0, 0, 0, _FEWEST_ROWS - len(x))), bias)[: len(x)]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product

    def dense(self) -> Tensor:
        """W in the plain layout and fp32."""
        return self._packed.to_dense()


def has_onednn() -> bool:
    """Whether this build of torch has the layout."""
    return torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call,no-any-return]
