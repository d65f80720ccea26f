"""Adds LoRA of many segments in one compiled call (`cpu.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from ..native.segments import SiteSegments
from .types import LoraSpan


class SegmentTable:
    """The segments of compiled calls, one call for each packed layer: first row, end row, record of the site or 0. They
    are in the order of their rows and do not overlap.

    One table serves all layers of a step: most steps have other rows than the step before, and 120 tables of eight
    segments took 3 ms.
    """

    def __init__(self, spans: Sequence[LoraSpan], records: Sequence[NDArray[np.int64]]) -> None:
        self._adapters = [span.adapter for span in spans]  # hold what the addresses name
        addresses, ranks = np.moveaxis(np.stack(records), -1, 0)  # [num_spans, num_sites]
        self._table = np.empty((addresses.shape[1], len(spans), 3), dtype=np.int64)
        self._table[:, :, 0] = [span.start for span in spans]
        self._table[:, :, 1] = [span.end for span in spans]
        self._table[:, :, 2] = addresses.T
        self._ranks = ranks.max(0)
        first, size = self._table.ctypes.data, self._table[0].nbytes
        places = range(first, first + len(self._table) * size, size)
        columns = zip(places, repeat(len(spans)), repeat(spans[-1].end), self._ranks.tolist(), strict=False)
        #: Segments at each packed layer.
        self.sites = [SiteSegments._make(of_site) for of_site in columns]

    @property
    def record(self) -> tuple[int, int, int]:
        """All packed layers as compiled kernels read them: addresses of segments and of ranks, segments of each."""
        return self._table.ctypes.data, self._ranks.ctypes.data, self._table.shape[1]

    def num_scratch(self, in_features: int) -> int:
        """`SiteSegments.num_scratch` of the layer that needs most."""
        return self.sites[0]._replace(largest_rank=int(self._ranks.max())).num_scratch(in_features)

    def add_(self, y: Tensor, x: Tensor, site: int) -> None:
        """Add the segments' LoRA of x [num_tokens, in_features] to y [num_tokens, out_features], both fp32."""
        segments = self.sites[site]
        if not segments.largest_rank:
            return
        x = x.contiguous()
        assert y.is_contiguous(), "compiled kernels add to dense rows"
        assert y.dtype == x.dtype == torch.float32, "compiled kernels take fp32"
        lora_add = native_function("lora_add", ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS)
        assert lora_add is not None, "compiled kernels are not there"
        scratch = torch.empty(segments.num_scratch(x.shape[1]))
        record = ctypes.byref(segments.record)
        lora_add(y.data_ptr(), y.shape[1], x.data_ptr(), x.shape[1], record, scratch.data_ptr())
