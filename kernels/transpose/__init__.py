"""A matrix transposed into another one, widened to fp32 on the way: `out[j, i] = x[i, j]`.

Compiled, it takes one thread and no lock of the interpreter: made for threads that prepare adapters while others step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in cpu.c


def transpose_into_(out: Tensor, x: Tensor) -> None:
    """Write `x` [rows, columns] to `out` [columns, rows], whose rows may lie apart."""
    assert out.shape == x.shape[::-1], f"{list(x.shape)} does not fit {list(out.shape)} transposed"
    fits = x.device.type == out.device.type == "cpu" and x.is_contiguous() and out.stride(1) == 1
    is_served = fits and x.dtype in _TYPES and out.dtype == torch.float32
    places = (ADDRESS, COUNT, ADDRESS, COUNT, COUNT, COUNT)
    compiled = native_function("transpose_to_fp32", *places) if is_served else None
    if compiled is None:
        out.copy_(x.t())
        return
    compiled(out.data_ptr(), out.stride(0), x.data_ptr(), *x.shape, _TYPES[x.dtype])
