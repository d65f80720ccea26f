"""The decoder of mode `exact` on CPUs, where a row's numbers depend on that row alone, and what the mode promises.

Neither the rows of its steps nor the number of threads change them. Compiled kernels promise that (`kernels/*/cpu.c`),
packed layers keep it from two rows on (`linear`). Where the kernels are missing, torch's products of LoRA keep it from
sixteen rows on, for one number of threads: every adapter's rows are filled up with zeros to a multiple of sixteen, and
attention does the same (`kernels.paged_attention`). Torch's activations round by a number's place in a step, so they
take one row at a time. Seen with torch 2.13 on AVX-512; `tests/engine/test_exact_mode.py` checks it again.

GPUs have no decoder of their own for it: `GpuDecoder` multiplies by `kernels.invariant_linear` then, and the runner's
plans ask for `kernels/paged_attention/invariant.py`, LoRA tiles of one height and contractions that are not split.
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
from ...kernels.segment_lora import LoraSpan, PreparedLora
from ..config import EngineConfig
from ..errors import EngineError
from ..model_config.model import ModelConfig
from ..model_config.names import PackedSite
from .decoder import Decoder
from .gguf.blocks import Weight
from .layers import Activate, DecoderLayer

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
            self._plain_activation = _row_by_row(self._plain_activation)

    def _with_lora(self, layer: DecoderLayer, site: PackedSite, x: Tensor, spans: tuple[LoraSpan, ...]) -> Tensor:
        if self._is_compiled:
            return super()._with_lora(layer, site, x, spans)
        y, number = layer.linears[site](x), layer.site_number(site)
        for span in spans:
            num_rows = span.end - span.start
            filled = pad(x[span.start : span.end], (0, 0, 0, -num_rows % _ROWS))
            added = torch.zeros(len(filled), y.shape[1], dtype=y.dtype, device=y.device)
            PreparedLora([LoraSpan(0, len(filled), span.adapter)]).add_(added, filled, number)
            y[span.start : span.end] += added[:num_rows]
        return y


def _row_by_row(activate: Activate) -> Activate:
    return lambda packed: torch.cat([activate(packed[i : i + 1]) for i in range(len(packed))])


def is_arithmetic_fixed(model: ModelConfig) -> bool:
    """Whether compiled CPU kernels compute all that a row's neighbours, its chunks or the number of threads could
    change the rounding of."""
    return native_build() is not None and attends_compiled(model, torch.float32)


def attends_compiled(model: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether compiled kernels serve the heads of all layers, with keys and values in a pool of `dtype`."""
    return all(can_attend_compiled(layer.attention.head_dim, dtype) for layer in model.layers if layer.attention)


def check_exact_on_gpu(config: EngineConfig) -> None:
    """Raises `EngineError` where an engine of GPU kernels in mode `exact` could promise nothing."""
    if config.base_quantization != "none":
        raise EngineError(
            f"mode='exact', base_quantization={config.base_quantization!r}: must be 'none', since a library multiplies "
            "in 8 bits and rounds a row by the rows beside it. Leave base_quantization out, or use another mode."
        )
    if config.tensor_parallel > 1:
        raise EngineError(
            f"mode='exact', tensor_parallel={config.tensor_parallel}: must be 1, since what parts add up rounds "
            "otherwise than the whole. Use more workers of one device each, or another mode."
        )
    logger.info("mode='exact': bytes are equal among engines on one kind of GPU with equal torch and Triton")


def check_exact_on_cpu(model: ModelConfig) -> None:
    """Raises `EngineError` where an engine of CPU kernels in mode `exact` could promise nothing, and logs where it
    promises less than equal bytes whatever the threads.
    """
    if not can_multiply("float32"):
        raise EngineError(
            "mode='exact': there are no compiled CPU kernels here, and this torch has no oneDNN to stand in for them. "
            "Install lorabatch where a C compiler with OpenMP is at hand, or use another mode."
        )
    if native_build() is None and model.has_recurrent_layers:
        raise EngineError(
            "mode='exact': there are no compiled CPU kernels here, without which layers of the gated delta rule round "
            "by the rows beside. Install lorabatch where a C compiler with OpenMP is at hand, or use another mode."
        )
    if not is_arithmetic_fixed(model):
        logger.warning(
            "mode='exact': torch computes what compiled CPU kernels do elsewhere (%s). Bytes are equal among engines "
            "of the same torch, processor and number of threads only: give engine_threads.",
            "they are not installed here" if native_build() is None else f"heads of {model.head_dim} numbers",
        )
