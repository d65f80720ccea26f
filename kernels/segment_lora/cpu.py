"""Adds LoRA of many segments in one compiled call (`cpu.c`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .types import SiteRecord


class SegmentTable:
    """Segments of one compiled call: first row, end row, site; in the order of their rows, none over another."""

    def __init__(self, segments: Sequence[tuple[int, int, SiteRecord]]) -> None:
        self._records = [record for _, _, record in segments]  # the table holds their addresses
        self._table = array("q", [n for start, end, site in segments for n in (start, end, ctypes.addressof(site))])
        self._num_rows = segments[-1][1]
        self._stride = max(site.rank for site in self._records)

    def add_(self, y: Tensor, x: Tensor) -> None:
        """Add to y [num_tokens, out_features] what the segments make of x [num_tokens, in_features], both fp32."""
        x = x.contiguous()
        assert y.is_contiguous(), "compiled kernels add to dense rows"
        assert y.dtype == x.dtype == torch.float32, "compiled kernels take fp32"
        lora_add = native_function("lora_add", ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, COUNT)
        assert lora_add is not None, "compiled kernels are not there"
        # what rows shrink to; and the rows in bf16, where they are multiplied so
        scratch = torch.empty(self._num_rows, self._stride + -(-x.shape[1] // 2))
        table, num_segments = self._table.buffer_info()[0], len(self._records)
        lora_add(
            y.data_ptr(), y.shape[1], x.data_ptr(), x.shape[1], table, num_segments, scratch.data_ptr(), self._stride
        )
