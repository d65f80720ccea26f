"""`python -m lorabatch.benchmarks.simulation.replay OUTPUT`: does the scheduler still decide as it did in a real run?

The recorded events of the job go through a new Scheduler, whose commands must be the recorded ones.
"""

from __future__ import annotations

import sys

from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.planning.plan import read_plan
from lorabatch.scheduler.simulation.replay import ReplayOutcome, replay


def replay_job(store: JobStore) -> ReplayOutcome:
    """Replay all runs of a job. Raises `MissingFileError` without a plan or events."""
    return replay(read_plan(store).shards, store.read_events())


def main(output: str) -> int:
    """Print what was found; 0 when every command agrees."""
    found = replay_job(JobStore(output))
    print(f"{found.num_events} events, {found.num_commands} commands agree")
    if found.num_passed_over:
        print(f"passed over: {found.num_passed_over} runs of another version")
    if found.first_difference is None:
        return 0
    number, recorded, given = found.first_difference
    print(f"event {number}: recorded {recorded}, given now {given}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
