"""Which rows move, from reports: which owners, which helpers, which shards first."""

from __future__ import annotations

from dataclasses import replace

from lorabatch.scheduler.assignment.lending import Pace, TailRows, TailSettings
from lorabatch.scheduler.assignment.migration import lend, tail_rows
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M as CPU
from lorabatch.scheduler.messages import MigrateRows, ReplicaJoined, ReplicaReported, RunShard, ShardFailed, StepTotals
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.tests.scheduler.unfinished import unfinished

SETTINGS = TailSettings(hop_s=0.1)
PACE = Pace(64)


def make_report(*open_shards, running=16, lent=(), tokens=0):
    left = sum(rows for _, rows in open_shards)
    more = {"running_tokens": tokens, "lent_shards": unfinished(*lent)}
    return ReplicaReported(9.0, "slow", left, running, 10.0, (), unfinished(*open_shards), **more)


def lent_by(report, shards, owner, helpers, output_tokens=600):
    rows = tail_rows(report, shards, output_tokens, output_tokens)
    return lend(report, shards, rows, owner, helpers, CPU, SETTINGS)


def test_prompts_that_are_not_computed_leave_for_an_idle_helper_although_they_are_in_the_batch():
    """Computed or not decides what a move costs: rows of long prompts and short answers, all admitted at once."""
    shards = [Shard(0, 0, "unmerged", ("x",), 20, 20 * 400, 20 * 10)]
    begun = replace(make_report((0, 20), running=20, tokens=2), prefilling_rows=18, prefill_tokens_left=18 * 400)
    assert tail_rows(begun, shards, 10, 9) == TailRows(2, 18, 401, 400, 10, 9)
    (move,) = lent_by(begun, shards, PACE, {"idle": PACE}, output_tokens=10)
    assert move.num_rows in (9, 10)
    computed = replace(begun, prefilling_rows=0, prefill_tokens_left=0)
    assert lent_by(computed, shards, PACE, {"idle": PACE}, output_tokens=10) == ()


def test_rows_on_loan_are_not_here_and_those_that_do_not_run_wait():
    shards = [Shard(i, 0, "unmerged", ("x",), 20, 400, 1200) for i in range(2)]
    report = make_report((0, 10), (1, 18), running=8, lent=((1, 5),), tokens=80)
    assert tail_rows(report, shards, 60, 50) == TailRows(8, 15, 30, 20, 60, 50)


def test_the_shard_opened_last_is_shared_first_and_rows_lent_before_stay_lent():
    shards = [Shard(i, 0, "unmerged", ("x",), 20, 4000, 12_000) for i in range(2)]
    lent = lent_by(make_report((0, 10), (1, 18)), shards, PACE, {"a": PACE, "b": PACE})
    assert [(m.shard_id, m.to_replica_id, m.is_selective) for m in lent] == [(1, "a", False), (1, "b", False)]
    assert all(isinstance(m, MigrateRows) and 0 < m.num_rows <= 9 for m in lent)
    assert lent_by(make_report((0, 10), (1, 18), lent=((0, 9), (1, 18))), shards, PACE, {"a": PACE}) == ()
    again = lent_by(make_report((0, 10), (1, 18), running=10, lent=((1, 18),)), shards, PACE, {"b": PACE})
    assert [(m.shard_id, m.to_replica_id) for m in again] == [(0, "b")]


def test_a_share_larger_than_a_shard_comes_from_several():
    shards = [Shard(i, 0, "unmerged", ("x",), 20, 4000, 12_000) for i in range(2)]
    lent = lent_by(make_report((0, 18), (1, 6)), shards, Pace(64, slowness=8.0), {"a": PACE})
    assert [m.shard_id for m in lent] == [1, 0]
    assert lent[0].num_rows == 6


def test_without_helpers_or_work_nothing_is_lent():
    idle = Shard(0, 0, "none", (), 20, 0, 0)
    assert lent_by(make_report((0, 0)), [idle], PACE, {"a": PACE}) == ()
    busy = Shard(0, 0, "unmerged", ("x",), 20, 4000, 12_000)
    assert lent_by(make_report((0, 9)), [busy], PACE, {}) == ()


STEP_S = CPU.step_s + 16 * (CPU.decode_row_s + 300 * CPU.context_token_s)


def after_reports(slowness):
    """A scheduler of twenty shards after the first reports of two replicas that have opened one each, and the commands
    that the second gave: it takes `slowness` times as long as the cost model says."""
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200) for i in range(20)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, tail=SETTINGS, cost=CPU))
    opened = {name: scheduler.handle(ReplicaJoined(0.0, name, 16)) for name in ("fast", "slow")}
    commands = []
    for name, factor in (("fast", 1.0), ("slow", slowness)):
        rows = unfinished(*((command.shard_id, 16) for command in opened[name]))
        assert len(rows) == 1
        report = ReplicaReported(5.0, name, 16, 16, 0.0, (), rows, running_tokens=160)
        totals = {"engine_s": 1000 * factor * STEP_S, "steps": StepTotals(1000, 0, 16_000, 4_800_000)}
        commands = scheduler.handle(replace(report, **totals))
    return scheduler, commands


def test_a_replica_so_slow_that_the_job_ends_before_its_rows_gives_them_back_while_shards_are_queued():
    scheduler, commands = after_reports(slowness=60.0)
    assert [(c.from_replica_id, c.to_replica_id, c.num_rows) for c in commands] == [("slow", "fast", 16)]
    assert scheduler.num_queued
    scheduler.check_integrity()


def test_a_replica_that_is_not_much_slower_keeps_its_rows():
    _, commands = after_reports(slowness=3.0)
    assert not [c for c in commands if isinstance(c, MigrateRows)]


def test_rows_move_to_no_replica_that_is_much_slower_than_the_fastest():
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200) for i in range(2)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=3, tail=SETTINGS, cost=CPU))
    for name in ("slow", "fast", "idle"):
        scheduler.handle(ReplicaJoined(0.0, name, 16))
    moved = []
    for name, factor, rows in (
        ("idle", 2.0, ()),
        ("fast", 1.0, unfinished((1, 16))),
        ("slow", 6.0, unfinished((0, 16))),
    ):
        report = ReplicaReported(
            5.0, name, 16 * len(rows), 16 * len(rows), 0.0, (), rows, running_tokens=160 * len(rows)
        )
        totals = {"engine_s": 1000 * factor * STEP_S, "steps": StepTotals(1000, 0, 16_000, 4_800_000)}
        moved += [c.to_replica_id for c in scheduler.handle(replace(report, **totals)) if isinstance(c, MigrateRows)]
    assert "idle" not in moved


def test_rows_move_to_no_replica_at_work_whose_pace_is_not_known():
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 400, 16 * 10) for i in range(2)]
    moved = {}
    for num_steps in (0, 1000):
        scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, tail=SETTINGS, cost=CPU))
        for name in ("owner", "helper"):
            scheduler.handle(ReplicaJoined(0.0, name, 64))
        helper = ReplicaReported(5.0, "helper", 1, 1, 0.0, (), unfinished((1, 1)), running_tokens=9)
        steps = StepTotals(num_steps, 0, 16 * num_steps, 4800 * num_steps)
        owner = ReplicaReported(
            5.0, "owner", 16, 16, 0.0, (), unfinished((0, 16)), prefilling_rows=16, prefill_tokens_left=16 * 400
        )
        scheduler.handle(replace(helper, engine_s=num_steps * STEP_S, steps=steps))
        moved[num_steps] = [c.num_rows for c in scheduler.handle(owner) if isinstance(c, MigrateRows)]
    assert moved[0] == []
    assert sum(moved[1000]) > 0


def test_rows_of_a_shard_that_was_opened_after_the_last_report_move():
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200) for i in range(3)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=1, tail=SETTINGS, cost=CPU))
    (first,) = scheduler.handle(ReplicaJoined(0.0, "owner", 16))
    report = ReplicaReported(5.0, "owner", 8, 8, 0.0, (), unfinished((first.shard_id, 8)), running_tokens=80)
    totals = {"engine_s": 1000 * STEP_S, "steps": StepTotals(1000, 0, 16_000, 4_800_000)}
    opened = {command.shard_id for command in scheduler.handle(replace(report, **totals))}
    assert len(opened) == 2
    moves = scheduler.handle(ReplicaJoined(5.1, "helper", 16))
    assert opened & {move.shard_id for move in moves if isinstance(move, MigrateRows)}
    scheduler.check_integrity()


def test_rows_of_a_shard_that_a_report_lists_no_more_count_as_done_before_it_is_committed():
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200) for i in range(4)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=1, tail=SETTINGS, cost=CPU))
    (first,) = scheduler.handle(ReplicaJoined(0.0, "owner", 16))
    totals = {"engine_s": 1000 * STEP_S, "steps": StepTotals(1000, 0, 16_000, 4_800_000)}
    (second,) = scheduler.handle(
        ReplicaReported(5.0, "owner", 16, 16, 0.0, (), unfinished((first.shard_id, 16)), **totals)
    )
    both = unfinished((first.shard_id, 16), (second.shard_id, 16))
    assert scheduler.handle(ReplicaReported(6.0, "owner", 32, 16, 0.0, (), both, **totals)) == []
    opened = scheduler.handle(ReplicaReported(7.0, "owner", 16, 16, 0.0, (), both[1:], **totals))
    assert [type(command) for command in opened] == [RunShard]
    scheduler.check_integrity()


def test_a_replica_whose_rows_are_all_done_helps_before_its_last_shard_is_committed():
    shards = [Shard(i, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200) for i in range(4)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, tail=SETTINGS, cost=CPU))
    opened = {name: scheduler.handle(ReplicaJoined(0.0, name, 16)) for name in ("owner", "helper")}
    totals = {"engine_s": 1000 * STEP_S, "steps": StepTotals(1000, 0, 16_000, 4_800_000)}
    for name, time_s in (("owner", 5.0), ("helper", 5.0), ("owner", 6.0), ("helper", 6.0)):
        rows = unfinished(*((command.shard_id, 16) for command in opened[name]))
        report = ReplicaReported(time_s, name, 16 * len(rows), 16, 0.0, (), rows, running_tokens=160, **totals)
        opened[name] += scheduler.handle(report)
    assert [len(commands) for commands in opened.values()] == [2, 2]
    moves = scheduler.handle(ReplicaReported(7.0, "helper", 0, 0, 0.0, (), (), **totals))
    assert {(move.from_replica_id, move.to_replica_id) for move in moves} == {("owner", "helper")}
    scheduler.check_integrity()


def test_a_shard_that_is_opened_again_is_not_done_because_a_report_from_before_lists_it_no_more():
    shards = [Shard(0, 0, "unmerged", ("a",), 16, 16 * 200, 16 * 200)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=1, tail=SETTINGS, cost=CPU))
    scheduler.handle(ReplicaJoined(0.0, "only", 16))
    scheduler.handle(ReplicaReported(5.0, "only", 16, 16, 0.0, (), unfinished((0, 16)), running_tokens=160))
    (again,) = scheduler.handle(ShardFailed(5.5, 0, "only", "a reason"))
    assert isinstance(again, RunShard)
    scheduler.handle(ReplicaReported(6.0, "only", 0, 0, 0.0, (), ()))
    moves = scheduler.handle(ReplicaJoined(6.1, "helper", 16))
    assert sum(move.num_rows for move in moves if isinstance(move, MigrateRows)) > 0
    scheduler.check_integrity()
