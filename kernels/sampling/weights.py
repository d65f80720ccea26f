"""Triton functions of a row that is sampled: its random number, and weights of its logits as whole numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(state, key):
    x = (state ^ key) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, stream, position):
    """The number in [0, 1) of (seed, stream, position), with the bits of `reference.uniform`."""
    state = _mixed(seed ^ seed, seed)
    state = _mixed(state, stream)
    state = _mixed(state, position)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def whole_weights(value, largest, slope):
    """Weights of logits as whole numbers, int64, with the bits of `types.weights_of`."""
    exponent = (value - largest) * slope
    exponent = tl.where(exponent > -48.0, exponent, -48.0)
    shifted = exponent - 0.5 + 12582912.0
    f = exponent - (shifted - 12582912.0)
    # numbers, not names: with those of a module Triton's cache depends on which kernel is compiled first
    power = (f * 0.0018671301659196615 + 0.009017029777169228) * f + 0.05579991266131401
    power = ((power * f + 0.24016444385051727) * f + 0.6931512951850891) * f + 1.0
    mantissa = power.to(tl.int32, bitcast=True) - 0x3F000000
    shift = 0x4B400000 - shifted.to(tl.int32, bitcast=True)
    return (mantissa.to(tl.int64) << 21) >> shift.to(tl.int64)


@triton.jit
def share_of(total, share):
    return tl.minimum((total.to(tl.float64) * share).to(tl.int64), total)
