"""Packs weights of linear layers into the layout that a CPU multiplies with fastest: `pack(weight, products)`.

Compiled kernels read panels: of fp32, bf16 or fp16 (`panels.py`), or of blocks of few bits (`blocks.py`), multiplied in
fp32; or multiplied in bf16 or 8 bits (`dots.py`). Without compiled kernels, torch's oneDNN has a layout of its own for
fp32 (`onednn.py`). GPUs multiply plain weights, and weights of 8 bits in `fp8.py`. On a CPU a row's result has the same
bits whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .blocks import BlockWeight
from .dots import Bf16Weight, Int8Weight, has_dots
from .fp8 import Fp8Weight
from .onednn import OneDnnWeight, has_onednn
from .panels import PanelWeight, StoredWeight, has_panels

#: Number format in which a weight and its input are multiplied.
Products = Literal["float32", "bfloat16", "int8"]


_PACKED_CLASSES: Mapping[Products, type[PanelWeight | Bf16Weight | Int8Weight]] = {
    "float32": PanelWeight,
    "bfloat16": Bf16Weight,
    "int8": Int8Weight,
}


#: A weight W [out_features, in_features] in one of the layouts. `multiply(x, bias)` gives `x W^T + bias` for `x`
#: [num_tokens, in_features]; `dense()` gives W in the plain layout and fp32, with the bits of the numbers that are
#: multiplied. For products in fp32, panels hold a weight in its own number format.
PackedWeight = StoredWeight | OneDnnWeight | Fp8Weight


def stored_class(products: Products, dtype: torch.dtype) -> type[StoredWeight]:
    """The class of weights that compiled kernels read for these products. `dtype`: type of their `numbers`."""
    return BlockWeight if products == "float32" and dtype == torch.uint8 else _PACKED_CLASSES[products]


def can_widen_blocks(products: Products) -> bool:
    """Whether this machine has kernels for `BlockWeight` with these products."""
    return products == "float32" and has_panels()


def can_multiply(products: Products) -> bool:
    """Whether this machine has kernels for these products."""
    return has_panels() or has_onednn() if products == "float32" else has_dots(products)


def pack(weight: Tensor, products: Products) -> PackedWeight:
    """A packed copy of a weight in fp32, bf16 or fp16, for products that this machine `can_multiply`."""
    if products == "float32" and not has_panels():
        return OneDnnWeight(weight.float())
    return _PACKED_CLASSES[products](weight)
