"""The decoder of mode `exact`: a row's numbers depend on that row alone, bit for bit, not on who shares its steps.

Products over a few rows take other paths than products over many, and round otherwise. Packed layers do not from two
rows on (`linear`), the products of LoRA do not from sixteen on: so every adapter's rows are filled up with zeros to a
multiple of sixteen. Attention does the same (`kernels.paged_attention`). Everything else works element by element or
row by row. Seen with torch 2.13 on AVX-512; `tests/engine/test_exact_mode.py` looks again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.segment_lora import LoraSegment, add_lora_
from .decoder import Decoder, DecoderLayer
from .model_config import PackedSite
from .step_batch import AdapterSpan

_ROWS = 16


class ExactDecoder(Decoder):
    """`Decoder`, for steps that were built with `is_exact`."""

    def _with_lora(self, layer: DecoderLayer, site: PackedSite, x: Tensor, spans: tuple[AdapterSpan, ...]) -> Tensor:
        y = layer.linears[site](x)
        for span in spans:
            num_rows = span.end - span.start
            filled = pad(x[span.start : span.end], (0, 0, 0, -num_rows % _ROWS))
            added = torch.zeros(len(filled), y.shape[1], dtype=y.dtype, device=y.device)
            add_lora_(added, filled, [LoraSegment(0, len(filled), span.adapter.sites[layer.index].get(site))])
            y[span.start : span.end] += added[:num_rows]
        return y
