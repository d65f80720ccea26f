"""Gated delta rule: linear attention whose state forgets and is corrected (Yang et al., "Gated Delta Networks", ICLR
2025, section 3), with the short convolution before it and the gated norm behind it.

With S the state of a value head [key_size, value_size], q and k of unit length, v a value, and for each token a factor
`decay` in (0, 1) and `write` in (0, 1):

    S = decay * S;  S = S + k (write * (v - k S))^T;  out = norm(q S / sqrt(key_size)) * silu(gate)

Tokens are taken one after the other, so that a row's numbers depend neither on how its tokens are cut into steps nor on
the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts.delta_sizes import DeltaSizes
from ..native import ADDRESS, COUNT, NUMBER, native_function
from .reference import walk
from .types import DeltaParameters, DeltaRows

__all__ = ["DeltaParameters", "DeltaRows", "DeltaSizes", "gated_delta"]

_COMPILED_ARGUMENTS = (*(ADDRESS,) * 6, COUNT, *(ADDRESS,) * 4, NUMBER, *(COUNT,) * 5)
# Limits of the compiled kernel.
_MOST_KEY_FEATURES, _MOST_TAPS = 256, 8


def gated_delta(
    projected: Tensor, sizes: DeltaSizes, parameters: DeltaParameters, states: Tensor, rows: DeltaRows
) -> Tensor:
    """Outputs of the rows' tokens, [num_tokens, num_values].

    `projected` [num_tokens, sizes.projected]: queries, keys and values before the convolution, then gates, then how
    much each value head writes and how much it forgets; may be overwritten. `states`: flat fp32 memory, in which what
    each row keeps is updated.
    """
    if projected.device.type != "cpu":
        from .triton import walk_by_triton

        return walk_by_triton(projected, sizes, parameters, states, rows)
    tensors = (projected, states, parameters.conv, rows.first_tokens, rows.places, rows.is_new)
    is_served = projected.dtype == torch.float32 and all(t.is_contiguous() for t in tensors)
    is_served = is_served and sizes.key_size <= _MOST_KEY_FEATURES and sizes.taps <= _MOST_TAPS
    compiled = native_function("gated_delta", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        return walk(projected, sizes, parameters, states, rows)
    out = torch.empty(len(projected), sizes.num_values)
    moved = (rows.first_tokens, rows.places, rows.is_new)
    weights = (parameters.conv, parameters.decay_log, parameters.step_bias, parameters.norm)
    compiled(
        *(t.data_ptr() for t in (out, projected, states, *moved)), len(rows.places), *(t.data_ptr() for t in weights),
        parameters.eps, sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, sizes.taps,
    )  # fmt: skip
    return out
