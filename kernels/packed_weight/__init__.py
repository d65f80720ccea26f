"""Packs weights of linear layers into the layout that a CPU multiplies with fastest: `pack(weight).multiply(x, bias)`.

Compiled kernels read panels (`panels.py`); where there are none, torch's oneDNN has a layout of its own
(`onednn.py`). In both a row's result has the same bits whatever rows are beside it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .onednn import OneDnnWeight, has_onednn
from .panels import PanelWeight, has_panels


class PackedWeight(Protocol):
    """A weight W [out_features, in_features], multiplied in fp32. Panels hold it in its own number format."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + bias`, `x` [num_tokens, in_features] in fp32, bias [out_features]."""

    def dense(self) -> Tensor:
        """W in the plain layout and fp32, the same numbers bit for bit."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights can be packed here for computing in `dtype`."""
    return device.type == "cpu" and dtype == torch.float32 and (has_panels() or has_onednn())


def pack(weight: Tensor) -> PackedWeight:
    """A packed copy of a weight in fp32, bf16 or fp16, which is widened where it must be."""
    return PanelWeight(weight) if has_panels() else OneDnnWeight(weight.float())
