"""The decoder of mode `exact`: a row's numbers depend on that row alone, bit for bit, not on who shares its steps nor
on the number of threads.

Compiled kernels promise that (`kernels/*/cpu.c`), packed layers keep it from two rows on (`linear`). Where the kernels
are missing, torch's products of LoRA keep it from sixteen rows on, for one number of threads: every adapter's rows are
filled up with zeros to a multiple of sixteen, and attention does the same (`kernels.paged_attention`). Torch's
activations round by where a number lies in a step, so they take one row at a time. Seen with torch 2.13 on AVX-512;
`tests/engine/test_exact_mode.py` looks again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.native import native_build
from ..kernels.segment_lora import LoraSegment, add_lora_
from .activations import Activate
from .decoder import Decoder, DecoderLayer
from .model_config import ModelConfig, PackedSite
from .step_batch import AdapterSpan

_ROWS = 16


class ExactDecoder(Decoder):
    """`Decoder`, for steps that were built with `is_exact`."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], *, is_packed: bool) -> None:
        super().__init__(model, weights, is_packed=is_packed)
        self._is_compiled = native_build() is not None and self._dtype == torch.float32
        if model.activation != "relu" and not (model.activation == "silu" and self._is_compiled):
            self._activation = _row_by_row(self._activation)

    def _with_lora(self, layer: DecoderLayer, site: PackedSite, x: Tensor, spans: tuple[AdapterSpan, ...]) -> Tensor:
        if self._is_compiled:
            return super()._with_lora(layer, site, x, spans)
        y = layer.linears[site](x)
        for span in spans:
            num_rows = span.end - span.start
            filled = pad(x[span.start : span.end], (0, 0, 0, -num_rows % _ROWS))
            added = torch.zeros(len(filled), y.shape[1], dtype=y.dtype, device=y.device)
            add_lora_(added, filled, [LoraSegment(0, len(filled), span.adapter.sites[layer.index].get(site))])
            y[span.start : span.end] += added[:num_rows]
        return y


def _row_by_row(activate: Activate) -> Activate:
    return lambda packed: torch.cat([activate(packed[i : i + 1]) for i in range(len(packed))])
