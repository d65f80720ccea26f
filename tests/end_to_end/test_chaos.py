"""Scenarios of random kills, preemptions and hangs: 18 in `make test-all`. `make test` has the kill of `test_kills.py`.

`python -m lorabatch.tests.end_to_end.chaos` runs more. Trials wait more than they compute, so some run beside each
other; each test waits for its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import pytest

from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.scenario import Scenario, Signal, Victim, make_scenario
from lorabatch.tests.end_to_end.chaos.trial import Outcome, Trial

# The last six: parts are copied (21) and cut (88), a thread is refused (25), a disk fills and empties (26), a tokenizer
# is away (235), an adapter is away beside another tokenizer (370).
SEEDS = (*range(10), 21, 25, 26, 88, 235, 370)
# With engines of two processes each: leaders and members are killed, and a member is stopped.
GROUP_SEEDS = (19, 22)
_AT_ONCE = 3

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario, Future[Outcome]]]:
    """A future for each scenario that is selected; all of them are under way."""
    folder = tmp_path_factory.mktemp("chaos")
    material = Material(folder / "material")
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    scenarios = [call.params["scenario"] for call in calls if call is not None and "scenario" in call.params]
    for engine, tensor_parallel in {(scenario.engine, scenario.tensor_parallel) for scenario in scenarios}:
        material.undisturbed_digest(engine, tensor_parallel)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        trials = [Trial(scenario, material, folder / f"trial-{place}") for place, scenario in enumerate(scenarios)]
        yield {scenario: pool.submit(trial.run) for scenario, trial in zip(scenarios, trials, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(make_scenario(seed), id=str(seed)) for seed in SEEDS),
        *(pytest.param(make_scenario(seed, 2), id=f"groups-{seed}") for seed in GROUP_SEEDS),
    ],
)
def test_a_disturbed_job_answers_every_row_once_as_if_nothing_had_happened(
    outcomes: dict[Scenario, Future[Outcome]], scenario: Scenario
) -> None:
    outcome = outcomes[scenario].result()
    assert outcome.faults == [], outcome


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_seed_means_the_same_scenario_every_time(tensor_parallel: int) -> None:
    def scenarios(seeds: Iterable[int]) -> list[Scenario]:
        return [make_scenario(seed, tensor_parallel) for seed in seeds]

    assert scenarios(SEEDS) == scenarios(SEEDS)
    blows = [blow for scenario in scenarios(range(200)) for blow in scenario.blows]
    assert {blow.victim for blow in blows} == {*get_args(Victim)} - ({"member"} if tensor_parallel == 1 else set())
    assert {blow.signal for blow in blows} == {*get_args(Signal)}
