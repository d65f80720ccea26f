from __future__ import annotations

from lorabatch.scheduler.backlog import Backlog
from lorabatch.scheduler.waves import Shard


def make_shard(shard_id, wave, *, rows=10, length=100):
    return Shard(shard_id, wave, "unmerged", (f"a{wave}",), rows, 0, rows * length)


def anything(shard_id):
    return True


def test_an_empty_backlog_gives_nothing():
    assert Backlog([]).take("r", anything) is None


def test_waves_of_longer_rows_come_first_even_against_affinity():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1, length=900)])
    backlog.opened(0, "r")
    backlog.discard(0)
    assert backlog.take("r", anything) == 2


def test_among_equal_lengths_a_replica_goes_on_with_its_wave():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 1, rows=90)])
    backlog.discard(0)
    backlog.opened(0, "r")
    assert backlog.take("r", anything) == 1


def test_another_replica_starts_the_wave_with_the_most_work_per_replica():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 0)])
    backlog.discard(0)
    backlog.opened(0, "r")
    backlog.opened(0, "s")
    assert backlog.take("t", anything) == 2


def test_a_shard_put_back_keeps_its_place():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0)])
    assert backlog.take("r", anything) == 0
    backlog.put_back(0)
    backlog.check_integrity()
    assert backlog.take("r", anything) == 0


def test_a_shard_that_is_not_allowed_is_passed_over():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 1)])
    assert backlog.take("r", lambda shard_id: shard_id == 1) == 1
    assert backlog.take("r", lambda shard_id: False) is None
    assert 0 in backlog
    assert len(backlog) == 1


def test_measured_lengths_change_which_wave_is_next():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 1)])
    backlog.correct_length("a1", 800.0)
    assert backlog.take("r", anything) == 1
    backlog.correct_length("somebody else", 5.0)
    assert backlog.take("r", anything) == 0


def test_a_pool_of_several_adapters_keeps_its_prediction():
    pool = Shard(0, 0, "unmerged", ("x", "y"), 10, 0, 1000)
    backlog = Backlog([pool, make_shard(1, 1, length=200)])
    backlog.correct_length("x", 10_000.0)
    assert backlog.take("r", anything) == 1
