"""Twenty scenarios of random kills, preemptions and hangs. `python -m lorabatch.tests.end_to_end.chaos` runs more.

Trials wait more than they compute, so some run beside each other; each test waits for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import pytest

from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.scenario import Victim, make_scenario
from lorabatch.tests.end_to_end.chaos.trial import Outcome, Trial

SEEDS = range(20)
_AT_ONCE = 6

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[Outcome]]]:
    """A future per seed; all of them are under way."""
    folder = tmp_path_factory.mktemp("chaos")
    material = Material(folder / "material")
    for engine in ("echo", "uneven", "real"):
        material.undisturbed_digest(engine)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        trials = {seed: Trial(make_scenario(seed), material, folder / f"trial-{seed}") for seed in SEEDS}
        yield {seed: pool.submit(trial.run) for seed, trial in trials.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disturbed_job_answers_every_row_once_as_if_nothing_had_happened(
    outcomes: dict[int, Future[Outcome]], seed: int
) -> None:
    outcome = outcomes[seed].result()
    assert outcome.faults == [], outcome


def test_a_seed_means_the_same_scenario_every_time() -> None:
    assert [make_scenario(seed) for seed in SEEDS] == [make_scenario(seed) for seed in SEEDS]
    blows = [blow for seed in range(200) for blow in make_scenario(seed).blows]
    assert {blow.victim for blow in blows} == {*get_args(Victim)}
    assert {blow.signal for blow in blows} == {"KILL", "TERM", "STOP"}
