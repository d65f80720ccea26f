"""How good the time left is that a running job shows, and its range: simulated small jobs that nothing was fitted to.

python -m lorabatch.benchmarks.simulation.time_left [--jobs 60] [--seed 0]

Jobs of 20 to 300 rows (ten times as many on GPUs) on one to three workers. In half of them lengths are known; in the
others answers are much shorter than half of `max_tokens`, as they often are; these are played once more with what an
earlier job of the same kind has kept of its answers. Costs of the plan are exact, as a profile
of another hour (off by 12 %, one standard deviation), or a guess (off by half). Once a second the scheduler estimates
the time left from the reports of simulated workers, as it does in a real job. Every job counts alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorabatch.benchmarks.simulation.lengths import kept_answers
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.batchers.batching import ReplicaFacts
from lorabatch.scheduler.estimates.lengths import AnswerLengths, LengthEstimator
from lorabatch.scheduler.estimates.time_left import PlannedJob, TimeLeft, Work
from lorabatch.scheduler.estimates.work_left import WorkLeft
from lorabatch.scheduler.messages import Command, Event
from lorabatch.scheduler.policies import make_scheduler
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.simulation.replica import SimulatedReplica
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import draw_adapters, draw_lengths, make_adapters, make_workload
from lorabatch.scheduler.simulation.timeline import Timeline
from lorabatch.scheduler.workload import Workload

MAX_TOKENS = 400
# Standard deviations of the logarithm of the plan's costs over the true ones.
_ERRORS = (0.0, 0.12, 0.5)
_SHOW_S = 1.0
_HOP_S = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A job as it is, and how far its plan is off."""

    #: Rows of the job, with the true lengths of their answers.
    rows: Workload
    #: Settings of the job, with the true costs.
    settings: RunSettings
    #: Seconds of each worker over those of the true costs; the plan does not know them.
    slowness: tuple[float, ...]
    #: Whether the plan knows the lengths of answers.
    is_known: bool
    #: Adapter -> lengths of its answers in an earlier job; empty without such a job.
    earlier: Mapping[str | None, AnswerLengths]
    #: Whether the plan's costs are a guess rather than a profile's.
    is_guess: bool
    #: Costs of the plan over the true ones.
    error: float

    @property
    def planned(self) -> RunSettings:
        """Settings with which the job is planned: costs that are off by `error`, lengths of an earlier job."""
        engine = replace(self.settings.engine, cost=self.settings.cost.scaled(self.error))
        lengths = {(adapter_id, 0): found for adapter_id, found in self.earlier.items()}
        return replace(self.settings, engine=engine, lengths=lengths)

    @property
    def known_lengths(self) -> Mapping[str | None, AnswerLengths] | None:
        """Lengths of an earlier job, for the scheduler; None where all lengths are known."""
        return None if self.is_known else self.earlier

    @property
    def lengths(self) -> str:
        """Kind of lengths in the table."""
        return "known" if self.is_known else "of an earlier job" if self.earlier else "unknown"


def draw(seed: int) -> list[Job]:
    """The job of a seed, and where lengths are unknown the same with those of an earlier job."""
    generator = np.random.default_rng(seed)
    machine = str(generator.choice(["cpu-smollm2-135m", "h200-llama-3-8b"]))
    settings = RunSettings.of_machine(machine, batch_rows=int(generator.choice([16, 32, 64])))
    num_rows = int(np.exp(generator.uniform(np.log(20), np.log(300)))) * (1 if machine.startswith("cpu") else 10)
    num_adapters, num_workers = int(generator.choice([1, 4, 16])), int(generator.choice([1, 2, 3]))
    adapters = make_adapters(generator.choice([8, 16, 32], num_adapters).tolist())
    prompt = draw_lengths(generator, num_rows, int(generator.choice([40, 120, 400])), 0.7, 1500)
    both = generator.integers(8, 120, num_rows), draw_lengths(generator, num_rows, 60, 0.9, MAX_TOKENS)
    is_even = generator.random() < 0.5
    output = np.clip(both[not is_even], 1, MAX_TOKENS).astype(np.int32)
    is_known, error = bool(generator.random() < 0.5), float(generator.choice(_ERRORS))
    adapter = draw_adapters(generator, num_rows, np.full(num_adapters, 1 / num_adapters))
    job = Job(
        make_workload(adapters, adapter, prompt, output, max_tokens=output if is_known else MAX_TOKENS),
        replace(settings, length_share=1.0 if is_known else settings.length_share),
        tuple(np.exp(generator.normal(0, 0.05, num_workers)).tolist()),
        is_known,
        {},
        error == max(_ERRORS),
        float(np.exp(generator.normal(0, error))),
    )
    if is_known:
        return [job]
    before = generator.integers(8, 120, num_rows), draw_lengths(generator, num_rows, 60, 0.9, MAX_TOKENS)
    answers = np.clip(before[not is_even], 1, MAX_TOKENS).astype(np.int32)
    earlier = kept_answers(replace(job.rows, output_tokens=answers))
    return [job, replace(job, earlier=earlier)]


class Watched:
    """The scheduler, and what a coordinator would show once a second: seconds since the start, and the estimate."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.shown: list[tuple[float, TimeLeft]] = []

    def handle(self, event: Event) -> list[Command]:
        """Have the scheduler handle the event, and keep its estimate once a second."""
        commands = self._scheduler.handle(event)
        if event.time_s >= (self.shown[-1][0] if self.shown else 0.0) + _SHOW_S:
            left = self._scheduler.time_left(event.time_s)
            assert left is not None, "the scheduler knows the plan"
            self.shown.append((event.time_s, left))
        return commands


def play(job: Job) -> tuple[float, list[tuple[float, TimeLeft]]]:
    """Seconds that the job took, and what was shown while it ran."""
    planned, num_workers = job.planned, len(job.slowness)
    cut = prediction.cut_rows(planned, job.rows, num_workers)
    predicted_s = prediction.play_expected(planned, job.rows, cut.plan, num_workers).metrics.makespan_s
    num_places = job.settings.limits.batch_rows * num_workers
    work = WorkLeft(cut.plan.shards, job.known_lengths, LengthEstimator()).now(num_places, Work())
    timeline = Timeline.empty(job.rows.num_rows, num_workers)
    settings = replace(
        planned.scheduler(num_workers, job.rows.adapters),
        planned=PlannedJob(predicted_s, work, planned.cost, num_workers, job.is_guess, num_places, job.known_lengths),
    )
    watched = Watched(make_scheduler(cut.plan.shards, settings=settings))
    replicas = [_replica(job, number, timeline) for number in range(num_workers)]
    cluster = Cluster((0.0,) * num_workers, hop_s=_HOP_S)
    limits = prediction.replica_settings(job.settings)
    simulation = JobSimulation(job.rows, cut.plan, watched.handle, replicas, cluster, timeline, limits)
    makespan_s = simulation.run()
    assert simulation.failure is None, simulation.failure
    return makespan_s, watched.shown


def _replica(job: Job, number: int, timeline: Timeline) -> SimulatedReplica:
    ranks, lengths = np.array([adapter.rank for adapter in job.rows.adapters], np.float64), LengthEstimator()
    facts = ReplicaFacts(
        cost=job.planned.cost,
        ranks=lambda: ranks,
        must_merge=lambda adapter: False,
        max_batch_rows=job.settings.limits.batch_rows,
        lengths=lengths,
    )
    cost, batcher = job.settings.cost.scaled(job.slowness[number]), job.planned.batcher(facts)
    settings = prediction.replica_settings(job.settings)
    return SimulatedReplica(number, job.rows, cost, batcher, settings, timeline, lengths)


def table(found: Sequence[tuple[Job, float, list[tuple[float, TimeLeft]]]]) -> str:
    """Table by kind of lengths and by share of the job done: how many ranges held, and errors as a share of the job."""
    lines = ["| lengths | of the job done | jobs | end within the range | median error, share of the job |"]
    lines.append("|---|---|---:|---:|---:|")
    for kind in ("known", "of an earlier job", "unknown"):
        for least, most in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (0.0, 1.0)):
            held, errors = [], []
            for job, end_s, shown in found:
                moments = [(end_s - at_s, left) for at_s, left in shown if least * end_s <= at_s < most * end_s]
                if job.lengths == kind and moments:
                    held.append(np.mean([left.least_s <= true_s <= left.most_s for true_s, left in moments]))
                    errors.append(np.mean([abs(left.seconds - true_s) / end_s for true_s, left in moments]))
            if held:
                part, median = f"{least:.0%} to {most:.0%}", float(np.median(errors))
                lines.append(f"| {kind} | {part} | {len(held)} | {np.mean(held):.0%} | {median:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.time_left", description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    chosen = parser.parse_args()
    jobs = [job for number in range(chosen.jobs) for job in draw(chosen.seed + number)]
    print(table([(job, *play(job)) for job in jobs]))


if __name__ == "__main__":
    main()
