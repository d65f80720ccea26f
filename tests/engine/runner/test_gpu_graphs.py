"""Which decode steps share a graph."""

from __future__ import annotations

from lorabatch.engine.runner.gpu_graphs import bucket_of


def test_a_bucket_holds_its_rows_with_at_most_a_fifth_of_padding() -> None:
    for rows in range(1, 1025):
        bucket = bucket_of(rows)
        assert rows <= bucket <= rows * 5 / 4
        assert (bucket - rows) / bucket <= 0.2
        assert bucket_of(bucket) == bucket


def test_buckets_are_few() -> None:
    assert len({bucket_of(rows) for rows in range(1, 513)}) == 32
    assert [bucket_of(rows) for rows in (1, 7, 8, 9, 17, 255, 512)] == [1, 7, 8, 10, 20, 256, 512]
