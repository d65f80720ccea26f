"""The plan holds every row once; what is wrong with the whole job is said before any work.

Adapters that change between runs cost their own rows and no others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lorabatch.engine.request import Request
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.errors import DamagedRecordError, ErrorBudgetError, JobRequestError, MissingFileError
from lorabatch.jobs.record import AdapterRecord, JobRecord
from lorabatch.pipeline.dataset.answers import decode_journal
from lorabatch.pipeline.dataset.index import IndexTotals
from lorabatch.pipeline.dataset.reader import read_shard
from lorabatch.pipeline.dataset.schema import arrow_file
from lorabatch.pipeline.dataset.writer import part_bytes
from lorabatch.pipeline.planning import validation as duplicate_ids
from lorabatch.pipeline.planning.plan import check_rows, plan_job, read_plan, reopen_shards


def rows(num_rows: int, **columns: Any) -> pa.Table:
    adapters = [("alpha", "beta", None, "alpha", "")[i % 5] for i in range(num_rows)]
    return pa.table({"id": range(num_rows), "prompt": ["the fox"] * num_rows, "adapter": adapters} | columns)


def references(job: Any) -> list[tuple[int, int, int]]:
    with arrow_file(job.store.plan_source()) as reader:
        table = reader.read_all()
    return list(zip(*(table.column(name).to_pylist() for name in ("chunk", "batch", "row")), strict=True))


@pytest.mark.parametrize("rows_per_shard", [7, *(pytest.param(n, marks=pytest.mark.long) for n in (None, 1, 10_000))])
def test_every_row_is_in_one_shard_once(prepare_job: Callable[..., Any], rows_per_shard: int | None) -> None:
    job = prepare_job(rows(700), row_group_rows=300, rows_per_shard=rows_per_shard)
    plan = job.plan(num_replicas=2)
    found = references(job)
    assert len(found) == len(set(found)) == plan.num_rows == 700
    ids = [i for shard in job.shards() for i in shard.table.column("id").to_pylist()]
    assert sorted(ids) == list(range(700))
    sizes = [shard.num_rows for shard in plan.shards]
    if rows_per_shard == 7:
        assert max(sizes) <= 14
    assert plan.errors == ()


def test_the_plan_read_back_is_the_plan(prepare_job: Callable[..., Any]) -> None:
    names = ["alpha", "gamma", "broken"] * 4
    job = prepare_job(pa.table({"id": range(12), "prompt": ["a", "", "a"] * 4, "adapter": names}))
    plan = job.plan()
    assert read_plan(job.store) == plan


def test_it_is_known_which_rows_are_drawn(prepare_job: Callable[..., Any]) -> None:
    temperatures = [None, 0.0, 0.7, None, 1.0]
    for of_job, expected in ((0.0, [False, False, True, False, True]), (1.0, [True, False, True, True, True])):
        job = prepare_job(pa.table({"prompt": ["a"] * 5, "temperature": temperatures}), temperature=of_job)
        with check_rows(job.store, job.record, IndexTotals.of(job.index())) as checked:
            _, workload = checked.whole()
        assert workload.is_drawn is not None
        assert workload.is_drawn[workload.input_order].tolist() == expected


def test_it_is_known_what_choices_scores_and_prompts_compute(prepare_job: Callable[..., Any]) -> None:
    """A choice is scored at each place where its texts go on, a given text token by token."""
    texts = ["yes", "yesterday, no", "no"]
    asked: list[dict[str, Any]] = [
        {},
        {"choice": texts},
        {"choice": texts, "score_choices": False},
        {"choice": texts, "reasoning_markers": "<think>,</think>"},
        {"continuation": texts[1]},
        {"prompt_logprobs": True},
    ]
    names = {name for row in asked for name in row}
    job = prepare_job(
        pa.table({"prompt": ["the quick brown fox"] * 6} | {n: [row.get(n) for row in asked] for n in sorted(names)})
    )
    with check_rows(job.store, job.record, IndexTotals.of(job.index())) as checked:
        _, workload = checked.whole()
    workload.check_integrity()
    encoded = Tokenizer.from_folder(Path(job.spec.model)).encode_batch(texts, is_rendered=True)
    places = {tuple(tokens[:i]) for tokens in encoded for i in range(len(tokens))}
    assert len(places) > job.spec.sampling.max_tokens, "more than an answer may have"
    mean = math.ceil(sum(map(len, encoded)) / 3)
    order = workload.input_order
    assert workload.fixed_tokens is not None
    assert workload.fixed_tokens[order].tolist() == [0, len(places), mean, 0, len(encoded[1]), 0]
    assert workload.is_scored is not None
    assert workload.is_scored[order].tolist() == [False] * 5 + [True]
    assert workload.shared_tokens is not None
    assert workload.shared_tokens[order].min() == 0 < workload.shared_tokens[order][4]
    assert workload.shared_tokens[order][5] == 0


def test_duplicate_ids_are_refused_with_examples_and_where_they_stand(prepare_job: Callable[..., Any]) -> None:
    files = {"a.parquet": rows(6), "b.parquet": pa.table({"id": [40, 3, 5], "prompt": ["x"] * 3})}
    with pytest.raises(JobRequestError) as caught:
        prepare_job(files).plan()
    text = str(caught.value)
    assert "2 ids appear in more than one row" in text
    assert "3 at a.parquet:3, b.parquet:1" in text
    assert "5 at a.parquet:5, b.parquet:2" in text


def test_equal_hashes_of_different_ids_are_no_duplicates(
    prepare_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.dataset.chunk_rows.id_hash", lambda row_id: 1 + row_id % 3)
    assert prepare_job(rows(9)).plan().num_rows == 9
    with pytest.raises(JobRequestError, match=r"1 id appears in more than one row: 4 at rows\.parquet:4"):
        prepare_job(pa.table({"id": [0, 1, 2, 3, 4, 5, 4], "prompt": ["a"] * 7})).plan()


def test_of_many_duplicates_a_few_are_looked_up(
    prepare_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = duplicate_ids.read_row
    monkeypatch.setattr(duplicate_ids, "read_row", lambda *given: (reads.append(1), read(*given))[1])
    job = prepare_job(pa.table({"id": [*range(500), *range(500)], "prompt": ["a"] * 1000}))
    with pytest.raises(JobRequestError, match="500 ids"):
        job.plan()
    assert len(reads) == 10


def test_rows_without_an_id_are_errors_and_no_duplicates_of_each_other(prepare_job: Callable[..., Any]) -> None:
    plan = prepare_job(pa.table({"id": pa.array([None, None, 1], pa.int64()), "prompt": ["a"] * 3})).plan()
    assert [(kind.kind, kind.num_rows) for kind in plan.errors] == [("id", 2)]


def test_unknown_and_refused_adapters_are_counted_with_the_other_errors(prepare_job: Callable[..., Any]) -> None:
    adapters = ["alpha", "gamma", "broken", "broken", "alpha", "alpha"]
    prompts = ["a", "a", "", "a", "fox " * 200, "a"]
    plan = prepare_job(pa.table({"id": range(6), "prompt": prompts, "adapter": adapters})).plan()
    assert {kind.kind: kind.num_rows for kind in plan.errors} == {"prompt": 1, "too_long": 1, "adapter": 2}
    adapter = next(kind for kind in plan.errors if kind.kind == "adapter")
    assert adapter.location == "rows.parquet:1"
    assert adapter.sentence.startswith("adapter='gamma': not among this job's adapters")
    with_work = [shard for shard in plan.shards if shard.has_engine_work]
    assert sum(shard.num_rows for shard in with_work) == 2
    named = Counter(name for names in plan.adapter_names for name in names)
    assert set(named) == {"alpha", "gamma", "broken"}


@pytest.mark.parametrize(
    ("budget", "is_enough"), [("10%", False), ("20%", True), ("1", False), ("2", True), ("0", False)]
)
def test_errors_within_the_budget_pass_and_beyond_it_stop_the_job(
    prepare_job: Callable[..., Any], budget: str, is_enough: bool
) -> None:
    table = pa.table({"id": range(10), "prompt": ["a"] * 8 + ["", ""]})
    job = prepare_job(table, max_errors=budget)
    if is_enough:
        assert sum(kind.num_rows for kind in job.plan().errors) == 2
        return
    with pytest.raises(ErrorBudgetError) as caught:
        job.plan()
    assert "2 of 10 rows cannot be answered" in str(caught.value)
    assert "2 x prompt, first at rows.parquet:8: prompt=''" in str(caught.value)
    assert not job.store.has_plan()


def test_damaged_row_groups_stop_the_job_all_named_at_once(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(rows(4))
    summaries = [
        IndexTotals(1, damages={0: ("first is broken",)}),
        IndexTotals(1, 5),
        IndexTotals(1, damages={2: ("third too",)}),
    ]
    with pytest.raises(JobRequestError) as caught:
        plan_job(job.store, job.record, IndexTotals.of(summaries), num_replicas=1, settings=job.settings())
    assert caught.value.problems == ("first is broken", "third too")


def test_an_empty_input_is_a_plan_without_shards(prepare_job: Callable[..., Any]) -> None:
    empty = pa.table({"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())})
    job = prepare_job({"a.parquet": empty, "b.parquet": empty})
    plan = job.plan()
    assert (plan.num_rows, plan.shards, plan.errors) == (0, (), ())
    assert read_plan(job.store) == plan
    assert references(job) == []


def test_two_runs_that_plan_at_once_cut_the_rows_once(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(rows(40), rows_per_shard=10)
    first = job.plan(num_replicas=1)
    again = replace(job, spec=job.spec.model_copy(update={"rows_per_shard": 5}))
    late = again.plan(num_replicas=4)
    assert late == first == read_plan(job.store)
    assert len(references(job)) == first.num_rows
    # the first was killed between its plan and what is known of it
    job.store.location.remove(["_lorabatch/plan.json"])
    assert read_plan(job.store) == first
    # or a disk has cut it
    for damaged in (b"", b'{"shards": [', b'{"shards": []}', b"\xff"):
        job.store.location.write("_lorabatch/plan.json", damaged)
        assert read_plan(job.store) == first


def test_a_missing_index_or_a_damaged_plan_is_said(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(rows(4))
    with pytest.raises(MissingFileError, match="chunk-00000"):
        plan_job(job.store, job.record, IndexTotals(1), num_replicas=1, settings=job.settings())
    job.plan()
    job.store.location.local_path("_lorabatch/plan.arrow").write_bytes(b"ARROW1")
    job.store.write_plan_facts({"shards": []})
    with pytest.raises(DamagedRecordError, match=r"plan\.arrow"):
        read_plan(job.store)
    path = job.store.location.local_path("_lorabatch/index/chunk-00000.arrow")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedRecordError, match="chunk-00000"):
        plan_job(job.store, job.record, IndexTotals(1), num_replicas=1, settings=job.settings())


@pytest.mark.parametrize("block_rows", [64, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 7, 699))])
def test_plans_made_block_by_block_hold_every_row_once(prepare_job: Callable[..., Any], block_rows: int) -> None:
    whole = prepare_job(rows(700, max_tokens=[1 + i % 40 for i in range(700)]), row_group_rows=90)
    plan = whole.plan(num_replicas=2, block_rows=block_rows)
    assert sorted(references(whole)) == sorted(set(references(whole)))
    ids = [i for shard in whole.shards() for i in shard.table.column("id").to_pylist()]
    assert sorted(ids) == list(range(700))
    assert [shard.shard_id for shard in plan.shards] == list(range(len(plan.shards)))
    assert plan == read_plan(whole.store)
    assert plan.num_rows == 700
    assert plan.predicted_s
    for shard, read in zip(plan.shards, whole.shards(), strict=True):
        asked = {request.adapter_id for request in read.requests} - {None}
        assert len(asked) == len(shard.adapters)
        assert read.num_rows == shard.num_rows


@pytest.mark.long
def test_blocks_cost_a_job_next_to_nothing(prepare_job: Callable[..., Any]) -> None:
    """The same shard sizes, every adapter still in waves of its own, at most one more at each end of a block."""
    job, other = (prepare_job(rows(4000, max_tokens=[1 + i % 40 for i in range(4000)])) for _ in range(2))
    whole, apart = job.plan(num_replicas=2), other.plan(num_replicas=2, block_rows=1000)
    assert abs(len(apart.shards) - len(whole.shards)) <= 4
    waves = {shard.wave_id: shard.adapters for shard in apart.shards}
    assert len(waves) <= len({shard.wave_id for shard in whole.shards}) + 3
    assert apart.predicted_s == pytest.approx(whole.predicted_s, rel=0.25)


def test_heavy_shards_of_any_block_run_first(prepare_job: Callable[..., Any]) -> None:
    lengths = [90 if i >= 600 else 1 for i in range(700)]
    job = prepare_job(pa.table({"id": range(700), "prompt": ["a"] * 700, "max_tokens": lengths}), rows_per_shard=50)
    plan = job.plan(block_rows=100)
    work = [shard.predicted_output_tokens for shard in plan.shards]
    assert max(work[2:]) < min(work[:2])


def test_bad_rows_are_reported_in_order_of_input_not_of_planning(
    prepare_job: Callable[..., Any],
) -> None:
    names = ["beta", "zeta", "alpha", "gamma", None, "alpha"]
    table = pa.table({"id": range(6), "prompt": ["a", "a", "", "a", "", "a"], "adapter": names})
    plan = prepare_job(table, row_group_rows=2, max_errors="80%").plan(block_rows=2)
    found = [(kind.kind, kind.num_rows, kind.location) for kind in plan.errors]
    assert found == [("prompt", 2, "rows.parquet:2"), ("adapter", 2, "rows.parquet:1")]
    assert "zeta" in plan.errors[1].sentence


NAMES = ["alpha", "beta", None, "broken", "gamma"]


@pytest.fixture
def finished(prepare_job: Callable[..., Any], answer_by_echo: Callable[..., Any]) -> Any:
    """A finished job of 25 rows in shards that mix adapters."""
    table = pa.table({"id": range(25), "prompt": [f"p{i}" for i in range(25)], "adapter": NAMES * 5})
    job = prepare_job(table, rows_per_shard=50)
    for rows in job.shards():
        part = part_bytes(rows, answer_by_echo(rows), job.record)
        job.store.commit_part(rows.shard_id, part)
    job.store.mark_success()
    return job


def with_adapters(record: JobRecord, *adapters: AdapterRecord) -> JobRecord:
    changed = {adapter.name: adapter for adapter in (*record.adapters, *adapters)}
    return record.model_copy(update={"adapters": tuple(changed.values())})


def kept(job: Any) -> dict[bytes, str | None]:
    journals = [j for shard in read_plan(job.store).shards for j in job.store.read_wip(shard.shard_id).values()]
    return {answer.fingerprint: answer.adapter_sha256 for journal in journals for answer in decode_journal(journal)}


def shards_with(job: Any, name: str) -> set[int]:
    return {i for i, names in enumerate(read_plan(job.store).adapter_names) if name in names}


def test_only_shards_with_rows_of_the_changed_adapter_are_opened_again(finished: Any) -> None:
    plan, committed = read_plan(finished.store), finished.store.committed_parts()
    record = with_adapters(finished.record, finished.record.adapters[0].model_copy(update={"sha256": "d" * 64}))
    refreshed = reopen_shards(finished.store, record, plan, {"alpha"})
    assert set(finished.store.committed_parts()) == set(committed) - shards_with(finished, "alpha")
    assert not finished.store.is_finished()
    # The shards have the new content, and are otherwise as they were planned.
    ids = {"a" * 64: "d" * 64}
    adapters = [tuple(ids.get(adapter_id, adapter_id) for adapter_id in shard.adapters) for shard in plan.shards]
    assert adapters != [shard.adapters for shard in plan.shards]
    shards = tuple(replace(shard, adapters=now) for shard, now in zip(plan.shards, adapters, strict=True))
    assert refreshed == read_plan(finished.store) == replace(plan, shards=shards)
    assert set(kept(finished).values()) <= {None, "b" * 64}


def test_answers_of_other_rows_in_these_shards_are_kept(finished: Any) -> None:
    plan = read_plan(finished.store)
    before = {shard.shard_id: read_shard(finished.store, finished.record, shard.shard_id) for shard in plan.shards}
    beta = finished.record.adapters[1].model_copy(update={"sha256": "d" * 64})
    reopen_shards(finished.store, with_adapters(finished.record, beta), plan, {"beta"})
    expected = {
        fingerprint
        for shard_id in shards_with(finished, "beta")
        for request, fingerprint in zip(before[shard_id].requests, before[shard_id].fingerprints, strict=True)
        if request.adapter_id == "a" * 64
    }
    assert expected
    assert set(kept(finished)) == expected


def test_repeating_it_after_a_crash_loses_and_doubles_nothing(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(finished.store)
    beta = finished.record.adapters[1].model_copy(update={"sha256": "d" * 64})
    record = with_adapters(finished.record, beta)

    def killed(shard_id: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finished.store, "remove_part", killed)
        with pytest.raises(KeyboardInterrupt):
            reopen_shards(finished.store, record, plan, {"beta"})
    assert len(finished.store.committed_parts()) == len(plan.shards)
    reopen_shards(finished.store, record, plan, {"beta"})
    journals = [
        journal for shard_id in shards_with(finished, "beta") for journal in finished.store.read_wip(shard_id).values()
    ]
    answers = [answer.fingerprint for journal in journals for answer in decode_journal(journal)]
    assert len(answers) == len(set(answers)) == 5


def test_rows_of_a_repaired_or_new_adapter_get_their_engine(finished: Any) -> None:
    plan = read_plan(finished.store)
    gamma = AdapterRecord(name="gamma", url="/gamma", verdict="exact", sha256="e" * 64, rank=4, weight_bytes=1000)
    broken = finished.record.adapters[2].model_copy(update={"verdict": "exact", "sha256": "f" * 64})
    reopened = shards_with(finished, "broken") | shards_with(finished, "gamma")
    assert reopened
    record = with_adapters(finished.record, gamma, broken)
    refreshed = reopen_shards(finished.store, record, plan, {"gamma", "broken"})
    assert reopened.isdisjoint(finished.store.committed_parts())
    assert all(not plan.shards[i].has_engine_work for i in reopened)
    for shard in (refreshed.shards[i] for i in reopened):
        assert shard.has_engine_work
        requests = read_shard(finished.store, record, shard.shard_id).requests
        assert shard.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests)
        assert shard.predicted_output_tokens
        assert shard.longest_output_tokens
        assert shard.adapter_bytes == gamma.weight_bytes + broken.weight_bytes
    assert read_plan(finished.store) == refreshed


def test_rows_of_each_adapter_are_counted_anew_where_they_were_dealt_out(finished: Any) -> None:
    plan = read_plan(finished.store)
    dealt = [replace(shard, adapter_rows=(shard.num_rows, *(0 for _ in shard.adapters))) for shard in plan.shards]
    gamma = AdapterRecord(name="gamma", url="/gamma", verdict="exact", sha256="e" * 64, rank=4)
    record = with_adapters(finished.record, gamma)
    refreshed = reopen_shards(finished.store, record, replace(plan, shards=tuple(dealt)), {"gamma"})
    for i in shards_with(finished, "gamma"):
        shard, requests = refreshed.shards[i], read_shard(finished.store, record, i).requests
        asked = [request.adapter_id for request in requests if isinstance(request, Request)]
        assert shard.adapter_rows == tuple(asked.count(adapter_id) for adapter_id in (*shard.adapters, None))


def test_nothing_changed_means_nothing_is_touched(finished: Any) -> None:
    plan = read_plan(finished.store)
    assert reopen_shards(finished.store, finished.record, plan, set()) == plan
    assert finished.store.is_finished()


def test_two_names_of_one_content_are_one_adapter_of_the_plan_and_two_of_its_rows(
    prepare_job: Callable[..., Any],
) -> None:
    names = ["alpha", "twin", None] * 8
    job = prepare_job(pa.table({"id": range(24), "prompt": [f"p{i}" for i in range(24)], "adapter": names}))
    twin = job.record.adapters[0].model_copy(update={"name": "twin"})
    job = replace(job, record=with_adapters(job.record, twin))
    with check_rows(job.store, job.record, IndexTotals.of(job.index())) as checked:
        assert [adapter.adapter_id for adapter in checked.serving] == ["a" * 64, "b" * 64]
        assert checked.number[1:].tolist() == [0, 0]
    plan = job.plan()
    assert {shard.adapters for shard in plan.shards} <= {("a" * 64,), ()}
    assert {name for found in plan.adapter_names for name in found} == {"alpha", "twin"}
    read = [row for shard in job.shards() for row in shard.table.select(["id", "adapter"]).to_pylist()]
    assert sorted((row["id"], row["adapter"]) for row in read) == list(enumerate(names))
