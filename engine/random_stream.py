"""Counter-based random numbers: the number at a position is a pure function of (seed, stream, position).

A retried or moved sequence therefore draws the same numbers as an undisturbed one. The mixing function is the
finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied once
per key so that related keys give unrelated numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, stream, position); all inputs and the result have the same shape."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _mix(seeds + _GOLDEN)
        state = _mix((state ^ streams) + _GOLDEN)
        state = _mix((state ^ positions) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
