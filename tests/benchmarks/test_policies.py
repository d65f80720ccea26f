"""Workloads of the benchmark of policies, and its table."""

from __future__ import annotations

import numpy as np
import pytest

from lorabatch.benchmarks.policies import MIXES, SYSTEMS, Measured, Mix, rows_of, table
from lorabatch.scheduler.policies import PLACEMENTS, POLICIES


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_repeats_of_a_workload_have_the_same_lengths_and_other_prompts(mix: Mix) -> None:
    first, second = rows_of(mix, 1).to_pylist(), rows_of(mix, 2).to_pylist()
    assert len(first) == mix.num_rows
    for one, other in zip(first, second, strict=True):
        assert one["prompt_token_ids"] != other["prompt_token_ids"]
        assert len(one["prompt_token_ids"]) == len(other["prompt_token_ids"])
        assert (one["adapter"], one["max_tokens"]) == (other["adapter"], other["max_tokens"])
    assert max(int(row["adapter"][1:]) for row in first) < len(mix.ranks)
    assert np.ptp([row["max_tokens"] for row in first]) > 0 or not mix.has_known_ends


def test_systems_are_policies_and_placements_that_there_are() -> None:
    assert all(policy in POLICIES and placement in PLACEMENTS for policy, placement in SYSTEMS.values())


def test_the_table_has_medians_simulated_seconds_and_their_error() -> None:
    found = [Measured("w", 2, system, (9.0, 10.0 + i, 30.0), 11.0) for i, system in enumerate(SYSTEMS)]
    assert table(found).splitlines()[-1].startswith("| w | 2 | **10.0** (11.0, +10%) | 11.0 (11.0, +0%) |")
