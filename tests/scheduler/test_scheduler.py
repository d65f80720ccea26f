from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M as CPU
from lorabatch.scheduler.messages import (
    FailJob,
    FinishedRows,
    FinishJob,
    FoundReplica,
    Recall,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    StepTotals,
    Tick,
    WorkersSeen,
)
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.tests.scheduler.unfinished import unfinished


def make_shards(count, *, rows=32, waves=1, mode="unmerged"):
    return [
        Shard(i, i % waves, mode, (f"adapter-{i % waves}",), rows, rows * 50, rows * (200 - i % 7))
        for i in range(count)
    ]


def opened(commands):
    return [(c.shard_id, c.replica_id, c.attempt) for c in commands if isinstance(c, RunShard)]


def test_a_job_without_shards_finishes_at_once():
    assert Scheduler([]).handle(Tick(0.0)) == [FinishJob()]


def test_a_replica_keeps_two_batches_of_rows_open():
    scheduler = Scheduler(make_shards(20))
    assert len(opened(scheduler.handle(ReplicaJoined(0.0, "a", 64)))) == 4
    left = unfinished(*((i, 10) for i in range(4)))
    more = opened(scheduler.handle(ReplicaReported(1.0, "a", 40, 40, 100.0, (), left)))
    assert len(more) == 3
    scheduler.check_integrity()


def test_shards_go_out_longest_first_within_a_wave():
    scheduler = Scheduler(make_shards(4), settings=SchedulerSettings(open_batches=100))
    assert [s for s, _, _ in opened(scheduler.handle(ReplicaJoined(0.0, "a", 64)))] == [0, 1, 2, 3]


def test_a_replica_stays_with_its_wave_while_another_takes_the_other():
    scheduler = Scheduler(make_shards(40, waves=2), settings=SchedulerSettings(expected_replicas=2))
    first = opened(scheduler.handle(ReplicaJoined(0.0, "a", 64)))
    second = opened(scheduler.handle(ReplicaJoined(0.0, "b", 64)))
    waves = [{s % 2 for s, _, _ in commands} for commands in (first, second)]
    assert sorted(waves, key=min) == [{0}, {1}]


def test_a_short_job_is_shared_with_replicas_still_to_come():
    scheduler = Scheduler(make_shards(4, rows=16), settings=SchedulerSettings(expected_replicas=2))
    first = opened(scheduler.handle(ReplicaJoined(0.0, "a", 64)))
    second = opened(scheduler.handle(ReplicaJoined(0.5, "b", 64)))
    assert (len(first), len(second)) == (2, 2)


def test_shards_without_engine_work_are_opened_beside_the_others():
    idle = [Shard(i, 9, "none", (), 500, 0, 0) for i in range(4, 8)]
    scheduler = Scheduler(make_shards(4) + idle)
    commands = opened(scheduler.handle(ReplicaJoined(0.0, "a", 1000)))
    assert {s for s, _, _ in commands} == {0, 1, 2, 3, 4}
    commands = opened(scheduler.handle(ShardCommitted(1.0, 4, "a")))
    assert [s for s, _, _ in commands] == [5]


def test_a_lost_replica_gives_its_shards_back_with_the_next_attempt():
    scheduler = Scheduler(make_shards(4))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    assert scheduler.handle(WorkersSeen(1.0, ("b",))) == [RemoveReplica("a", "its worker is gone")]
    scheduler.check_integrity()
    again = opened(scheduler.handle(ReplicaJoined(2.0, "b", 64)))
    assert again == [(i, "b", 1) for i in range(4)]


def test_a_failed_shard_is_tried_elsewhere_first():
    scheduler = Scheduler(make_shards(1))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(ReplicaJoined(0.0, "b", 64))
    assert opened(scheduler.handle(ShardFailed(1.0, 0, "a", "boom"))) == [(0, "b", 1)]
    assert opened(scheduler.handle(ShardFailed(2.0, 0, "b", "boom"))) == [(0, "a", 2)]


def test_a_shard_that_keeps_failing_fails_the_job():
    scheduler = Scheduler(make_shards(2), settings=SchedulerSettings(max_failures=3))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(ShardFailed(1.0, 0, "a", "boom"))
    scheduler.handle(ShardFailed(2.0, 0, "a", "boom"))
    (command,) = scheduler.handle(ShardFailed(3.0, 0, "a", "the disk is full"))
    assert isinstance(command, FailJob)
    assert "Shard 0 failed 3 times" in command.reason
    assert "the disk is full" in command.reason
    assert scheduler.handle(Tick(4.0)) == []


def test_a_shard_that_takes_replicas_down_fails_the_job():
    scheduler = Scheduler(make_shards(1), settings=SchedulerSettings(max_losses=2))
    commands = []
    for i in range(2):
        scheduler.handle(ReplicaJoined(float(i), f"w{i}", 64))
        commands = scheduler.handle(WorkersSeen(i + 0.5, ()))
    assert [type(command) for command in commands] == [RemoveReplica, FailJob]


def test_committed_shards_are_not_run_again():
    scheduler = Scheduler(make_shards(3), committed=[0, 2])
    assert opened(scheduler.handle(ReplicaJoined(0.0, "a", 64))) == [(1, "a", 0)]
    assert scheduler.handle(ShardCommitted(1.0, 1, "a")) == [FinishJob()]


def test_a_fully_committed_job_finishes_on_the_first_event():
    scheduler = Scheduler(make_shards(2), committed=[0, 1])
    assert scheduler.handle(Tick(0.0)) == [FinishJob()]


def test_a_late_commit_of_a_lost_replica_recalls_the_retry():
    scheduler = Scheduler(make_shards(2))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(WorkersSeen(1.0, ("b",)))
    scheduler.handle(ReplicaJoined(2.0, "b", 64))
    assert scheduler.handle(ShardCommitted(3.0, 0, "a")) == [Recall(0, "b")]
    scheduler.check_integrity()


def test_a_commit_reported_twice_counts_once():
    scheduler = Scheduler(make_shards(2))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(ShardCommitted(1.0, 0, "a"))
    assert scheduler.handle(ShardCommitted(1.1, 0, "a")) == []
    scheduler.check_integrity()
    assert scheduler.handle(ShardCommitted(2.0, 1, "a")) == [FinishJob()]


def test_a_late_failure_of_an_old_attempt_is_ignored():
    scheduler = Scheduler(make_shards(1))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(WorkersSeen(1.0, ("b",)))
    scheduler.handle(ReplicaJoined(2.0, "b", 64))
    assert scheduler.handle(ShardFailed(3.0, 0, "a", "gone")) == []
    assert scheduler.handle(ShardCommitted(4.0, 0, "b")) == [FinishJob()]


def test_a_new_scheduler_adopts_shards_already_running_before_it_opens_others():
    scheduler = Scheduler(make_shards(4, rows=100), committed=[3])
    found = (
        FoundReplica("a", 25, unfinished((1, 60), (3, 5)), 0.0),
        FoundReplica("b", 50, unfinished((0, 40), (1, 60)), 1.0),
    )
    assert opened(scheduler.handle(ReplicasFound(0.0, found))) == [(1, "a", 0), (0, "b", 0), (2, "b", 0)]
    scheduler.check_integrity()


def test_a_new_scheduler_adopts_a_shard_that_an_older_one_opened_after_replicas_were_asked():
    scheduler = Scheduler(make_shards(3, rows=100))
    scheduler.handle(ReplicasFound(0.0, (FoundReplica("a", 25, unfinished((0, 100)), 0.0),)))
    report = ReplicaReported(0.3, "a", 120, 25, 1.0, (), unfinished((0, 60), (1, 90)))
    assert opened(scheduler.handle(report)) == [(1, "a", 0)]
    scheduler.check_integrity()
    assert opened(scheduler.handle(ReplicaJoined(0.4, "b", 25))) == [(2, "b", 0)]


def test_what_a_replica_still_lists_of_shards_that_are_not_its_own_changes_nothing():
    scheduler = Scheduler(make_shards(2, rows=100))
    assert opened(scheduler.handle(ReplicaJoined(0.0, "a", 25))) == [(0, "a", 0)]
    assert opened(scheduler.handle(ReplicaJoined(0.1, "b", 25))) == [(1, "b", 0)]
    scheduler.handle(ReplicaReported(0.2, "a", 120, 25, 1.0, (), unfinished((0, 60), (1, 60))))
    assert opened(scheduler.handle(ShardFailed(0.3, 1, "b", "disk full"))) == []
    assert opened(scheduler.handle(ReplicaReported(0.4, "b", 10, 25, 1.0, (), unfinished((1, 60))))) == []
    scheduler.check_integrity()


def test_waves_whose_rows_prove_long_are_opened_before_the_others():
    scheduler = Scheduler(make_shards(40, waves=2))
    first = opened(scheduler.handle(ReplicaJoined(0.0, "a", 16)))
    (wave,) = {s % 2 for s, _, _ in first}
    other = f"adapter-{1 - wave}"
    left, none_left = (unfinished(*((s, num_rows) for s, _, _ in first)) for num_rows in (1, 0))
    finished = (FinishedRows(other, 8, 8 * 2000),)
    scheduler.handle(ReplicaReported(1.0, "a", 1, 1, 1.0, (), left, finished))
    more = opened(scheduler.handle(ReplicaReported(2.0, "a", 1, 1, 1.0, (), none_left)))
    assert {s % 2 for s, _, _ in more} <= {1 - wave}


def reasons(commands):
    return [(c.replica_id, c.reason) for c in commands if isinstance(c, RemoveReplica)]


def test_a_replica_that_has_not_reported_for_the_limit_is_removed_and_may_join_again():
    scheduler = Scheduler(make_shards(4), settings=SchedulerSettings(silence_limit_s=20.0))
    scheduler.handle(WorkersSeen(0.0, ("a", "b")))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    found = []
    for now_s in range(2, 24, 2):
        found += reasons(scheduler.handle(Tick(float(now_s))))
    assert found == [("a", "no report for 20 seconds")]
    assert not scheduler.has_replica("a")
    assert opened(scheduler.handle(ReplicaJoined(25.0, "a", 64))) == [(i, "a", 1) for i in range(4)]
    scheduler.check_integrity()


def test_reports_keep_a_replica_and_a_pause_of_the_scheduler_itself_removes_none():
    scheduler = Scheduler(make_shards(4), settings=SchedulerSettings(silence_limit_s=20.0))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    for now_s in range(2, 60, 2):
        scheduler.handle(ReplicaReported(float(now_s), "a", 1, 1, 1.0, ()))
        assert scheduler.handle(Tick(float(now_s))) == []
    assert scheduler.handle(Tick(600.0)) == []


def test_shards_of_a_worker_that_leaves_in_good_order_are_not_blamed():
    scheduler = Scheduler(make_shards(1), settings=SchedulerSettings(max_losses=1))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    assert scheduler.handle(ReplicaLeft(1.0, "a")) == [RemoveReplica("a", "its worker leaves")]
    assert scheduler.handle(ReplicaLeft(1.5, "a")) == []
    assert opened(scheduler.handle(ReplicaJoined(2.0, "b", 64))) == [(0, "b", 1)]


def test_a_job_fails_when_the_engines_of_all_workers_have_failed():
    scheduler = Scheduler(make_shards(2))
    scheduler.handle(WorkersSeen(0.0, ("a", "b")))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    assert reasons(scheduler.handle(ReplicaFailed(1.0, "a", "no memory"))) == [("a", "no memory")]
    assert scheduler.has_failed("a")
    assert scheduler.handle(ReplicaFailed(2.0, "b", "no disk")) == [FailJob("No engine works: no disk.")]


def test_a_job_whose_last_working_worker_goes_fails_too():
    scheduler = Scheduler(make_shards(2))
    scheduler.handle(WorkersSeen(0.0, ("a", "b")))
    scheduler.handle(ReplicaJoined(0.0, "a", 64))
    scheduler.handle(ReplicaFailed(1.0, "b", "no memory"))
    commands = scheduler.handle(WorkersSeen(2.0, ("b",)))
    assert commands == [RemoveReplica("a", "its worker is gone"), FailJob("No engine works: no memory.")]


def test_a_job_without_any_replica_for_the_limit_fails():
    scheduler = Scheduler(make_shards(2), settings=SchedulerSettings(ready_limit_s=30.0))
    assert scheduler.handle(Tick(30.0)) == []
    assert scheduler.handle(Tick(30.5)) == [FailJob("No engine became ready within 30 seconds.")]


def test_a_new_scheduler_adopts_neither_silent_replicas_nor_those_whose_workers_are_gone():
    scheduler = Scheduler(make_shards(4, rows=100))
    scheduler.handle(WorkersSeen(0.0, ("hung", "b")))
    silences = {"gone": 0.0, "hung": 40.0, "b": 1.0}
    found = tuple(
        FoundReplica(name, 25, unfinished((shard_id, 60)), silent_s)
        for shard_id, (name, silent_s) in enumerate(silences.items())
    )
    assert {r for _, r, _ in opened(scheduler.handle(ReplicasFound(0.0, found)))} == {"b"}


class Storm:
    """Plays an arbitrary cluster against a scheduler and keeps the books independently."""

    def __init__(self, num_shards, seed_moves):
        settings = SchedulerSettings(max_losses=10**6, max_failures=10**6, cost=CPU)
        self.scheduler = Scheduler(make_shards(num_shards, waves=3), settings=settings)
        self.num_shards = num_shards
        self.moves = seed_moves
        self.num_reports = 0
        self.open = {}
        self.committed = set()
        self.alive = set()
        self.joined = set()

    def send(self, event):
        for command in self.scheduler.handle(event):
            if isinstance(command, RunShard):
                assert command.replica_id in self.alive
                assert command.shard_id not in self.committed
                assert command.shard_id not in self.open
                self.open[command.shard_id] = command.replica_id
        self.scheduler.check_integrity()
        assert self.open or len(self.committed) == self.num_shards or not self.joined, "nothing goes on"

    def play(self):
        for kind, choice in self.moves:
            replica_id = f"w{choice % 4}"
            if kind == "join":
                self.join(replica_id)
            elif kind == "lose":
                self.alive.discard(replica_id)
                self.joined.discard(replica_id)
                self.open = {s: r for s, r in self.open.items() if r != replica_id}
                self.send(WorkersSeen(0.0, tuple(sorted(self.alive))))
            elif kind == "report" and replica_id in self.joined:
                self.num_reports += 1
                left = unfinished(*((s, 1) for s, r in sorted(self.open.items()) if r == replica_id))
                # By their names, workers are up to a thousand times slower than the first.
                self.send(worked(replica_id, 10.0 ** (choice % 4), open_shards=left, time_s=float(self.num_reports)))
            elif kind == "fail" and self.open:
                shard_id = sorted(self.open)[choice % len(self.open)]
                self.send(ShardFailed(0.0, shard_id, self.open.pop(shard_id), "a test"))
            elif kind == "commit" and self.open:
                self.commit(sorted(self.open)[choice % len(self.open)])

    def join(self, replica_id):
        self.alive.add(replica_id)
        self.send(WorkersSeen(0.0, tuple(sorted(self.alive))))
        self.joined.add(replica_id)
        self.send(ReplicaJoined(0.0, replica_id, 16))

    def commit(self, shard_id):
        replica_id = self.open.pop(shard_id)
        self.committed.add(shard_id)
        self.send(ShardCommitted(0.0, shard_id, replica_id))


@settings(max_examples=150, deadline=None)
@given(
    num_shards=st.integers(1, 30),
    moves=st.lists(
        st.tuples(st.sampled_from(["join", "lose", "report", "fail", "commit"]), st.integers(0, 99)), max_size=60
    ),
)
@example(2, [("join", 0), ("join", 3), ("report", 0), ("report", 3), ("commit", 1), ("fail", 0)])
def test_whatever_happens_every_shard_is_committed_once_in_the_end(num_shards, moves):
    storm = Storm(num_shards, moves)
    storm.play()
    storm.join("last")
    while storm.open:
        storm.commit(min(storm.open))
    assert storm.committed == set(range(num_shards))
    assert storm.scheduler.handle(ReplicaJoined(0.0, "late", 16)) == []


def worked(name, slowness, *, open_shards=(), time_s=5.0):
    """A report of a replica that has made a thousand steps of ten rows."""
    step_s = CPU.step_s + 10 * (CPU.decode_row_s + 150 * CPU.context_token_s)
    left = sum(rows.num_rows for rows in open_shards)
    steps = StepTotals(1000, decode_rows=10_000, context_tokens=1_500_000)
    return ReplicaReported(time_s, name, left, 0, 0.0, (), open_shards, engine_s=slowness * step_s * 1000, steps=steps)


def make_paced(num_shards, *, replicas=("fast", "slow")):
    settings = SchedulerSettings(expected_replicas=len(replicas), cost=CPU)
    scheduler = Scheduler(make_shards(num_shards, rows=8), settings=settings)
    given = [opened(scheduler.handle(ReplicaJoined(0.0, name, 64))) for name in replicas]
    return scheduler, given


def test_long_prompts_count_for_what_they_take_and_not_as_rows():
    shards = [
        Shard(0, 0, "unmerged", ("a",), 8, 8 * 2000, 8 * 10),
        *(Shard(i, 0, "unmerged", ("a",), 8, 8 * 20, 8 * 10) for i in range(1, 5)),
    ]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, cost=CPU))
    first, second = (opened(scheduler.handle(ReplicaJoined(0.0, name, 64))) for name in ("a", "b"))
    assert [shard_id for shard_id, *_ in first] == [0]
    assert [shard_id for shard_id, *_ in second] == [1, 2, 3, 4]
    scheduler.check_integrity()


def test_while_others_are_to_come_a_replica_stops_near_its_share():
    shards = [Shard(i, 0, "unmerged", ("a",), 8, 800, 80) for i in range(7)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=3, cost=CPU))
    given = [opened(scheduler.handle(ReplicaJoined(0.0, name, 64))) for name in "abc"]
    assert [len(shards) for shards in given] == [2, 2, 3]
    alone = Scheduler(shards, settings=SchedulerSettings(expected_replicas=1, cost=CPU))
    assert len(opened(alone.handle(ReplicaJoined(0.0, "a", 64)))) == 7


@pytest.mark.parametrize(("output_tokens", "num_batches"), [(1, 2), (100, 1)])
def test_until_its_pace_is_known_a_replica_gets_one_batch_unless_that_is_over_before(output_tokens, num_batches):
    shards = [Shard(i, 0, "unmerged", ("a",), 8, 8, 8 * output_tokens) for i in range(100)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, cost=CPU))
    given = [opened(scheduler.handle(ReplicaJoined(0.0, name, 64))) for name in ("fast", "slow")]
    assert [len(shards) for shards in given] == [8 * num_batches] * 2


def test_a_slow_replica_gets_its_share_by_pace():
    scheduler, given = make_paced(60)
    scheduler.handle(worked("fast", 1.0, open_shards=unfinished(*((s, 8) for s, _, _ in given[0]))))
    idle = unfinished(*((s, 0) for s, _, _ in given[1]))
    more = opened(scheduler.handle(worked("slow", 3.0, open_shards=idle)))
    more += opened(scheduler.handle(worked("slow", 3.0, open_shards=idle, time_s=6.0)))
    # Of 416 rows that are left a quarter, to within a shard, and not two batches.
    assert 104 <= 8 * len(more) <= 112
    scheduler.check_integrity()


def test_a_replica_that_would_end_after_the_job_gets_nothing_more():
    scheduler, given = make_paced(20)
    scheduler.handle(worked("fast", 1.0, open_shards=unfinished(*((s, 8) for s, _, _ in given[0]))))
    idle = unfinished(*((s, 0) for s, _, _ in given[1]))
    assert opened(scheduler.handle(worked("slow", 50.0, open_shards=idle))) == []
    assert opened(scheduler.handle(worked("slow", 50.0, open_shards=idle, time_s=6.0))) == []
    # Alone it goes on, however slow.
    left = opened(scheduler.handle(WorkersSeen(7.0, ("slow",))))
    assert {replica for _, replica, _ in left} == {"slow"}
    scheduler.check_integrity()


def test_a_shard_goes_back_to_the_replica_on_which_it_failed_when_the_others_get_none():
    scheduler, given = make_paced(2)
    scheduler.handle(worked("fast", 1.0, open_shards=unfinished((0, 8))))
    scheduler.handle(worked("slow", 50.0, open_shards=unfinished((1, 0))))
    assert [shards[0][0] for shards in given] == [0, 1]
    assert opened(scheduler.handle(ShardCommitted(6.0, 1, "slow"))) == []
    assert opened(scheduler.handle(ShardFailed(7.0, 0, "fast", "the disk is full"))) == [(0, "fast", 1)]
    scheduler.check_integrity()
    # Better slow than never.
    assert opened(scheduler.handle(ShardFailed(8.0, 0, "fast", "the disk is full"))) == [(0, "slow", 2)]
    assert opened(scheduler.handle(ShardFailed(9.0, 0, "slow", "the disk is full"))) == [(0, "fast", 3)]
    scheduler.check_integrity()
