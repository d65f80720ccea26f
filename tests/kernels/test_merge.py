"""The merge pass against plain matrices; what it must never do: drift, or touch the pristine weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.merge import LoraPair, MergeJob, merge_weights
from lorabatch.kernels.merge.reference import merge


def make_job(shape: tuple[int, int], ranks: list[int], dtype: torch.dtype, pair_dtype: torch.dtype) -> MergeJob:
    out_features, in_features = shape
    base = torch.randn(shape).to(dtype)
    pairs = [
        LoraPair(torch.randn(r, in_features).to(pair_dtype), torch.randn(out_features, r).to(pair_dtype), 0.3 * r)
        for r in ranks
    ]
    return MergeJob(torch.full_like(base, torch.nan), base, tuple(pairs))


def on(device: torch.device, job: MergeJob) -> MergeJob:
    pairs = tuple(LoraPair(p.a.to(device), p.b.to(device), p.scaling) for p in job.pairs)
    return MergeJob(job.live.to(device), job.base.to(device), pairs)


@pytest.mark.parametrize("pair_dtype", [torch.float32, torch.float16])
def test_layers_of_all_shapes_merge_in_one_launch(
    assert_close: Callable[..., None], dtype: torch.dtype, device: torch.device, pair_dtype: torch.dtype
) -> None:
    jobs = [
        on(device, make_job(shape, ranks, dtype, pair_dtype))
        for shape, ranks in [((70, 40), [8]), ((1, 130), [1]), ((40, 24), [20, 3]), ((16, 16), []), ((64, 129), [64])]
    ]
    merge_weights(jobs)
    for job in jobs:
        expected = MergeJob(torch.empty_like(job.base, dtype=torch.float32), job.base, job.pairs)
        merge([expected], pair_dtype, torch.zeros(1, dtype=torch.int32))
        assert_close(job.live, expected.live)


def test_a_layer_without_pairs_is_copied_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    job = on(device, make_job((33, 40), [], dtype, dtype))
    merge_weights([job])
    assert torch.equal(job.live, job.base)


def test_merging_twice_gives_the_same_bits_and_leaves_the_base_alone(dtype: torch.dtype, device: torch.device) -> None:
    job = on(device, make_job((33, 40), [20], dtype, dtype))
    base = job.base.clone()
    merge_weights([job])
    first = job.live.clone()
    merge_weights([job])
    assert torch.equal(job.live, first)
    assert torch.equal(job.base, base)


def test_rows_of_a_packed_layer_merge_on_their_own(dtype: torch.dtype, device: torch.device) -> None:
    job = on(device, make_job((40, 24), [4], dtype, dtype))
    packed = torch.full((60, 24), 5.0, dtype=dtype, device=device)
    merge_weights([MergeJob(packed[10:50], job.base, job.pairs)])
    merge_weights([job])
    assert torch.equal(packed[10:50], job.live)
    assert bool((packed[:10] == 5).all())
    assert bool((packed[50:] == 5).all())


def test_pairs_whose_b_is_stored_transposed_give_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    jobs = [
        on(device, make_job(shape, ranks, dtype, dtype)) for shape, ranks in (((70, 40), [20]), ((33, 129), [1, 64]))
    ]
    merge_weights(jobs)
    expected = [job.live.clone() for job in jobs]
    by_rank = [
        MergeJob(
            torch.full_like(job.base, torch.nan),
            job.base,
            tuple(LoraPair(p.a, p.b.t().contiguous().t(), p.scaling) for p in job.pairs),
        )
        for job in jobs
    ]
    merge_weights(by_rank)
    for job, bits in zip(by_rank, expected, strict=True):
        assert torch.equal(job.live, bits)
    with pytest.raises(ValueError, match="transposed in memory, of others not"):
        merge_weights([*jobs, *by_rank])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_reported(dtype: torch.dtype, device: torch.device, value: float) -> None:
    """Infinity is what an overflow rounds to."""
    jobs = [on(device, make_job((70, 40), [4], dtype, dtype)) for _ in range(2)]
    assert int(merge_weights(jobs)) == 0
    jobs[1].base[69, 39] = value
    assert int(merge_weights(jobs)) == 1


def test_pairs_that_do_not_fit_are_named() -> None:
    job = make_job((8, 16), [2], torch.float32, torch.float32)
    with pytest.raises(ValueError, match="live is base itself"):
        merge_weights([MergeJob(job.base, job.base, job.pairs)])
    wrong = LoraPair(torch.zeros(2, 15), torch.zeros(8, 2), 1.0)
    with pytest.raises(ValueError, match=r"job 0: A \[2, 15\] and B \[8, 2\] do not fit W \[8, 16\]"):
        merge_weights([MergeJob(job.live, job.base, (wrong,))])
