"""Computes decoder layers of the Llama families in one compiled call (`cpu.c`).

    x <- x + o(attention(qkv(norm(x))))
    x <- x + down(silu(gate(norm(x))) * up(norm(x)))

are one layer; attention rotates queries and keys, and stores keys and values in the pool. With a small model an
interpreter takes as long to call their kernels one by one as the kernels of a step of few rows take.

Legend: T tokens of the step, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, POOL_TYPES, native_function
from ..paged_attention.types import SpanTable
from ..segment_lora.cpu import SegmentTable
from .types import LayerParts, LayerRecord, LayerShape, StepRecord

__all__ = ["DecoderLayers", "LayerParts", "LayerShape"]


class DecoderLayers:
    """Layers of one shape that follow each other, the first of them number 0; valid as long as their tensors."""

    def __init__(self, shape: LayerShape, layers: Sequence[LayerParts]) -> None:
        self._shape = shape
        self._records = (LayerRecord * len(layers))(*(LayerRecord.of(i, layer) for i, layer in enumerate(layers)))
        weights = [weight for layer in layers for weight, _ in layer.linears]
        self._most_inputs = max(weight.shape[1] for weight in weights)
        self._codes_of_row = max(weight.num_codes(1) for weight in weights)
        self._memory = torch.empty(0)

    def forward_(
        self,
        x: Tensor,
        num_layers: int,
        rotaries: Sequence[tuple[Tensor, Tensor]],
        pool: Tensor,
        places: tuple[Tensor, Tensor],
        spans: SpanTable,
        tables: Sequence[SegmentTable],
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take `x` [T, hidden] (fp32) through the first `num_layers` layers, in place, and store their keys and values.

        `rotaries`: cosine and sine by number, each [T, 1, half of the rotated features]. `places`: as in
        `rotate_and_store_`. `tables`: LoRA of all packed layers, in the order in which it is added. `add_up`: turns the
        result of an attention or an MLP, [T, hidden], into the tensor that is added to `x`; it may overwrite its
        argument.
        """
        assert x.dtype == torch.float32, "compiled kernels take fp32"
        named = (x, *places, *(tensor for rotary in rotaries for tensor in rotary))
        assert all(tensor.is_contiguous() for tensor in named), "compiled kernels take dense tensors"
        num_scratch = len(x) * self._codes_of_row
        num_scratch += max((table.num_scratch(self._most_inputs) for table in tables), default=0)
        end_of_y = x.numel()
        end_of_activations = end_of_y + len(x) * self._shape.num_activations
        if len(self._memory) < end_of_activations + num_scratch:
            # kept between steps: writing to fresh memory takes longer than to memory that was in use
            self._memory = torch.empty(end_of_activations + num_scratch)
        y = self._memory[:end_of_y].view(x.shape)
        activations, scratch = self._memory[end_of_y:], self._memory[end_of_activations:]
        # `Rotary` and `Table` of cpu.c: addresses and counts
        of_rotaries = np.array([(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in rotaries], np.int64)
        of_tables = np.array([table.record for table in tables], np.int64)
        step = StepRecord(
            x.data_ptr(), len(x), of_rotaries.ctypes.data, pool.data_ptr(), POOL_TYPES[pool.dtype],
            *(place.data_ptr() for place in places), spans.rows.ctypes.data, spans.block_starts.ctypes.data,
            len(spans.rows), spans.block_tokens, torch.get_num_threads(), of_tables.ctypes.data,
            len(of_tables), y.data_ptr(), activations.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        compiled = native_function("decoder_layers", ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS)
        assert compiled is not None, "compiled kernels are not there"
        of_shape, of_step = ctypes.byref(self._shape), ctypes.byref(step)
        if add_up is None:
            compiled(self._records, 0, 2 * num_layers, of_shape, of_step)
        else:
            for half in range(2 * num_layers):
                compiled(self._records, half, half + 1, of_shape, of_step)
                y.copy_(add_up(y))
        if num_layers:
            x += y
