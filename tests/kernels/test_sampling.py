"""Sampling without sorting against sorting, to the bit, and its random numbers against the CPU engine's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.runner.sampler import uniforms
from lorabatch.kernels.sampling import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE, SamplingRows, sample_tokens
from lorabatch.kernels.sampling.reference import sample, uniform
from lorabatch.kernels.sampling.types import weights_of

KERNELS = "lorabatch.kernels.sampling.triton"
VOCAB = 1500  # more than one block of the kernels


def rows_for(device: torch.device, cuts: list[tuple[float, int, float]], seed: int = 3) -> SamplingRows:
    """One row per (temperature, top_k, top_p)."""
    count = len(cuts)
    return SamplingRows(
        temperature=torch.tensor([t for t, _, _ in cuts], dtype=torch.float32, device=device),
        top_k=torch.tensor([k for _, k, _ in cuts], dtype=torch.int32, device=device),
        top_p=torch.tensor([p for _, _, p in cuts], dtype=torch.float64, device=device),
        seeds=torch.full((count,), seed, device=device),
        streams=torch.arange(count, device=device) * 1_000_003,
        positions=torch.arange(count, device=device) % 7,
    )


def both(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    expected = torch.empty(len(logits), dtype=torch.int64)
    sample(expected, logits.cpu(), SamplingRows(*(getattr(rows, f).cpu() for f in SamplingRows.__slots__)))
    return sample_tokens(logits, rows).cpu(), expected


@pytest.mark.parametrize("keys", [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**63, 12), (7, 2**40 + 5, 10**6)])
def test_the_twin_s_random_numbers_are_the_engine_s(keys: tuple[int, int, int]) -> None:
    columns = [np.array([key], np.uint64) for key in keys]
    assert uniform(*keys) == uniforms(*columns)[0]


@pytest.mark.parametrize(
    "cut",
    [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (1.0, 5, 0.6),
        *(pytest.param(cut, marks=pytest.mark.long) for cut in ((2.0, 9999, 0.3), (0.7, 0, 0.9), (1.3, 40, 1.0))),
        *(pytest.param(cut, marks=pytest.mark.long) for cut in ((1.0, 1, 0.5), (1.0, 9999, 1.0))),
    ]
    + [
        pytest.param((temperature, *cut), marks=pytest.mark.long)
        for temperature in (SMALLEST_TEMPERATURE, 1e-6, LARGEST_TEMPERATURE)
        for cut in ((0, 1.0), (3, 0.9), (0, 0.5))
    ],
    ids=str,
)
def test_rows_are_drawn_as_by_sorting(device: torch.device, cut: tuple[float, int, float]) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)).to(device) * 3
    found, expected = both(logits, rows_for(device, [cut] * 6))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("capacity", [16, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("spread", [1.0, *(pytest.param(spread, marks=pytest.mark.long) for spread in (0.01, 8.0))])
def test_draws_are_the_same_from_few_candidates_and_from_the_whole_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capacity: int, spread: float
) -> None:
    """Flat rows have too many candidates, steep ones few; cuts that leave more than the nearest need others."""
    monkeypatch.setattr(f"{KERNELS}._CAPACITY", capacity)
    cuts = [(0.7, 0, 0.5), (1.0, 0, 0.9), (1.5, 0, 0.99), (1.0, 0, 1 - 1e-9), (0.7, 20, 1.0), (1.0, 60, 0.9)]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)).to(device) * spread
    found, expected = both(logits, rows_for(device, cuts))
    assert found.tolist() == expected.tolist()


def test_rows_of_one_step_may_differ_in_everything(device: torch.device, dtype: torch.dtype) -> None:
    cuts = [(0.0, 0, 1.0), (1.0, 3, 1.0), (0.5, 0, 0.8), (1.0, 0, 1.0), (0.0, 5, 0.1)]
    logits = torch.randn(5, 130, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    found, expected = both(logits, rows_for(device, cuts))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "cut",
    [(0.0, 0, 1.0), (1.0, 0, 0.5), (1.0, 6, 0.7), (SMALLEST_TEMPERATURE, 0, 0.5)]
    + [
        pytest.param(cut, marks=pytest.mark.long)
        for cut in ((1.0, 4, 1.0), (SMALLEST_TEMPERATURE, 0, 1.0), (SMALLEST_TEMPERATURE, 4, 1.0))
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [4, pytest.param(4096, marks=pytest.mark.long)])
def test_equal_logits_stand_in_order_of_token_ids(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cut: tuple[float, int, float], capacity: int
) -> None:
    """Also where they are more than are copied."""
    monkeypatch.setattr(f"{KERNELS}._CAPACITY", capacity)
    logits = torch.zeros(4, 40, device=device)
    logits[:, ::2] = -0.0
    logits[:, 30:] = 1.0
    found, expected = both(logits, rows_for(device, [cut] * 4))
    assert found.tolist() == expected.tolist()


def test_withheld_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((8, 50), -torch.inf, device=device)
    logits[:, [7, 31]] = torch.tensor([0.0, 0.1], device=device)
    found, expected = both(logits, rows_for(device, [(1.0, 0, 1.0), (1.0, 5, 0.99)] * 4))
    assert found.tolist() == expected.tolist()
    assert set(found.tolist()) == {7, 31}


def test_a_row_s_token_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4)).to(device)
    rows = rows_for(device, [(1.0, 10, 0.9)] * 4)
    together = sample_tokens(logits, rows)
    alone = SamplingRows(*(getattr(rows, f)[2:3] for f in SamplingRows.__slots__))
    assert int(sample_tokens(logits[2:3], alone)) == int(together[2])


def test_the_number_of_rows_may_be_zero(device: torch.device) -> None:
    assert sample_tokens(torch.empty(0, 10, device=device), rows_for(device, [])).shape == (0,)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # differences that overflow are meant to
@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 2, 127, 128, 129, 700]),
    spread=st.sampled_from([0.0, 1e-3, 0.5, 3.0, 20.0, 1e38]),
    decimals=st.sampled_from([0, 1, 6]),
    sizes=st.sampled_from([(1, 2, 16), (4, 3, 16), (16, 1, 64), (2, 4, 4096)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_every_row_is_drawn_as_by_sorting(
    device: torch.device,
    seed: int,
    vocab_size: int,
    spread: float,
    decimals: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Greedy and drawn rows side by side; many splits of few logits; candidates that never fit."""
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((3, vocab_size)) * spread).round(decimals).clip(-3e38, 3e38)
    values[:, generator.integers(0, vocab_size, vocab_size // 5)] = -np.inf
    values[:, generator.integers(0, vocab_size)] = spread
    logits = torch.from_numpy(values).to(device, dtype)
    logits = torch.where(logits.isposinf() | logits.isnan(), 0, logits)
    cuts = zip(
        generator.choice([0.0, SMALLEST_TEMPERATURE, 0.1, 1.0, 1.5, 100.0, LARGEST_TEMPERATURE], 3).tolist(),
        generator.choice([0, 0, 1, 50, 300, 10**6], 3).tolist(),
        generator.choice([1.0, 1e-9, 0.5, 0.9, 0.99, 1 - 2**-53], 3).tolist(),
        strict=True,
    )
    rows = rows_for(device, [(t, k, p) for t, k, p in cuts], seed)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_SPLITS", "_ROUNDS", "_CAPACITY"), sizes, strict=True):
            patch.setattr(f"{KERNELS}.{name}", size)
        patch.setattr(f"{KERNELS}._LANES", 32)
        found, expected = both(logits, rows)
    assert found.tolist() == expected.tolist()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_no_numbers_give_some_token_and_leave_other_rows_alone(device: torch.device) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(6)).to(device)
    logits[1, 200], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    for cut in ((1.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.9), (1.0, 20, 0.9)):
        rows = rows_for(device, [cut] * 5)
        found, expected = both(logits, rows)
        assert found[[0, 4]].tolist() == expected[[0, 4]].tolist()
        assert ((found >= 0) & (found < 300)).all()


@pytest.mark.long
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sums_of_the_largest_vocabularies_fit_whole_numbers(device: torch.device, top_p: float) -> None:
    """Of 262,208 equal logits the weights are 2^62."""
    logits = torch.zeros(1, 262_208, device=device)
    found, expected = both(logits, rows_for(device, [(1.0, 0, top_p)], seed=12))
    assert found.tolist() == expected.tolist()
    assert found.max() > 2**17


def test_weights_are_those_of_the_softmax_to_fp32() -> None:
    logits = torch.cat([torch.linspace(-29, 0, 20_001), torch.tensor([-1e-30, -31.0, -1e30, -torch.inf, torch.nan])])
    weights = weights_of(logits, 0.0, 1.0)
    exact = logits[:20_001].double().exp() * 2**44
    assert int(weights[20_000]) == int(weights[20_001]) == 2**44
    assert (weights[-4:] == 0).all()
    # one bit is cut off; the exponent is rounded in fp32, and so is the power
    assert ((weights[:20_001] - exact).abs() <= 1 + 4e-6 * exact).all()
    assert ((weights[18_001:20_001] - exact[18_001:]).abs() <= 5e-7 * exact[18_001:]).all()
