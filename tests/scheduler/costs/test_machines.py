from __future__ import annotations

import json

import pytest

from lorabatch.scheduler.costs.cost import CostModel, StepLoad
from lorabatch.scheduler.costs.machines import (
    DLORA_A800_LLAMA_2_7B,
    H200_LLAMA_3_8B,
    LORASERVE_A100_LLAMA_7B,
    MACHINES,
)


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
