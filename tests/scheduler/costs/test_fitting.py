from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.costs.cost import StepLoad
from lorabatch.scheduler.costs.fitting import (
    StepSample,
    fit,
    fit_loads,
    fit_quality,
    meeting_total,
    nonnegative_least_squares,
)
from lorabatch.scheduler.costs.machines import (
    CPU_SMOLLM2_135M,
    H200_LLAMA_3_8B,
)


def make_samples(model, count, noise, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        adapters = int(rng.integers(0, 9))
        decode = int(rng.integers(0, 257))
        prefill = int(rng.integers(0, 2)) * int(rng.integers(1, 4096))
        load = StepLoad(
            prefill_tokens=prefill,
            decode_rows=decode,
            context_tokens=decode * int(rng.integers(50, 2000)),
            num_adapters=adapters,
            rank_sum=adapters * int(rng.integers(8, 65)),
            rank_tokens=(decode + prefill) * int(rng.integers(8, 65)) * (adapters > 0),
            prefill_pairs=prefill * int(rng.integers(1, 4096)),
            lora_tokens=(decode + prefill) * (adapters > 0),
            drawn_tokens=decode * int(rng.integers(0, 2)),
        )
        samples.append(StepSample(load, float(model.step_seconds(load) * (1 + noise * rng.standard_normal()))))
    return samples


# What is assumed of another GPU.
GPU = H200_LLAMA_3_8B.scaled(3.0)


def test_exact_measurements_give_back_the_model():
    model = replace(H200_LLAMA_3_8B, prefill_pair_s=2e-9, lora_token_s=3e-6, draw_s=4e-6)
    fitted = fit(make_samples(model, 300, 0.0), GPU)
    names = (
        "mixed_step_s",
        "step_s",
        "prefill_token_s",
        "prefill_pair_s",
        "decode_row_s",
        "context_token_s",
        "adapter_s",
    )
    for name in (*names, "lora_token_s", "rank_token_s", "draw_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-4)
    assert fitted.fit_r_squared == pytest.approx(1.0)


def test_mixed_steps_of_engines_that_compute_both_in_one_pass_have_no_price():
    assert fit(make_samples(H200_LLAMA_3_8B, 100, 0.0), CPU_SMOLLM2_135M).mixed_step_s == 0
    both, prompts, rows = StepLoad(prefill_tokens=9, decode_rows=2), StepLoad(prefill_tokens=9), StepLoad(decode_rows=2)
    for cost in (CPU_SMOLLM2_135M, H200_LLAMA_3_8B):
        apart = cost.step_seconds(prompts) + cost.step_seconds(rows) - cost.step_s
        assert cost.step_seconds(both) - apart == pytest.approx(cost.mixed_step_s)


def test_noisy_measurements_still_predict_new_steps():
    fitted = fit(make_samples(H200_LLAMA_3_8B, 500, 0.05), GPU)
    fresh = make_samples(H200_LLAMA_3_8B, 100, 0.0, seed=1)
    errors = [abs(float(fitted.step_seconds(s.load)) / s.seconds - 1) for s in fresh]
    assert np.mean(errors) < 0.05
    assert 0.9 < fitted.fit_r_squared < 1.0


def test_seconds_of_all_steps_together_are_met_where_no_line_meets_each():
    # A quirk of short steps that the model has no term for: there are many of them, and jobs spend little in them.
    samples = [StepSample(StepLoad(decode_rows=1), 0.02)] * 50
    samples += [StepSample(StepLoad(decode_rows=n), 0.01 + 0.002 * n) for n in range(4, 65, 4)]
    fitted = fit(samples, CPU_SMOLLM2_135M)
    full = [sample for sample in samples if float(sample.load.decode_rows) >= 32]
    predicted = sum(float(fitted.step_seconds(sample.load)) for sample in full)
    assert predicted == pytest.approx(sum(sample.seconds for sample in full), rel=0.03)


def test_what_was_not_measured_keeps_the_prior():
    samples = [StepSample(StepLoad(decode_rows=n), 0.01 + 0.001 * n) for n in range(1, 20)]
    fitted = fit(samples, H200_LLAMA_3_8B)
    assert fitted.step_s == pytest.approx(0.01)
    assert fitted.rank_token_s == H200_LLAMA_3_8B.rank_token_s
    assert fitted.storage_bytes_per_s == H200_LLAMA_3_8B.storage_bytes_per_s


def test_no_measurement_is_refused():
    with pytest.raises(ValueError, match="at least one measured step"):
        fit([], H200_LLAMA_3_8B)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_least_squares_meet_the_optimality_conditions(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((20, 5)) * 10.0 ** rng.integers(-4, 4, 5)
    target = rng.standard_normal(20)
    x = nonnegative_least_squares(matrix, target)
    gradient = (matrix / np.linalg.norm(matrix, axis=0)).T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-8


def test_steps_that_were_disturbed_do_not_bend_the_fit():
    samples = make_samples(H200_LLAMA_3_8B, 300, 0.02)
    disturbed = [StepSample(s.load, s.seconds * (3 if i % 6 == 0 else 1)) for i, s in enumerate(samples)]
    fitted = fit(disturbed, GPU)
    assert fit_quality(samples, fitted).median_error < 0.03
    assert fit_quality(disturbed, fitted).r_squared < fit_quality(samples, fitted).r_squared


def test_steps_that_take_turns_are_met_in_total():
    cost = replace(H200_LLAMA_3_8B, merge_s=0.5)
    samples = make_samples(cost, 200, 0.0)
    waited = [replace(s, seconds=s.seconds * (2.0 if i % 3 == 0 else 1.0)) for i, s in enumerate(samples)]
    met = meeting_total(cost, waited)
    measured = sum(s.seconds for s in waited)
    assert sum(float(met.step_seconds(s.load)) for s in waited) == pytest.approx(measured)
    assert met.merge_s == cost.merge_s


def test_loads_give_seconds_per_load_and_bytes_per_second():
    fitted = fit_loads([(10**7, 0.03), (10**8, 0.12), (10**7, 0.03)], H200_LLAMA_3_8B)
    assert (fitted.load_s, fitted.storage_bytes_per_s) == (pytest.approx(0.02), pytest.approx(1e9))
    assert fitted.host_bytes_per_s == pytest.approx(1e9)


def test_loads_of_one_size_say_nothing():
    assert fit_loads([(10**7, 0.03)] * 3, H200_LLAMA_3_8B) == H200_LLAMA_3_8B
