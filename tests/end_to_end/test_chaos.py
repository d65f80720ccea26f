"""Scenarios of random kills, preemptions and hangs: two in `make test`, twenty in `make test-all`.

`python -m lorabatch.tests.end_to_end.chaos` runs more. Trials wait more than they compute, so some run beside each
other; each test waits for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import pytest

from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.scenario import Signal, Victim, make_scenario
from lorabatch.tests.end_to_end.chaos.trial import Outcome, Trial

SEEDS = range(20)
# A worker, a coordinator, engines and the owner of rows that move are lost; none of these waits for long.
SHORT_SEEDS = (18, 19)
_AT_ONCE = 6

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Future[Outcome]]]:
    """A future for each seed that is selected; all of them are under way."""
    folder = tmp_path_factory.mktemp("chaos")
    material = Material(folder / "material")
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    scenarios = [make_scenario(call.params["seed"]) for call in calls if call is not None]
    for engine in {scenario.engine for scenario in scenarios}:
        material.undisturbed_digest(engine)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        trials = [Trial(scenario, material, folder / f"trial-{scenario.seed}") for scenario in scenarios]
        yield {scenario.seed: pool.submit(trial.run) for scenario, trial in zip(scenarios, trials, strict=True)}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SHORT_SEEDS else pytest.mark.long) for seed in SEEDS]
)
def test_a_disturbed_job_answers_every_row_once_as_if_nothing_had_happened(
    outcomes: dict[int, Future[Outcome]], seed: int
) -> None:
    outcome = outcomes[seed].result()
    assert outcome.faults == [], outcome


def test_a_seed_means_the_same_scenario_every_time() -> None:
    assert [make_scenario(seed) for seed in SEEDS] == [make_scenario(seed) for seed in SEEDS]
    blows = [blow for seed in range(200) for blow in make_scenario(seed).blows]
    assert {blow.victim for blow in blows} == {*get_args(Victim)}
    assert {blow.signal for blow in blows} == {*get_args(Signal)}
