"""Shards that were dealt out go to their replicas, and to others where those do not come or are lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorabatch.scheduler.messages import (
    FinishJob,
    ReplicaJoined,
    ReplicaReported,
    RunShard,
    ShardCommitted,
    ShardFailed,
    WorkersSeen,
)
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.policies import make_scheduler
from lorabatch.scheduler.settings import SchedulerSettings


def dealt(count, num_replicas=2, rows=8):
    return [
        Shard(i, i % num_replicas, "unmerged", ("x",), rows, 80, 80, i % num_replicas, (rows, 0)) for i in range(count)
    ]


def opened(commands):
    return [(c.shard_id, c.replica_id) for c in commands if isinstance(c, RunShard)]


def make(shards, **more):
    return make_scheduler(shards, settings=SchedulerSettings(policy="s-lora", open_batches=64, is_dealt=True, **more))


def test_a_replica_opens_all_that_is_dealt_to_it_in_order():
    scheduler = make(dealt(6))
    assert opened(scheduler.handle(ReplicaJoined(0.0, "a", 8))) == [(0, "a"), (2, "a"), (4, "a")]
    assert opened(scheduler.handle(ReplicaJoined(0.1, "b", 8))) == [(1, "b"), (3, "b"), (5, "b")]
    scheduler.check_integrity()


def test_what_is_dealt_to_a_replica_that_does_not_come_is_opened_by_an_idle_one_shard_by_shard():
    scheduler = make(dealt(4))
    scheduler.handle(ReplicaJoined(0.0, "a", 8))
    assert opened(scheduler.handle(ShardCommitted(1.0, 0, "a"))) == []
    assert opened(scheduler.handle(ShardCommitted(2.0, 2, "a"))) == [(1, "a")]
    assert opened(scheduler.handle(ReplicaJoined(2.5, "b", 8))) == [(3, "b")]


def test_shards_of_a_lost_replica_are_opened_by_others():
    scheduler = make(dealt(4))
    for name in "ab":
        scheduler.handle(ReplicaJoined(0.0, name, 8))
    assert sorted(opened(scheduler.handle(WorkersSeen(1.0, ("b",))))) == [(0, "b"), (2, "b")]
    scheduler.check_integrity()


def test_a_shard_that_failed_is_tried_on_another_replica():
    scheduler = make(dealt(2))
    for name in "ab":
        scheduler.handle(ReplicaJoined(0.0, name, 8))
    assert opened(scheduler.handle(ShardFailed(1.0, 0, "a", "the disk is full"))) == [(0, "b")]


def test_a_replica_without_shards_of_its_own_takes_over_what_is_left():
    scheduler = make(dealt(4, num_replicas=1), expected_replicas=1)
    limited = make_scheduler(dealt(4, num_replicas=1), settings=SchedulerSettings(policy="s-lora", open_batches=1))
    assert len(opened(scheduler.handle(ReplicaJoined(0.0, "a", 8)))) == 4
    assert opened(limited.handle(ReplicaJoined(0.0, "a", 8))) == [(0, "a")]
    assert opened(limited.handle(ReplicaJoined(0.0, "late", 8))) == [(1, "late")]


class DealtJob(RuleBasedStateMachine):
    """Replicas come, fail shards and are lost, in any order; in the end every shard is committed once."""

    @initialize(count=st.integers(1, 12), num_replicas=st.integers(1, 4), batches=st.sampled_from([1.0, 2.0, 64.0]))
    def begin(self, count, num_replicas, batches):
        settings = SchedulerSettings(
            policy="s-lora", open_batches=batches, max_failures=10**6, max_losses=10**6, expected_replicas=num_replicas
        )
        self.scheduler = make_scheduler(dealt(count, num_replicas), settings=settings)
        self.count, self.time_s, self.names = count, 0.0, 0
        self.open: dict[int, str] = {}
        self.alive: list[str] = []
        self.commits: Counter[int] = Counter()
        self.is_over = False

    def tell(self, make_event):
        self.time_s += 1.0
        for command in self.scheduler.handle(make_event(self.time_s)):
            if isinstance(command, RunShard):
                assert command.shard_id not in self.open
                assert command.replica_id in self.alive
                self.open[command.shard_id] = command.replica_id
            self.is_over |= isinstance(command, FinishJob)

    @rule()
    def joins(self):
        self.names += 1
        name = f"r{self.names}"
        self.alive.append(name)
        self.tell(lambda now: ReplicaJoined(now, name, 8))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def is_lost(self, data):
        name = data.draw(st.sampled_from(self.alive))
        self.alive.remove(name)
        self.open = {shard: owner for shard, owner in self.open.items() if owner != name}
        self.tell(lambda now: WorkersSeen(now, tuple(self.alive)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def ends(self, data, fails):
        shard = data.draw(st.sampled_from(sorted(self.open)))
        owner = self.open.pop(shard)
        if fails:
            self.tell(lambda now: ShardFailed(now, shard, owner, "a test"))
        else:
            self.commits[shard] += 1
            self.tell(lambda now: ShardCommitted(now, shard, owner))

    @invariant()
    def state_agrees(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert max(self.commits.values(), default=0) <= 1

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10 * self.count + 10):
            if self.is_over:
                break
            if not self.alive:
                self.joins()
            for name in self.alive:
                self.tell(lambda now, name=name: ReplicaReported(now, name, 0, 0, 0.0, ()))
            for shard, owner in list(self.open.items()):
                del self.open[shard]
                self.commits[shard] += 1
                self.tell(lambda now, shard=shard, owner=owner: ShardCommitted(now, shard, owner))
        assert self.is_over
        assert self.commits == Counter(range(self.count))


TestDealtJob = DealtJob.TestCase
TestDealtJob.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
