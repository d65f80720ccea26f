"""The decoder of mode `exact`: a row's numbers depend on that row alone, bit for bit.

Neither the rows of its steps nor the number of threads change them. Compiled kernels promise that (`kernels/*/cpu.c`),
packed layers keep it from two rows on (`linear`). Where the kernels are missing, torch's products of LoRA keep it from
sixteen rows on, for one number of threads: every adapter's rows are filled up with zeros to a multiple of sixteen, and
attention does the same (`kernels.paged_attention`). Torch's activations round by a number's place in a step, so they
take one row at a time. Seen with torch 2.13 on AVX-512; `tests/engine/test_exact_mode.py` checks it again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.native import native_build
from ...kernels.packed_weight import PackedWeight, Products, can_multiply
from ...kernels.paged_attention.compiled import can_attend_compiled
from ...kernels.segment_lora import LoraSegment, add_lora_
from ..errors import ExactModeError
from ..model_config.model import ModelConfig, PackedSite
from .decoder import Decoder
from .gguf.blocks import Weight
from .layers import Activate, DecoderLayer
from .step_batch import AdapterSpan

logger = logging.getLogger(__name__)
_ROWS = 16


class ExactDecoder(Decoder):
    """`Decoder`, for steps that were built with `is_exact`."""

    is_exact = True

    def __init__(
        self,
        model: ModelConfig,
        weights: dict[str, Weight],
        dtype: torch.dtype,
        *,
        products: Products | None,
        packed: Mapping[str, PackedWeight] | None = None,
    ) -> None:
        super().__init__(model, weights, dtype, products=products, packed=packed)
        self._is_compiled = native_build() is not None and dtype == torch.float32
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


def is_arithmetic_fixed(model: ModelConfig, device: torch.device) -> bool:
    """Whether compiled kernels compute all that a row's neighbours, its chunks or the number of threads could change
    the rounding of."""
    is_compiled = device.type == "cpu" and native_build() is not None
    return is_compiled and can_attend_compiled(model.head_dim, torch.float32)


def check_exact_promise(model: ModelConfig, device: torch.device) -> None:
    """For an engine in mode `exact`: raises `ExactModeError` where nothing would be promised on a CPU, and logs where
    less is promised than equal bytes whatever the threads."""
    if device.type != "cpu":
        logger.warning(
            "mode='exact', device='%s': equal bytes are promised on CPUs only. Here a row's last bits may "
            "depend on the rows beside it, since the products of linear layers round by their number.",
            device.type,
        )
    elif not can_multiply("float32"):
        raise ExactModeError(
            "mode='exact': there are no compiled CPU kernels here, and this torch has no oneDNN to stand in for them. "
            "Install lorabatch where a C compiler with OpenMP is at hand, or use another mode."
        )
    elif not is_arithmetic_fixed(model, device):
        logger.warning(
            "mode='exact': torch computes what compiled CPU kernels do elsewhere (%s). Bytes are equal among engines "
            "of the same torch, processor and number of threads only: give engine_threads.",
            "they are not installed here" if native_build() is None else f"heads of {model.head_dim} numbers",
        )
