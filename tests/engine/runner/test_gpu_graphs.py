"""Which decode steps share a graph, and which split their contexts."""

from __future__ import annotations

import numpy as np

from lorabatch.engine.runner.gpu_graphs import GraphKey, bucket_of, graph_for
from lorabatch.engine.runner.gpu_plan import SPLIT_KEYS, split_keys_of
from lorabatch.kernels.paged_attention.work import SEGMENT_KEYS


def test_a_bucket_holds_its_rows_with_at_most_a_fifth_of_padding() -> None:
    for rows in range(1, 1025):
        bucket = bucket_of(rows)
        assert rows <= bucket <= rows * 5 / 4
        assert (bucket - rows) / bucket <= 0.2
        assert bucket_of(bucket) == bucket


def test_buckets_are_few() -> None:
    assert len({bucket_of(rows) for rows in range(1, 513)}) == 32
    assert [bucket_of(rows) for rows in (1, 7, 8, 9, 17, 255, 512)] == [1, 7, 8, 10, 20, 256, 512]


def key(bucket: int, has_lora: bool = True) -> GraphKey:
    return GraphKey(bucket, has_lora, splits=False, chooses=True)


def test_a_batch_that_drains_replays_larger_graphs_and_captures_none() -> None:
    captured: set[GraphKey] = set()
    for number, rows in enumerate((512, 512, *range(500, 0, -40))):
        captured.add(graph_for(key(bucket_of(rows)), 2 if number == 1 else 1, captured))
    assert captured == {key(512)}


def test_a_bucket_that_comes_again_gets_a_graph_of_its_own() -> None:
    captured = {key(64)}
    assert [graph_for(key(8), num_visits, captured) for num_visits in (1, 2, 3)] == [key(64), key(64), key(8)]
    captured.add(key(8))
    assert graph_for(key(5), 1, captured) == key(8), "the smallest that holds the rows"
    assert graph_for(key(5, has_lora=False), 1, captured) == key(5, has_lora=False), "the first of its kind"
    assert graph_for(key(80), 1, captured) == key(80), "no larger one"


def test_contexts_are_split_where_rows_are_few_or_one_is_much_longer() -> None:
    many, few = np.full(200, 3000), np.full(20, 3000)
    assert split_keys_of(many, full_rows=130) == 0
    assert split_keys_of(few, full_rows=130) == SPLIT_KEYS
    assert split_keys_of(np.append(many, 40_000), full_rows=130) == SPLIT_KEYS
    assert split_keys_of(np.full(3, SPLIT_KEYS), full_rows=130) == 0, "nothing to split"
    assert split_keys_of(np.zeros(0, np.int64), full_rows=130) == 0
    # in mode exact between segments, which every query sums by itself
    assert split_keys_of(np.full(3, SEGMENT_KEYS), full_rows=None) == 0
    assert split_keys_of(np.array([5, SEGMENT_KEYS + 1]), full_rows=None) == SEGMENT_KEYS
