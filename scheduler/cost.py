"""Predicts seconds of steps, merges and adapter loads; every plan asks this interface and no other.

A step's time is linear in what the step does (`StepLoad`), with coefficients that are never negative. Linear is enough
because a step is the sum of reading the weights, the products per token, reading the KV cache, and the adapters' share;
tests and `benchmarks/README.md` say how well it holds. The coefficients come from `fit` on the steps that `lorabatch
profile` measures (least squares, R² reported), or from a preset in `MACHINES`. Presets of papers are derived from what
the papers print, so that their experiments can be repeated; the project's own carry the numbers of its benchmarks.

All loads may be numbers or arrays of one shape; the result has that shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .workload import BASE_MODEL

AdapterSource = Literal["host", "peer", "storage"]
KernelKind = Literal["exact", "padded"]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of one forward pass, or of several passes in arrays.

    The fields from `num_adapters` to `rank_tokens` and `lora_tokens` are the unmerged share: they are zero when all
    rows run merged or on the base model.
    """

    #: Prompt tokens computed.
    prefill_tokens: ArrayLike = 0.0
    #: Rows that get one token.
    decode_rows: ArrayLike = 0.0
    #: KV slots read, over all rows.
    context_tokens: ArrayLike = 0.0
    #: Distinct unmerged adapters.
    num_adapters: ArrayLike = 0.0
    #: LoRA ranks of the distinct unmerged adapters, added up (weights read).
    rank_sum: ArrayLike = 0.0
    #: LoRA ranks of all tokens with an unmerged adapter, added up (products); kernel `padded` counts each token at the
    #: largest rank.
    rank_tokens: ArrayLike = 0.0
    #: Pairs of a computed prompt token and a token it attends to, itself included (`prompt_pairs`).
    prefill_pairs: ArrayLike = 0.0
    #: Tokens with an unmerged adapter (activations gathered and added).
    lora_tokens: ArrayLike = 0.0
    #: Tokens that are drawn rather than the likeliest.
    drawn_tokens: ArrayLike = 0.0
    #: Prompt tokens whose log-probabilities are asked.
    scored_tokens: ArrayLike = 0.0


def prompt_pairs(num_tokens: ArrayLike, num_stored: ArrayLike = 0.0) -> NDArray[np.float64]:
    """Pairs that attention computes for `num_tokens` of a prompt behind `num_stored` of it."""
    tokens = np.asarray(num_tokens, dtype=np.float64)
    return np.asarray(tokens * (np.asarray(num_stored, dtype=np.float64) + (tokens + 1) / 2))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one kind of replica, none negative.

    A coefficient in seconds is what one unit of its field in `StepLoad` costs, unless its comment says otherwise.
    """

    #: Seconds of a step that does nothing.
    step_s: float
    #: Seconds per prompt token computed.
    prefill_token_s: float
    #: Seconds per row that gets one token.
    decode_row_s: float
    #: Seconds per KV slot read.
    context_token_s: float
    #: Seconds added once to a step in which any row is unmerged (launches).
    lora_step_s: float
    #: Seconds per distinct unmerged adapter of a step.
    adapter_s: float
    #: Seconds per unit of `rank_sum`.
    rank_s: float
    #: Seconds per unit of `rank_tokens`.
    rank_token_s: float
    #: Seconds to switch the merged adapter.
    merge_s: float
    #: Seconds of each adapter load, beside those for its bytes.
    load_s: float
    #: Bytes per second of adapters that come from host memory.
    host_bytes_per_s: float
    #: Bytes per second of adapters that come from another replica.
    peer_bytes_per_s: float
    #: Bytes per second of adapters that come from storage.
    storage_bytes_per_s: float
    #: `exact` charges each token its own rank, `padded` the largest rank present (S-LoRA, Punica; LoRAServe section
    #: III-A).
    kernel: KernelKind = "exact"
    #: R squared of `fit` (None: the coefficients are from elsewhere).
    fit_r_squared: float | None = None
    #: Seconds per unit of `prefill_pairs`.
    prefill_pair_s: float = 0.0
    #: Seconds per token with an unmerged adapter.
    lora_token_s: float = 0.0
    #: Seconds added to a replica's first switch, which makes its second copy of the weights.
    first_merge_s: float = 0.0
    #: Seconds added once when prompts and decoding rows share a step; 0 where an engine computes both in one pass.
    mixed_step_s: float = 0.0
    #: Seconds that a token drawn at a temperature costs more than the likeliest one.
    draw_s: float = 0.0

    def step_seconds(self, load: StepLoad) -> NDArray[np.float64]:
        """Seconds of a step, or of each step of an array of them."""
        # Numbers and arrays alike: converting each would take longer than the sum.
        given: Any = load
        seconds = (
            self.step_s
            + self.prefill_token_s * given.prefill_tokens
            + self.decode_row_s * given.decode_rows
            + self.context_token_s * given.context_tokens
            + self.lora_step_s * (given.num_adapters > 0)
            + self.adapter_s * given.num_adapters
            + self.rank_s * given.rank_sum
            + self.rank_token_s * given.rank_tokens
            + self.prefill_pair_s * given.prefill_pairs
            + self.lora_token_s * given.lora_tokens
            + self.mixed_step_s * ((given.prefill_tokens > 0) & (given.decode_rows > 0))
            + self.draw_s * given.drawn_tokens
            + self.scored_token_s * given.scored_tokens
        )
        return np.asarray(seconds, dtype=np.float64)

    @property
    def scored_token_s(self) -> float:
        """Extra seconds of a prompt token whose log-probability is asked: it needs logits, as a decoding row does."""
        return max(0.0, self.decode_row_s - self.prefill_token_s)

    def load_seconds(self, weight_bytes: float, source: AdapterSource) -> float:
        """Seconds until an adapter of `weight_bytes` is on the device."""
        bytes_per_s = {
            "host": self.host_bytes_per_s,
            "peer": self.peer_bytes_per_s,
            "storage": self.storage_bytes_per_s,
        }
        return self.load_s + weight_bytes / bytes_per_s[source]

    def row_seconds(
        self,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        batch_rows: int,
        rank: ArrayLike = 0.0,
        num_adapters: float = 0.0,
        shared_tokens: ArrayLike = 0.0,
        is_drawn: ArrayLike = False,
        is_scored: ArrayLike = False,
    ) -> NDArray[np.float64]:
        """A row's share of a replica whose batch is full: its prefill, and `1 / batch_rows` of its decode steps.

        `rank`: LoRA rank of the row's adapter, 0 when merged or base. `num_adapters`: distinct ones in the batch.
        `shared_tokens`: tokens of the prompt that are not computed again. `is_drawn`: whether its tokens are drawn.
        `is_scored`: whether its prompt's log-probabilities are asked.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        output = np.asarray(output_tokens, dtype=np.float64)
        ranks = np.asarray(rank, dtype=np.float64)
        launches = self.lora_step_s if num_adapters > 0 else 0.0
        shared = self.step_s + launches + (self.adapter_s + self.rank_s * ranks) * num_adapters
        adapter_token_s = self.rank_token_s * ranks + self.lora_token_s * (ranks > 0)
        decode = self.decode_row_s + self.context_token_s * (prompt + output / 2) + adapter_token_s
        decode = decode + self.draw_s * np.asarray(is_drawn, dtype=np.float64)
        computed = prompt - np.asarray(shared_tokens, dtype=np.float64)
        scored_token_s = self.scored_token_s * np.asarray(is_scored, dtype=np.float64)
        prefill = (self.prefill_token_s + adapter_token_s + scored_token_s) * computed
        prefill = prefill + self.prefill_pair_s * prompt_pairs(computed, prompt - computed)
        return np.asarray(prefill + output * (shared / batch_rows + decode), dtype=np.float64)

    def operating_point(
        self, rank: int, *, batch_rows: int, prompt_tokens: float = 512.0, output_tokens: float = 128.0
    ) -> float:
        """Tokens per second of one replica serving only adapters of this rank (LoRAServe section IV-A)."""
        seconds = self.row_seconds(prompt_tokens, output_tokens, batch_rows=batch_rows, rank=rank, num_adapters=1)
        return float((prompt_tokens + output_tokens) / seconds)

    def scaled(self, factor: float) -> CostModel:
        """The model of a replica that is `factor` times as slow: all seconds scaled, bytes per second kept."""
        computed = [f.name for f in fields(self) if f.name.endswith("_s") and "bytes" not in f.name]
        return replace(self, **{name: getattr(self, name) * factor for name in computed})

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every coefficient."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostModel:
        """The model `to_json` wrote. Raises ValueError naming every key that is missing, unknown or negative."""
        names = {f.name for f in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        problems = [f"{name}: missing" for name in sorted(required - set(value))]
        problems += [f"{name}: unknown" for name in sorted(set(value) - names)]
        problems += [
            f"{name}={number}: must be a number, at least 0"
            for name, number in sorted(value.items())
            if name in names - {"kernel", "fit_r_squared"} and not (isinstance(number, int | float) and number >= 0)
        ]
        if problems:
            raise ValueError(f"cost model: {'; '.join(problems)}. Run `lorabatch profile` again.")
        return cls(**value)


def lora_load(
    row_adapter: NDArray[np.int32],
    row_tokens: ArrayLike,
    ranks: NDArray[np.float64],
    *,
    merged_adapter: int | None = None,
    kernel: KernelKind = "exact",
    **others: ArrayLike,
) -> StepLoad:
    """The unmerged share of a step over rows `[num_rows]`; `ranks` `[num_adapters]`. `others`: the step's other loads.

    Mixture: while one adapter is merged, its own rows cost nothing and every other row also subtracts it.
    """
    present, tokens = _tokens_by_adapter(row_adapter, row_tokens)
    is_other = present != (BASE_MODEL if merged_adapter is None else merged_adapter)
    present, tokens = present[is_other], tokens[is_other]
    has_adapter = present != BASE_MODEL
    adapters = present[has_adapter]
    rank_of = ranks[adapters] if len(adapters) else np.zeros(0)
    num_adapters, rank_sum, num_tokens = len(adapters), float(rank_of.sum()), float(tokens.sum())
    lora_tokens = float(tokens[has_adapter].sum())
    rank_tokens = num_tokens * float(rank_of.max(initial=0.0))
    if kernel == "exact":
        rank_tokens = float((tokens[has_adapter] * rank_of).sum())
    if merged_adapter is not None and len(present):
        subtracted = float(ranks[merged_adapter])
        num_adapters, rank_sum = num_adapters + 1, rank_sum + subtracted
        rank_tokens, lora_tokens = rank_tokens + num_tokens * subtracted, lora_tokens + num_tokens
    return StepLoad(
        num_adapters=num_adapters, rank_sum=rank_sum, rank_tokens=rank_tokens, lora_tokens=lora_tokens, **others
    )


# Largest adapter number for which a table of all adapters is faster than sorting those of the rows.
_TABLE_SIZE = 4096


def _tokens_by_adapter(
    row_adapter: NDArray[np.int32], row_tokens: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Adapters of these rows, rising, and the tokens of each."""
    tokens = np.asarray(row_tokens, dtype=np.float64)
    if tokens.ndim == 0:
        tokens = np.full(len(row_adapter), float(tokens))
    if len(row_adapter) and row_adapter.max() >= _TABLE_SIZE:
        adapters, group = np.unique(row_adapter, return_inverse=True)
        sums: NDArray[np.float64] = np.bincount(group, weights=tokens).astype(np.float64)
        return adapters.astype(np.int64), sums
    # The base model is -1.
    slots = row_adapter.astype(np.int64) + 1
    present: NDArray[np.int64] = np.flatnonzero(np.bincount(slots))
    sums = np.bincount(slots, weights=tokens)[present].astype(np.float64)
    return present - 1, sums


# SmolLM2-135M in fp32 on two cores of an AMD EPYC, one of two engines with a thread each: what `lorabatch profile`
# measured with the compiled kernels (benchmarks/results/2026-11-21-fidelity-2-cores.json), rounded. Its contexts are
# short and its fit gives KV slots nothing; reading one is taken to cost what a pair of tokens in a prompt does.
CPU_SMOLLM2_135M = CostModel(
    step_s=0.038,
    prefill_token_s=0.0022,
    decode_row_s=0.0027,
    context_token_s=9e-7,
    lora_step_s=0.0028,
    adapter_s=0.0018,
    rank_s=0.0,
    rank_token_s=6e-6,
    merge_s=0.36,
    load_s=0.0,
    host_bytes_per_s=1.8e8,
    peer_bytes_per_s=1.8e8,
    storage_bytes_per_s=1.8e8,
    prefill_pair_s=9e-7,
    lora_token_s=4.6e-5,
    first_merge_s=1.4,
    # 49,152 logits, by one thread (docs/internals/kernels.md)
    draw_s=3.5e-5,
)
# H200, Llama-3-8B bf16, by arithmetic from the compiled kernels (benchmarks/results/2026-11-26-h200-preset.md): no GPU
# has run them. A step with prompts and decoding rows is two passes, of which the second reads the weights once more,
# without a graph.
H200_LLAMA_3_8B = CostModel(
    step_s=0.0055,
    prefill_token_s=2.2e-5,
    decode_row_s=1.2e-5,
    context_token_s=3.3e-8,
    lora_step_s=0.0004,
    adapter_s=2e-6,
    rank_s=1.2e-6,
    rank_token_s=7e-8,
    merge_s=0.0085,
    load_s=0.002,
    host_bytes_per_s=4e10,
    peer_bytes_per_s=1e10,
    storage_bytes_per_s=1e9,
    prefill_pair_s=1.8e-9,
    mixed_step_s=0.005,
    # with top-p, at 256 rows (benchmarks/results/2026-11-26-gpu-sampling.md)
    draw_s=7e-7,
)
# dLoRA (OSDI 24): one A800 80 GB, Llama-2-7B, rank 8. An iteration of decode takes 50 ms (section 7.1: the SLO of 0.5 s
# is ten of them); the unmerged product costs 38.9 % of the base computation (section 4.1, figure 5), so the three
# unmerged coefficients are 0.389 of their base ones at rank 8; switching takes about two iterations (section 4.2's
# example).
DLORA_A800_LLAMA_2_7B = CostModel(
    step_s=0.040,
    prefill_token_s=1.0e-4,
    decode_row_s=2.5e-4,
    context_token_s=6e-7,
    lora_step_s=0.389 * 0.040,
    adapter_s=0.0,
    rank_s=0.0,
    rank_token_s=0.389 * 1.0e-4 / 8,
    merge_s=0.1,
    load_s=0.005,
    host_bytes_per_s=1.2e10,
    peer_bytes_per_s=1.2e10,
    storage_bytes_per_s=1e9,
)
# LoRAServe: Llama-7B on four A100 (TP 4, section V-B), S-LoRA's kernels, which run at the largest rank present. A
# prompt of 2,000 tokens takes 2.7 times as long at rank 128 as at rank 8 on one device (figure 3) and 1.2 times on
# eight (section III-A3): the excess falls as 1/TP, to 0.43 on four, so rank_token_s is 0.0037 of the base cost of a
# token. Figure 14: loads from a peer cost about what loads from the host do.
LORASERVE_A100_LLAMA_7B = CostModel(
    step_s=0.008,
    prefill_token_s=6.0e-5,
    decode_row_s=6.0e-5,
    context_token_s=6.5e-8,
    lora_step_s=0.001,
    adapter_s=0.0,
    rank_s=0.0,
    rank_token_s=0.0037 * 6.0e-5,
    merge_s=0.1,
    load_s=0.005,
    host_bytes_per_s=1.2e10,
    peer_bytes_per_s=1.0e10,
    storage_bytes_per_s=5e8,
    kernel="padded",
)
MACHINES: Mapping[str, CostModel] = MappingProxyType(
    {
        "cpu-smollm2-135m": CPU_SMOLLM2_135M,
        "h200-llama-3-8b": H200_LLAMA_3_8B,
        "dlora-a800-llama-2-7b": DLORA_A800_LLAMA_2_7B,
        "loraserve-a100-llama-7b": LORASERVE_A100_LLAMA_7B,
    }
)
STEP_COEFFICIENTS = (
    "step_s",
    "prefill_token_s",
    "decode_row_s",
    "context_token_s",
    "lora_step_s",
    "adapter_s",
    "rank_s",
    "rank_token_s",
    "prefill_pair_s",
    "lora_token_s",
    "mixed_step_s",
    "draw_s",
)
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
