"""Costs of steps measured from totals: found where reports tell them apart, scaled together where they do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.step_costs import StepCosts, coefficients
from lorabatch.scheduler.messages import StepTotals


def reports(cost: CostModel, num_reports: int, seed: int = 0, noise: float = 0.0) -> list[tuple[StepTotals, float]]:
    """Totals of an engine that takes what `cost` says, with rows and prompts that change from second to second."""
    generator = np.random.default_rng(seed)
    total, seconds, found = np.zeros(len(_KINDS)), 0.0, []
    for _ in range(num_reports):
        steps = int(generator.integers(4, 20))
        rows = int(generator.integers(1, 32)) * steps
        prompt = int(generator.integers(0, 400))
        lora = [steps, 2 * steps, 32.0 * steps, 16.0 * rows]
        tokens = [50.0 * prompt, rows, min(steps, prompt), rows // 2]
        scored = prompt // 3
        did = np.array([steps, prompt, rows, 100 * rows, *lora, *tokens, scored])
        total = total + did
        took_s = float(coefficients(cost) @ did[:-1]) + (cost.decode_row_s - cost.prefill_token_s) * scored
        seconds += took_s * float(1 + noise * generator.standard_normal())
        counts = [int(value) if kind is int else float(value) for value, kind in zip(total, _KINDS, strict=True)]
        found.append((StepTotals(*counts), seconds))
    return found


_KINDS = [type(value) for value in StepTotals().values]


def fed(assumed: CostModel, told: list[tuple[StepTotals, float]], replica: str = "a") -> StepCosts:
    costs = StepCosts(assumed)
    costs.reported(replica, StepTotals(), 0.0)
    for totals, seconds in told:
        costs.reported(replica, totals, seconds)
    return costs


def test_the_fields_of_totals_stand_in_the_order_of_the_coefficients() -> None:
    assert len(StepTotals().values) == len(coefficients(CPU_SMOLLM2_135M)) + 1
    totals = StepTotals(num_steps=3, decode_rows=5, lora_tokens=7)
    expected = 3 * CPU_SMOLLM2_135M.step_s + 5 * CPU_SMOLLM2_135M.decode_row_s + 7 * CPU_SMOLLM2_135M.lora_token_s
    assert np.array(totals.values[:-1]) @ coefficients(CPU_SMOLLM2_135M) == pytest.approx(expected)


def test_a_machine_that_is_slower_by_a_factor_is_found_at_once() -> None:
    costs = fed(CPU_SMOLLM2_135M, reports(CPU_SMOLLM2_135M.scaled(3.0), 2))
    assert costs.is_known
    assert coefficients(costs.measured()) == pytest.approx(3 * coefficients(CPU_SMOLLM2_135M))
    assert costs.slowness(CPU_SMOLLM2_135M) == pytest.approx({"a": 3.0})


@pytest.mark.parametrize("seed", range(5))
def test_coefficients_that_are_wrong_by_different_factors_are_told_apart(seed: int) -> None:
    true = replace(CPU_SMOLLM2_135M.scaled(2.0), step_s=0.2, prefill_token_s=0.001)
    costs = fed(CPU_SMOLLM2_135M, reports(true, 60, seed, noise=0.05))
    found = costs.measured()
    # What was not seen: steps of prompts only.
    prompts = np.array([10.0, 5000, 0, 5000, 0, 0, 0, 0, 1e5, 0, 0, 0])
    assert coefficients(found) @ prompts == pytest.approx(coefficients(true) @ prompts, rel=0.25)
    assert found.step_s == pytest.approx(0.2, rel=0.25)
    # No replica is slower than its own measured model.
    assert costs.slowness(found) == pytest.approx({"a": 1.0}, rel=0.05)


def test_nothing_is_said_before_a_second_of_steps() -> None:
    costs = fed(CPU_SMOLLM2_135M, [(StepTotals(num_steps=4, decode_rows=8), 0.9)])
    assert not costs.is_known
    assert costs.measured() == CPU_SMOLLM2_135M


def test_an_engine_that_was_started_again_goes_on_counting() -> None:
    told = reports(CPU_SMOLLM2_135M, 5)
    costs = fed(CPU_SMOLLM2_135M, [*told, (StepTotals(), 0.0), *told])
    assert costs.seconds == pytest.approx(2 * told[-1][1])
    assert costs.slowness(CPU_SMOLLM2_135M) == pytest.approx({"a": 1.0})


def test_what_an_engine_did_for_others_before_does_not_count() -> None:
    told = reports(CPU_SMOLLM2_135M, 6)
    costs = StepCosts(CPU_SMOLLM2_135M)
    for totals, seconds in told[2:]:
        costs.reported("a", totals, seconds)
    assert costs.seconds == pytest.approx(told[-1][1] - told[2][1])
    assert costs.total().num_steps == told[-1][0].num_steps - told[2][0].num_steps
