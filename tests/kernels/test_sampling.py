"""Sampling without sorting against sorting, and its random numbers against the CPU engine's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorabatch.engine.runner.sampler import uniforms
from lorabatch.kernels.sampling import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE, SamplingRows, sample_tokens
from lorabatch.kernels.sampling.reference import sample, uniform

VOCAB = 1500  # more than one block of the kernel


def rows_for(device: torch.device, settings: list[tuple[float, int, float]], seed: int = 3) -> SamplingRows:
    """One row per (temperature, top_k, top_p)."""
    count = len(settings)
    return SamplingRows(
        temperature=torch.tensor([t for t, _, _ in settings], dtype=torch.float32, device=device),
        top_k=torch.tensor([k for _, k, _ in settings], dtype=torch.int32, device=device),
        top_p=torch.tensor([p for _, _, p in settings], dtype=torch.float64, device=device),
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
        (0.7, 0, 0.9),
        (1.3, 40, 1.0),
        (1.0, 5, 0.6),
        (1.0, 1, 0.5),
        (2.0, 9999, 0.3),
        (1.0, 9999, 1.0),
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


@pytest.mark.parametrize("capacity", [16, 128])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_draws_are_the_same_from_few_candidates_and_from_the_whole_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capacity: int, spread: float
) -> None:
    """Flat rows have too many candidates, steep ones few; cuts that leave more than the nearest need others."""
    monkeypatch.setattr("lorabatch.kernels.sampling.triton._CAPACITY", capacity)
    settings = [(0.7, 0, 0.5), (1.0, 0, 0.9), (1.5, 0, 0.99), (1.0, 0, 1 - 1e-9), (0.7, 20, 1.0), (1.0, 60, 0.9)]
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(5)).to(device) * spread
    found, expected = both(logits, rows_for(device, settings * 2))
    assert found.tolist() == expected.tolist()


def test_rows_of_one_step_may_differ_in_everything(device: torch.device, dtype: torch.dtype) -> None:
    settings = [(0.0, 0, 1.0), (1.0, 3, 1.0), (0.5, 0, 0.8), (1.0, 0, 1.0), (0.0, 5, 0.1)]
    logits = torch.randn(5, 130, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    found, expected = both(logits, rows_for(device, settings))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "cut",
    [(0.0, 0, 1.0), (1.0, 0, 0.5), (1.0, 4, 1.0), (1.0, 6, 0.7)]
    + [(SMALLEST_TEMPERATURE, *cut) for cut in ((0, 1.0), (4, 1.0), (0, 0.5))],
    ids=str,
)
def test_equal_logits_stand_in_order_of_token_ids(device: torch.device, cut: tuple[float, int, float]) -> None:
    logits = torch.zeros(12, 40, device=device)
    logits[:, ::2] = -0.0
    logits[:, 30:] = 1.0
    found, expected = both(logits, rows_for(device, [cut] * 12))
    assert found.tolist() == expected.tolist()


def test_withheld_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((20, 50), -torch.inf, device=device)
    logits[:, [7, 31]] = torch.tensor([0.0, 0.1], device=device)
    found, expected = both(logits, rows_for(device, [(1.0, 0, 1.0), (1.0, 5, 0.99)] * 10))
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
