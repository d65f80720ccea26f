"""Fits the coefficients of a cost model to measured steps and adapter loads, by non-negative least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .cost import STEP_COEFFICIENTS, CostModel, StepLoad

_ROUNDS = 6
# Relative errors up to this are noise; larger ones weigh less, for the step may have been disturbed.
_NOISE = 0.05


def _features(load: StepLoad) -> list[float]:
    """One number per name of `STEP_COEFFICIENTS`."""
    adapters = float(np.asarray(load.num_adapters))
    prefill_tokens, decode_rows = float(np.asarray(load.prefill_tokens)), float(np.asarray(load.decode_rows))
    unmerged = (load.rank_sum, load.rank_tokens, load.prefill_pairs, load.lora_tokens)
    return [
        1.0,
        prefill_tokens,
        decode_rows,
        float(np.asarray(load.context_tokens)),
        float(adapters > 0),
        adapters,
        *(float(np.asarray(value)) for value in unmerged),
        float(prefill_tokens > 0 and decode_rows > 0),
        float(np.asarray(load.drawn_tokens)),
    ]


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    load: StepLoad
    seconds: float


def fit(samples: Sequence[StepSample], prior: CostModel) -> CostModel:
    """Step coefficients by non-negative least squares; the rest is kept from `prior`.

    A step's variance is taken to grow with its seconds: what a job takes is a sum of steps, and these weights make the
    predicted sum that of the samples, where weights on relative errors would serve the many short steps. Samples that
    the fit misses by much weigh less in the next of a few rounds, so that steps which were disturbed while they were
    measured do not bend it. A coefficient whose feature no sample exercises keeps the prior's value, and so does
    `mixed_step_s` of 0, which says how engines compute. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("fit needs at least one measured step; found none.")
    seconds = np.array([sample.seconds for sample in samples])
    features = np.array([_features(sample.load) for sample in samples])
    if not prior.mixed_step_s:
        features[:, STEP_COEFFICIENTS.index("mixed_step_s")] = 0.0
    is_seen = np.asarray(features.any(axis=0))
    kept = np.array([getattr(prior, name) for name in STEP_COEFFICIENTS])
    certain = 1.0 / np.sqrt(np.maximum(seconds, 1e-9))
    weights = certain
    for _ in range(_ROUNDS):
        found = nonnegative_least_squares(features * weights[:, None], seconds * weights)
        missed = np.abs(features @ found - seconds) / np.maximum(seconds, 1e-9)
        weights = certain * np.sqrt(_NOISE / np.maximum(missed, _NOISE))
    coefficients = np.where(is_seen, found, kept)
    named = dict(zip(STEP_COEFFICIENTS, coefficients.tolist(), strict=True))
    return CostModel.from_json(
        {**prior.to_json(), **named, "fit_r_squared": _r_squared(seconds, features @ coefficients)}
    )


def meeting_total(cost: CostModel, samples: Sequence[StepSample]) -> CostModel:
    """The model with its step coefficients scaled so that all steps together take what was measured."""
    predicted = sum(float(cost.step_seconds(sample.load)) for sample in samples)
    factor = sum(sample.seconds for sample in samples) / predicted
    return replace(cost, **{name: getattr(cost, name) * factor for name in STEP_COEFFICIENTS})


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Agreement of a model with measured steps: R squared, and the median of |predicted / measured - 1|."""

    num_steps: int
    r_squared: float
    median_error: float


def fit_quality(samples: Sequence[StepSample], cost: CostModel) -> FitQuality:
    """Measure how well a cost model meets measured steps. Raises ValueError without samples."""
    if not samples:
        raise ValueError("fit_quality needs at least one measured step; found none.")
    seconds = np.array([sample.seconds for sample in samples])
    predicted = np.array([float(cost.step_seconds(sample.load)) for sample in samples])
    errors = np.abs(predicted / np.maximum(seconds, 1e-9) - 1)
    return FitQuality(len(samples), _r_squared(seconds, predicted), float(np.median(errors)))


def fit_loads(loads: Sequence[tuple[int, float]], prior: CostModel) -> CostModel:
    """Seconds per load and bytes per second from measured (bytes, seconds); the prior where they say nothing.

    The measured loads are from the folder that the engine reads. No tier is taken to be faster than the prior says, and
    none slower than that folder. Relative errors count: most adapters are small, and large ones would decide alone.
    """
    weight_bytes, seconds = np.array(loads, dtype=np.float64).reshape(-1, 2).T
    if len(np.unique(weight_bytes)) < 2:
        return prior
    features, weights = np.column_stack([np.ones(len(seconds)), weight_bytes]), 1 / np.maximum(seconds, 1e-9)
    load_s, byte_s = nonnegative_least_squares(features * weights[:, None], seconds * weights)
    if byte_s <= 0:
        return replace(prior, load_s=float(load_s))
    rate = 1.0 / float(byte_s)
    return replace(
        prior,
        load_s=float(load_s),
        host_bytes_per_s=min(rate, prior.host_bytes_per_s),
        peer_bytes_per_s=min(rate, prior.peer_bytes_per_s),
        storage_bytes_per_s=rate,
    )


def _r_squared(seconds: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return 1.0 - float(((seconds - predicted) ** 2).sum()) / spread if spread > 0 else 1.0


def nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """`x >= 0` minimising `|matrix @ x - target|`, by Lawson and Hanson's active sets.

    `matrix` `[num_samples, num_features]`, `target` `[num_samples]`. Columns are scaled first, so features
    may differ by orders of magnitude.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    num_features = scaled.shape[1]
    x = np.zeros(num_features)
    is_free = np.zeros(num_features, dtype=bool)
    for _ in range(10 * num_features):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[is_free] = -np.inf
        if gradient.max(initial=-np.inf) <= 1e-10:
            break
        is_free[int(np.argmax(gradient))] = True
        x = _within_bounds(scaled, target, x, is_free)
    return np.asarray(x / scale)


def _within_bounds(
    scaled: NDArray[np.float64],
    target: NDArray[np.float64],
    x: NDArray[np.float64],
    is_free: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Solve for the free features; step back to the boundary and fix one while any would turn negative."""
    while True:
        wanted = np.zeros_like(x)
        wanted[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
        is_bad = is_free & (wanted <= 0)
        if not is_bad.any():
            return wanted
        ratio = np.where(is_bad, x / np.maximum(x - wanted, 1e-300), np.inf)
        x = x + ratio.min() * (wanted - x)
        is_free &= ~(is_bad & (ratio <= ratio.min()))
        x[~is_free] = 0.0
