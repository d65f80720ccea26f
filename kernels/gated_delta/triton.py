"""The gated delta rule on a GPU: convolution, walk over the tokens, gated norm.

The walk has a program for each row, value head and block of columns, with the block of the state in registers: 128 keys
of 32 columns are 32 fp32 in each of 128 threads. Bytes: a row's state read and written once a step, its tokens once for
each block; a step of 64 rows with 16 heads of 128 x 128 moves 134 MB, 30 us at 4.5 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch import launch, next_power_of_2
from ..layouts.delta_sizes import DeltaSizes
from .types import DeltaParameters, DeltaRows

_BLOCK_CHANNELS, _BLOCK_COLUMNS = 128, 32


@triton.jit
def _inputs(projected, window, taps, tokens, first, begins, channel, inside, channels, stride):
    """Inputs of the convolution at `tokens`, of this step or of the window before it."""
    in_step = tokens >= first
    x = tl.load(projected + tokens * stride + channel, mask=inside & in_step, other=0.0).to(tl.float32)
    kept = window + (tokens - first + taps) * channels + channel
    return x + tl.load(kept, mask=inside & (tokens < first) & (begins == 0), other=0.0)


@triton.jit
def _convolve(
    out, projected, states, first_tokens, places, is_new, weights, channels, stride, num_blocks,
    TAPS: tl.constexpr, TAPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of channels of one row, and its window for the next step."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row = program // num_blocks
    channel = (program % num_blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    tap = tl.arange(0, TAPS_BLOCK)[:, None]
    inside = (channel < channels) & (tap < TAPS)
    window, begins = states + tl.load(places + row), tl.load(is_new + row)
    first, end = tl.load(first_tokens + row), tl.load(first_tokens + row + 1)
    weight = tl.load(weights + tap * channels + channel, mask=inside, other=0.0)
    for token in range(first, end):
        seen = _inputs(
            projected, window, TAPS - 1, token - (TAPS - 1) + tap, first, begins, channel, inside, channels, stride
        )
        total = tl.sum(seen * weight, axis=0)
        place = out + token * channels + program % num_blocks * BLOCK + tl.arange(0, BLOCK)
        tl.store(place, total * tl.sigmoid(total), mask=program % num_blocks * BLOCK + tl.arange(0, BLOCK) < channels)
    kept = inside & (tap < TAPS - 1)
    latest = _inputs(
        projected, window, TAPS - 1, end - (TAPS - 1) + tap, first, begins, channel, kept, channels, stride
    )
    tl.store(window + tap * channels + channel, latest, mask=kept)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _walk(
    out, mixed, projected, states, first_tokens, places, is_new, decay_log, step_bias, channels, stride,
    window_elements, key_heads, value_heads, key_size, value_size, num_blocks, scale,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens of one row through one block of columns of one value head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row, head = program // num_blocks // value_heads, program // num_blocks % value_heads
    key, column = tl.arange(0, KEYS), program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    key_inside, column_inside = key < key_size, column < value_size
    inside = key_inside[:, None] & column_inside[None, :]
    place = states + tl.load(places + row) + window_elements + head * key_size * value_size
    place += key[:, None] * value_size + column[None, :]
    state = tl.load(place, mask=inside & (tl.load(is_new + row) == 0), other=0.0)
    rate, bias = tl.exp(tl.load(decay_log + head).to(tl.float32)), tl.load(step_bias + head).to(tl.float32)
    query_place = head // (value_heads // key_heads) * key_size + key
    for token in range(tl.load(first_tokens + row), tl.load(first_tokens + row + 1)):
        features, gates = mixed + token * channels, projected + token * stride + stride - 2 * value_heads + head
        q = _unit(tl.load(features + query_place, mask=key_inside, other=0.0)) * scale
        k = _unit(tl.load(features + key_heads * key_size + query_place, mask=key_inside, other=0.0))
        value_place = features + 2 * key_heads * key_size + head * value_size + column
        v = tl.load(value_place, mask=column_inside, other=0.0)
        write = tl.sigmoid(tl.load(gates).to(tl.float32))
        step = tl.load(gates + value_heads).to(tl.float32) + bias
        softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        state *= tl.exp(-rate * softplus)
        change = (v - tl.sum(k[:, None] * state, axis=0)) * write
        state += k[:, None] * change[None, :]
        found = tl.sum(q[:, None] * state, axis=0)
        tl.store(out + (token * value_heads + head) * value_size + column, found, mask=column_inside)
    tl.store(place, state, mask=inside)


@triton.jit
def _gate_norm(
    out, found, projected, weight, eps, channels, stride, value_heads, value_size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gated norm of one value head of one token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < value_size
    value = tl.load(found + program * value_size + column, mask=inside, other=0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / value_size + eps)
    normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    token, head = program // value_heads, program % value_heads
    gate_place = projected + token * stride + channels + head * value_size + column
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    result = normed * gate * tl.sigmoid(gate)
    tl.store(out + program * value_size + column, result.to(out.dtype.element_ty), mask=inside)


def walk_by_triton(
    projected: Tensor, sizes: DeltaSizes, parameters: DeltaParameters, states: Tensor, rows: DeltaRows
) -> Tensor:
    """Outputs [num_tokens, num_values], in three launches; what the rows keep is updated in `states`."""
    num_tokens, num_rows = len(projected), len(rows.places)
    mixed = torch.empty(num_tokens, sizes.channels, dtype=torch.float32, device=projected.device)
    found = torch.empty(num_tokens, sizes.num_values, dtype=torch.float32, device=projected.device)
    out = torch.empty_like(found, dtype=projected.dtype)
    if not num_rows or not num_tokens:
        return out
    is_new = rows.is_new.to(torch.uint8)
    channel_blocks = triton.cdiv(sizes.channels, _BLOCK_CHANNELS)
    column_blocks = triton.cdiv(sizes.value_size, _BLOCK_COLUMNS)
    launch(
        _convolve, num_rows * channel_blocks, mixed, projected, states, rows.first_tokens, rows.places, is_new,
        parameters.conv, sizes.channels, sizes.projected, channel_blocks, TAPS=sizes.taps,
        TAPS_BLOCK=next_power_of_2(sizes.taps), BLOCK=_BLOCK_CHANNELS,
    )  # fmt: skip
    launch(
        _walk, num_rows * sizes.value_heads * column_blocks, found, mixed, projected, states, rows.first_tokens,
        rows.places, is_new, parameters.decay_log, parameters.step_bias, sizes.channels, sizes.projected,
        sizes.window_elements, sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, column_blocks,
        sizes.key_size**-0.5, KEYS=next_power_of_2(sizes.key_size), BLOCK=_BLOCK_COLUMNS,
    )  # fmt: skip
    launch(
        _gate_norm, num_tokens * sizes.value_heads, out, found, projected, parameters.norm, parameters.eps,
        sizes.channels, sizes.projected, sizes.value_heads, sizes.value_size, BLOCK=next_power_of_2(sizes.value_size),
    )  # fmt: skip
    return out
