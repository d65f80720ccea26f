from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.cost import (
    CPU_SMOLLM2_135M,
    DLORA_A800_LLAMA_2_7B,
    H200_LLAMA_3_8B,
    LORASERVE_A100_LLAMA_7B,
    MACHINES,
    CostModel,
    StepLoad,
    StepSample,
    fit,
    fit_loads,
    fit_quality,
    lora_load,
    meeting_total,
    nonnegative_least_squares,
    prompt_pairs,
)

RANKS = np.array([8.0, 16.0, 128.0])


def rows(*adapters):
    return np.array(adapters, dtype=np.int32)


def test_an_empty_step_costs_its_fixed_time_only():
    assert H200_LLAMA_3_8B.step_seconds(StepLoad()) == H200_LLAMA_3_8B.step_s


def test_loads_may_be_arrays():
    seconds = H200_LLAMA_3_8B.step_seconds(StepLoad(decode_rows=np.array([0, 10, 20])))
    assert seconds.shape == (3,)
    assert (np.diff(seconds) > 0).all()


def test_base_and_merged_rows_cost_no_adapter():
    assert lora_load(rows(-1, -1), 1, RANKS) == StepLoad()
    assert lora_load(rows(1, 1), 1, RANKS, merged_adapter=1) == StepLoad()


def test_unmerged_rows_pay_their_own_rank():
    load = lora_load(rows(0, 0, 1, -1), 1, RANKS)
    assert (load.num_adapters, load.rank_sum, load.rank_tokens) == (2, 24.0, 32.0)


def test_every_token_with_an_adapter_counts_once_and_once_more_where_the_merged_one_is_subtracted():
    assert lora_load(rows(0, 1, -1), np.array([5, 1, 7]), RANKS).lora_tokens == 6
    assert lora_load(rows(0, 1, -1), np.array([5, 1, 7]), RANKS, merged_adapter=1).lora_tokens == 5 + (5 + 7)


def test_a_prompt_in_chunks_has_the_pairs_of_the_whole():
    assert prompt_pairs(4) == 1 + 2 + 3 + 4
    assert prompt_pairs(3) + prompt_pairs(1, 3) == prompt_pairs(4)


def test_a_padded_kernel_makes_every_row_pay_the_largest_rank():
    load = lora_load(rows(0, 0, 2), 10, RANKS, kernel="padded")
    assert load.rank_tokens == 3 * 10 * 128


def test_mixture_subtracts_the_merged_adapter_from_every_other_row():
    load = lora_load(rows(1, 1, 0, -1), 1, RANKS, merged_adapter=1)
    assert load.num_adapters == 2
    assert load.rank_tokens == (8 + 16) + 16


def test_no_adapters_at_all_is_a_valid_load():
    assert lora_load(rows(-1), 5, np.zeros(0)) == StepLoad()


def test_dlora_unmerged_overhead_is_the_papers_38_9_percent():
    model = DLORA_A800_LLAMA_2_7B
    base = model.step_seconds(StepLoad(prefill_tokens=1000))
    lora = model.step_seconds(StepLoad(prefill_tokens=1000, num_adapters=4, rank_sum=32, rank_tokens=8000))
    assert lora / base == pytest.approx(1.389, rel=0.001)


def test_loraserves_excess_of_rank_128_is_that_of_one_device_shared_by_four():
    model = LORASERVE_A100_LLAMA_7B

    def prefill(rank):
        return (model.prefill_token_s + rank * model.rank_token_s) * 2000

    # 2.7 times rank 8 on one device, 1.2 times on eight: the excess falls as one over their number.
    assert prefill(128) / prefill(8) == pytest.approx(1 + (2.7 - 1) / 4, rel=0.01)
    assert pytest.approx(1.2, abs=0.02) == 1 + (2.7 - 1) / 8


def test_operating_points_fall_with_rank():
    points = [LORASERVE_A100_LLAMA_7B.operating_point(rank, batch_rows=64) for rank in (8, 16, 32, 64, 128)]
    assert points == sorted(points, reverse=True)
    assert points[0] > 1.2 * points[-1]


def test_row_seconds_add_up_to_the_steps_of_a_full_batch():
    model = H200_LLAMA_3_8B
    batch, prompt, output = 64, 100, 50
    share = batch * model.row_seconds(prompt, output, batch_rows=batch)
    contexts = batch * (prompt + np.arange(output))
    steps = model.step_seconds(StepLoad(decode_rows=batch, context_tokens=contexts)).sum()
    prefill = model.prefill_token_s * batch * prompt
    assert share == pytest.approx(steps + prefill, rel=0.01)


def test_loading_from_a_peer_beats_storage():
    model = H200_LLAMA_3_8B
    assert model.load_seconds(1e9, "host") < model.load_seconds(1e9, "peer") < model.load_seconds(1e9, "storage")


def test_a_slower_replica_keeps_its_bandwidths():
    slow = H200_LLAMA_3_8B.scaled(2.0)
    assert slow.step_s == 2 * H200_LLAMA_3_8B.step_s
    assert slow.host_bytes_per_s == H200_LLAMA_3_8B.host_bytes_per_s


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_model_survives_json(name):
    assert CostModel.from_json(json.loads(json.dumps(MACHINES[name].to_json()))) == MACHINES[name]


def test_the_h200_preset_has_the_ratios_of_the_compiled_kernels():
    """Decoding 256 rows behind 1,024 tokens, adapters of rank 16, against none; see the result that derives it."""
    steady = {"decode_rows": 256, "context_tokens": 256 * 1024}
    alone = H200_LLAMA_3_8B.step_seconds(StepLoad(**steady))
    for num_adapters, ratio in ((1, 0.96), (16, 0.94), (64, 0.89), (256, 0.74)):
        lora = {"num_adapters": num_adapters, "rank_sum": 16 * num_adapters, "rank_tokens": 16 * 256}
        assert alone / H200_LLAMA_3_8B.step_seconds(StepLoad(**steady, **lora)) == pytest.approx(ratio, abs=0.005)
    drawn = H200_LLAMA_3_8B.step_seconds(StepLoad(**steady, drawn_tokens=256))
    assert alone / drawn == pytest.approx(0.99, abs=0.005)


def test_terms_that_an_older_profile_lacks_are_nothing():
    value = H200_LLAMA_3_8B.to_json()
    del value["prefill_pair_s"], value["lora_token_s"], value["first_merge_s"], value["draw_s"]
    assert CostModel.from_json(value) == replace(H200_LLAMA_3_8B, prefill_pair_s=0.0, draw_s=0.0)


def test_every_wrong_key_is_named_at_once():
    value = H200_LLAMA_3_8B.to_json()
    del value["step_s"]
    value |= {"speed": 3, "merge_s": -1.0}
    with pytest.raises(ValueError, match=r"step_s: missing; speed: unknown; merge_s=-1.0: must be"):
        CostModel.from_json(value)


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
