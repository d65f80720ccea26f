"""Places for keys and values in the pool."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeyPlaces(NamedTuple):
    """Places for the keys and values of a step's tokens in a flat pool, in rows of head_dim numbers."""

    #: Rows of each token's key and value heads in layer 0, [num_tokens, 2 K].
    rows: Tensor
    #: Rows from one layer to the next, [num_tokens, 1].
    layer_stride: Tensor
