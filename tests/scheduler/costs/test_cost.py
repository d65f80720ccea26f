from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorabatch.scheduler.costs.cost import CostModel, StepLoad, lora_load, prompt_pairs
from lorabatch.scheduler.costs.machines import (
    H200_LLAMA_3_8B,
    LORASERVE_A100_LLAMA_7B,
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
