"""Which rows of a table keep the answers of an earlier job, and what they are counted as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabatch.engine.request import Request
from lorabatch.jobs.opening.opened_job import updating
from lorabatch.pipeline.dataset.answers import RowAnswer, encode_answers
from lorabatch.pipeline.dataset.earlier import EarlierAnswers
from lorabatch.pipeline.dataset.index import IndexTotals
from lorabatch.pipeline.dataset.schema import fingerprint_numbers, fingerprints_of
from lorabatch.pipeline.dataset.writer import part_bytes
from lorabatch.pipeline.planning.plan import check_rows

SHA = {None: None, "alpha": "a" * 64, "beta": "b" * 64}


class Row(NamedTuple):
    """A row of a table: its adapter, its prompt, and what becomes of it in the earlier job."""

    adapter: str | None
    version: int
    fate: str


ROWS = st.builds(
    Row, st.sampled_from(list(SHA)), st.integers(0, 1), st.sampled_from(["part", "part", "part", "error", "open"])
)
TABLES = st.dictionaries(st.integers(0, 12), ROWS, min_size=1, max_size=10)


def as_table(rows: Mapping[int, Row]) -> pa.Table:
    prompts = pa.array([[5, 6 + i, 7 + row.version] for i, row in rows.items()], pa.list_(pa.int64()))
    adapters = pa.array([row.adapter for row in rows.values()], pa.string())
    return pa.table({"id": pa.array(list(rows), pa.int64()), "adapter": adapters, "prompt_token_ids": prompts})


def finish(job: Any, rows: Mapping[int, Row], echo: Callable[..., dict[str, RowAnswer]]) -> dict[int, bool]:
    """Write the parts and journals of a job by the rows' fates; returns which rows have an answer, by id."""
    is_answered = {}
    for shard in job.shards():
        ids = dict(
            zip(
                (r.request_id for r in shard.requests if isinstance(r, Request)),
                shard.table.column("id").to_pylist(),
                strict=True,
            )
        )
        answers = echo(shard)
        fates = [rows[ids[request_id]].fate for request_id in answers]
        # a shard is open as a whole; its answers are journalled then, but for those of open rows
        is_open = Counter(fates)["open"] > 0
        for request_id, answer in list(answers.items()):
            fate = rows[ids[request_id]].fate
            is_answered[ids[request_id]] = fate == "part"
            if fate == "error":
                answers[request_id] = replace(answer, error="no.", completion=None, finish_reason="error")
            elif fate == "open":
                del answers[request_id]
        if is_open:
            job.store.append_wip(shard.shard_id, "left", encode_answers(answers.values()))
        else:
            job.store.commit_part(shard.shard_id, part_bytes(shard, answers, job.record))
    return is_answered


@given(
    before=TABLES,
    after=TABLES,
    num_before=st.sampled_from([1, 1, 2]),
    num_now=st.sampled_from([1, 1, 2]),
    layouts=st.tuples(*[st.sampled_from(["rows", "lists"])] * 2),
    dtype=st.sampled_from(["auto", "auto", "auto", "bfloat16"]),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_are_kept_and_counted_as_a_comparison_of_both_tables_says(
    prepare_job: Callable[..., Any],
    answer_by_echo: Callable[..., dict[str, RowAnswer]],
    before: dict[int, Row],
    after: dict[int, Row],
    num_before: int,
    num_now: int,
    layouts: tuple[str, str],
    dtype: str,
    seed: int,
) -> None:
    first = prepare_job(as_table(before), 4, n=num_before, samples=layouts[0], rows_per_shard=3)
    is_answered = finish(first, before, answer_by_echo)
    order = np.random.default_rng(seed).permutation(list(after)).tolist()
    second = prepare_job(as_table({i: after[i] for i in order}), 3, n=num_now, samples=layouts[1], dtype=dtype)
    expected = Counter()
    for i, row in after.items():
        is_same = i in before and before[i].version == row.version and num_now <= num_before
        if i not in before:
            expected["new"] += 1
        elif dtype != "auto" or not is_same:
            expected["changed"] += 1
        elif not is_answered[i]:
            expected["unanswered"] += 1
        else:
            expected["kept" if before[i].adapter == row.adapter else "changed"] += 1
    expected["removed"] = len(before.keys() - after.keys())
    record = updating(second.record, [first.store])
    reader = EarlierAnswers([first.store])
    with check_rows(second.store, record, IndexTotals.of(second.index()), [first.store]) as checked:
        rows, workload = checked.whole()
        counts = checked.earlier.counts
        assert {name: getattr(counts, name) for name in expected} == dict(expected)
        assert counts.kept + counts.new + counts.changed + counts.unanswered == len(after)
        assert bool(counts.reasons) == (dtype != "auto")
        is_kept = rows["source"] >= 0
        assert ((workload.max_tokens == 0) == is_kept).all()
        for row in rows[is_kept]:
            place = checked.earlier.places[row["source"]]
            (fingerprint,) = fingerprints_of(
                *np.array([[row["fingerprint_high"]], [row["fingerprint_low"]]], np.uint64)
            )
            adapter_id = SHA[(*checked.names, None)[row["adapter"]]]
            answer = reader.of([place])[fingerprint, adapter_id]
            assert answer.error is None
            assert (answer.completion or "").startswith("echo (5, ")


@pytest.mark.parametrize("first", [b"\0" * 16, b"\xff" * 16, bytes(range(16))])
def test_fingerprints_are_put_together_as_they_were(first: bytes) -> None:
    numbers = fingerprint_numbers([first, b"0123456789abcdef"])
    assert fingerprints_of(numbers[:, 0], numbers[:, 1]) == [first, b"0123456789abcdef"]
    assert fingerprint_numbers([]).shape == (0, 2)
