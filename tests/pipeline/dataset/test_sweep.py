"""A sweep's rows: prepared once for each tokenizer, asked of every adapter, drawn alike, each with its own answer."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.request import Request
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.wide import wide_table
from lorabatch.jobs.record import AdapterRecord
from lorabatch.pipeline.coordinator.summary import account_parts
from lorabatch.pipeline.dataset.answers import RowAnswer, encode_answers
from lorabatch.pipeline.dataset.schema import arrow_file
from lorabatch.pipeline.dataset.wide_files import wide_ranges, write_wide_files
from lorabatch.pipeline.dataset.writer import answers_in_part, output_schema, part_bytes
from lorabatch.pipeline.worker.run_shard import read_kept

Prepare = Callable[..., Any]
Echo = Callable[..., Any]
SWEPT = (None, "alpha", "beta")


def table_of(num_rows: int = 30) -> pa.Table:
    return pa.table({"id": range(num_rows), "prompt": [f"prompt {i}" for i in range(num_rows)]})


def asked_of(job: Any) -> list[tuple[int, str | None, Request | RowAnswer]]:
    """Id, name of the adapter and request of every row of the plan."""
    return [
        asked
        for rows in job.shards()
        for asked in zip(rows.table.column("id").to_pylist(), rows.adapters, rows.requests, strict=True)
    ]


@pytest.mark.parametrize("rows_per_shard", [None, 1, 7, 500])
def test_every_adapter_is_asked_every_row_once(prepare_job: Prepare, rows_per_shard: int | None) -> None:
    job = prepare_job(table_of(), row_group_rows=11, swept=SWEPT, rows_per_shard=rows_per_shard)
    asked = asked_of(job)
    assert Counter((row_id, name) for row_id, name, _ in asked) == Counter((i, n) for i in range(30) for n in SWEPT)
    assert len({request.request_id for *_, request in asked}) == 90
    ids = {"alpha": "a" * 64, "beta": "b" * 64, None: None}
    assert all(request.adapter_id == ids[name] for _, name, request in asked)
    for row_id in range(30):
        same = [request for number, _, request in asked if number == row_id]
        assert len({(r.stream_id, r.prompt_token_ids) for r in same}) == 1, "adapters draw the same random numbers"
    assert len({request.stream_id for *_, request in asked}) == 30


def test_large_adapters_have_shards_of_their_own(prepare_job: Prepare) -> None:
    job = prepare_job(table_of(200), swept=SWEPT, batch_rows=8)
    assert {len(names) for names in job.plan().adapter_names} == {0, 1}
    assert {len(shard.adapters) for shard in job.plan().shards} == {0, 1}


def test_rows_are_tokenised_and_kept_once(prepare_job: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode_each

    def counting(self: Tokenizer, given: list[str], **options: Any) -> Any:
        texts.extend(given)
        return encode(self, given, **options)

    monkeypatch.setattr(Tokenizer, "encode_each", counting)
    job = prepare_job(table_of(), row_group_rows=11, swept=SWEPT)
    totals = job.index()
    assert len(texts) == 30
    assert sum(total.num_rows for total in totals) == 90
    assert sum((total.rows_per_adapter for total in totals), Counter()) == dict.fromkeys(SWEPT, 30)
    kept = 0
    for chunk in range(3):
        with arrow_file(job.store.rows_source(chunk)) as reader:
            kept += reader.read_all().num_rows
    assert kept == 30


def test_an_adapter_with_another_vocabulary_has_its_rows_checked_by_it(prepare_job: Prepare) -> None:
    """Two adapters with one larger vocabulary are prepared together, and draw what the others draw."""
    names = ("alpha", "large", "large2")
    adapters = tuple(
        AdapterRecord(
            name=name, url=f"/{name}", verdict="exact", sha256=name[-1] * 64, rank=8, vocab_size=400 * ("la" in name)
        )
        for name in names
    )
    tokens = pa.array([[5, 6], [5, 350], [7, 399], [500]], pa.list_(pa.int64()))
    table = pa.table({"id": range(4), "prompt_token_ids": tokens})
    job = prepare_job(table, swept=(None, *names), adapters=adapters)
    asked = {(row_id, name): request for row_id, name, request in asked_of(job)}
    assert len(asked) == 16
    is_error = {key: isinstance(request, RowAnswer) for key, request in asked.items()}
    wrong = {name: {row for row in range(4) if is_error[row, name]} for name in (None, *names)}
    assert wrong == {None: {1, 2, 3}, "alpha": {1, 2, 3}, "large": {3}, "large2": {3}}
    assert len({asked[0, name].stream_id for name in (None, *names)}) == 1


def test_several_completions_of_each_adapter_are_lists_of_its_row(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(table_of(9), swept=SWEPT, n=3, samples="lists", rows_per_shard=4)
    found = Counter()
    for rows in job.shards():
        part = pq.read_table(io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record)))
        assert {len(texts) for texts in part.column("completion").to_pylist()} == {3}
        found.update(zip(part.column("id").to_pylist(), part.column("adapter").to_pylist(), strict=True))
    assert found == Counter((i, name) for i in range(9) for name in SWEPT)


def test_parts_name_the_adapter_and_are_read_back(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(table_of(), row_group_rows=11, swept=(*SWEPT, "broken"), rows_per_shard=13)
    found = Counter()
    for rows in job.shards():
        answers = answer_by_echo(rows)
        part = part_bytes(rows, answers, job.record, "run")
        table = pq.read_table(io.BytesIO(part))
        assert table.schema.remove_metadata().equals(output_schema(job.record))
        assert answers_in_part(io.BytesIO(part), rows, job.record) == {
            name: replace(answer, reused_prompt_tokens=None) for name, answer in answers.items()
        }
        found.update(zip(table.column("adapter").to_pylist(), table.column("error").is_null().to_pylist(), strict=True))
        assert job.store.commit_part(rows.shard_id, part)
    assert found == {(None, True): 30, ("alpha", True): 30, ("beta", True): 30, ("broken", False): 30}
    account = account_parts([rows.shard_id for rows in job.shards()], job.store, job.record, "run")
    account.check_complete(job.plan())
    assert {outcome.adapter: outcome.num_rows for outcome in account.adapter_outcomes()} == dict.fromkeys(
        ("", "alpha", "beta", "broken"), 30
    )


def test_journalled_answers_go_to_their_own_adapter(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    """Rows of one fingerprint are in one shard here; names of one content share answers."""
    twin = AdapterRecord(name="twin", url="/twin", verdict="exact", sha256="a" * 64, rank=8, weight_bytes=1000)
    alpha, beta = (
        AdapterRecord(name=name, url=f"/{name}", verdict="exact", sha256=name[0] * 64, rank=8, weight_bytes=1000)
        for name in ("alpha", "beta")
    )
    swept = (None, "alpha", "beta", "twin")
    job = prepare_job(table_of(6), swept=swept, adapters=(alpha, beta, twin), rows_per_shard=24)
    num_kept = 0
    for rows in job.shards():
        answers = {
            name: replace(answer, completion=f"{answer.adapter_sha256} {answer.completion}")
            for name, answer in answer_by_echo(rows).items()
        }
        some = [answer for answer in answers.values() if answer.adapter_sha256 in (None, "a" * 64)]
        job.store.append_wip(rows.shard_id, "left", encode_answers(some))
        kept = read_kept(job.store, job.record, rows)
        assert all(kept.answers[name].completion == answers[name].completion for name in kept.answers)
        assert {answers[name].adapter_sha256 for name in kept.answers} <= {None, "a" * 64}
        num_kept += len(kept.answers)
    assert num_kept == 18


def test_a_sweep_of_no_rows_has_a_plan(prepare_job: Prepare) -> None:
    job = prepare_job(table_of(1).slice(0, 0), swept=SWEPT)
    assert job.plan().num_rows == 0


def test_ids_in_several_rows_are_named_once(prepare_job: Prepare) -> None:
    table = pa.table({"id": [1, 2, 2], "prompt": ["a", "b", "c"]})
    job = prepare_job(table, swept=SWEPT)
    with pytest.raises(Exception, match=r"1 id appears .*: 2 at rows.parquet:1, rows.parquet:2\."):
        job.plan()


@pytest.mark.parametrize("column", ["label", "labels"])
def test_answers_are_scored_by_a_column(prepare_job: Prepare, answer_by_echo: Echo, column: str) -> None:
    table = pa.table(
        {
            "id": range(4),
            "prompt": ["a", "b", "c", "d"],
            "label": ["right", "wrong", None, "right"],
            "labels": [["no", "right"], ["wrong"], [], ["right"]],
        }
    )
    job = prepare_job(table, swept=SWEPT, expected=column)
    scores = Counter()
    for rows in job.shards():
        answers = {name: replace(answer, completion=" right\n") for name, answer in answer_by_echo(rows).items()}
        part = part_bytes(rows, answers, job.record)
        found = pq.read_table(io.BytesIO(part))
        scores.update(zip(found.column("id").to_pylist(), found.column("score").to_pylist(), strict=True))
        assert job.store.commit_part(rows.shard_id, part)
    assert scores == {(0, 1.0): 3, (1, 0.0): 3, (2, None): 3, (3, 1.0): 3}
    account = account_parts([rows.shard_id for rows in job.shards()], job.store, job.record, "run")
    for outcome in account.adapter_outcomes():
        assert outcome.score["mean"] == pytest.approx(2 / 3)
        assert outcome.score["num_rows"] == 3
        if outcome.adapter:
            assert outcome.score["to_base"]["difference"] == 0
            assert outcome.score["to_base"]["num_rows"] == 3


def test_rows_that_differ_from_the_base_are_shown(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": [f"r{i}" for i in range(40)], "prompt": ["p"] * 40, "label": ["yes"] * 40})
    job = prepare_job(table, swept=SWEPT, expected="label")
    for rows in job.shards():
        ids = rows.table.column("id").to_pylist()
        answers = answer_by_echo(rows)
        for row_id, name, request in zip(ids, rows.adapters, rows.requests, strict=True):
            number = int(row_id[1:])
            is_right = {None: number % 2 == 0, "alpha": number % 4 < 2, "beta": number % 2 == 0}[name]
            text = "yes" if is_right else f"no {name}"
            answers[request.request_id] = replace(answers[request.request_id], completion=text)
        assert job.store.commit_part(rows.shard_id, part_bytes(rows, answers, job.record))
    account = account_parts([rows.shard_id for rows in job.shards()], job.store, job.record, "run")
    base, alpha, beta = (outcome.score for outcome in account.adapter_outcomes())
    assert [score["mean"] for score in (base, alpha, beta)] == [0.5, 0.5, 0.5]
    assert "flips" not in base
    assert "to_base" not in base
    assert beta["flips"] == []
    assert (alpha["to_base"]["num_better"], alpha["to_base"]["num_worse"]) == (10, 10)
    assert [flip["is_better"] for flip in alpha["flips"]] == [True] * 3 + [False] * 3
    better = alpha["flips"][0]
    assert (better["answer"], better["before"], better["right"]) == ("yes", "no None", "yes")


def test_a_wrong_right_answer_is_an_error_row(prepare_job: Prepare) -> None:
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"], "label": ["a(", "b"]})
    job = prepare_job(table, swept=SWEPT, expected="label", score_by="regex")
    [kind] = job.plan().errors
    assert (kind.kind, kind.num_rows) == ("expected", 3)
    assert kind.sentence.startswith("expected='a('")


@pytest.mark.parametrize("samples", ["rows", "lists"])
def test_a_wide_table_has_a_struct_of_each_adapter(prepare_job: Prepare, answer_by_echo: Echo, samples: str) -> None:
    job = prepare_job(table_of(8), swept=SWEPT, n=2, samples=samples, rows_per_shard=5, row_group_rows=3)
    parts = [pq.read_table(io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record))) for rows in job.shards()]
    answers = pa.concat_tables(parts)
    wide = wide_table(answers, job.record)
    assert wide.column_names[-3:] == ["base_model", "alpha", "beta"]
    assert wide.num_rows == 8 * (2 if samples == "rows" else 1)
    long = {(row["id"], row.get("sample"), row["adapter"]): row for row in answers.to_pylist()}
    for row in wide.to_pylist():
        for name, column in (("alpha", "alpha"), (None, "base_model")):
            asked = long[row["id"], row.get("sample"), name]
            assert row[column] == {key: asked[key] for key in row[column]}
            assert row["prompt"] == asked["prompt"]
    without = wide_table(answers.filter(pc.not_equal(pc.fill_null(answers["adapter"], ""), "beta")), job.record)
    assert without["beta"].null_count == without.num_rows


def test_a_wide_table_needs_a_sweep_and_names_of_its_own(prepare_job: Prepare) -> None:
    job = prepare_job(table_of(1))
    with pytest.raises(JobRequestError, match="no sweep"):
        wide_table(pa.Table.from_batches([], output_schema(job.record)), job.record)
    job = prepare_job(table_of(1).append_column("alpha", pa.array([1])), swept=SWEPT)
    with pytest.raises(JobRequestError, match=r"adapter 'alpha': 'alpha' is its column and another one"):
        wide_table(pa.Table.from_batches([], output_schema(job.record)), job.record)


def wide_rows(job: Any, answer_by_echo: Echo, rows_per_file: int) -> list[list[dict[str, Any]]]:
    """The rows of each file of a wide output that is made of a job's parts."""
    spec = job.record.spec.model_copy(update={"shape": "wide", "rows_per_shard": rows_per_file})
    job = replace(job, record=job.record.model_copy(update={"spec": spec}))
    job.store.replace_record(job.record)
    shards = job.shards()
    for rows in shards:
        assert job.store.commit_part(rows.shard_id, part_bytes(rows, answer_by_echo(rows), job.record))
    shard_ids = [rows.shard_id for rows in shards]
    assert job.store.contents().parts.keys() == {*shard_ids}
    sizes = write_wide_files(wide_ranges(job.record, 0, 0), job.store, job.record, shard_ids)
    assert job.store.contents().files == sizes
    files = []
    for number in sorted(sizes):
        with job.store.open_file(number) as file:
            files.append(pq.read_table(file).to_pylist())
    return files


@pytest.mark.parametrize("samples", ["rows", "lists"])
def test_files_of_a_wide_output_have_the_rows_in_the_order_of_the_input(
    prepare_job: Prepare, answer_by_echo: Echo, samples: str
) -> None:
    tables = {"b.parquet": table_of(10), "a.parquet": pa.table({"id": [40, 31, 32], "prompt": ["x", "y", "z"]})}
    job = prepare_job(tables, swept=SWEPT, n=2, samples=samples, rows_per_shard=5, row_group_rows=3)
    files = wide_rows(job, answer_by_echo, rows_per_file=4)
    each = 2 if samples == "rows" else 1
    assert [len(rows) for rows in files] == [3 * each, 3 * each, 3 * each, 4 * each]
    assert [row["id"] for rows in files for row in rows][::each] == [40, 31, 32, *range(10)]
    for row in (row for rows in files for row in rows):
        assert row["alpha"]["adapter_sha256"] == "a" * 64
        assert row["alpha"]["completion"] == row["base_model"]["completion"]
        assert samples == "rows" or len(row["alpha"]["completion"]) == 2


def test_a_row_may_be_refused_for_one_adapter_alone(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    """The token 400 is in the vocabulary of one adapter alone."""
    sizes = {"alpha": 0, "beta": 500}
    adapters = tuple(
        AdapterRecord(name=n, url=n, verdict="exact", sha256=n[0] * 64, rank=8, vocab_size=size)
        for n, size in sizes.items()
    )
    broken = AdapterRecord(name="broken", url="broken", verdict="refused", reasons=("it is broken.",))
    table = pa.table({"id": [1, 2, 3], "prompt_token_ids": [[3, 4], [3, 400], [5]]})
    job = prepare_job(table, swept=(None, "alpha", "beta", "broken"), adapters=(*adapters, broken))
    [rows] = wide_rows(job, answer_by_echo, rows_per_file=9)
    errors = [{name: row[name]["error"] for name in ("base_model", "alpha", "beta", "broken")} for row in rows]
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert [one["beta"] for one in errors] == [None] * 3
    assert all("it is broken" in one["broken"] for one in errors)
    assert (
        [one["alpha"] is None for one in errors] == [one["base_model"] is None for one in errors] == [True, False, True]
    )
    assert rows[1]["beta"]["completion"] == "echo (3, 400)"
    assert rows[1]["alpha"]["completion"] is None


def test_rows_without_an_id_stay_apart(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": ["a", None, "b", None], "prompt": ["w", "x", "y", "z"]})
    job = prepare_job(table, swept=SWEPT, rows_per_shard=2)
    parts = [pq.read_table(io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record))) for rows in job.shards()]
    read = wide_table(pa.concat_tables(parts), job.record)
    [rows] = wide_rows(job, answer_by_echo, rows_per_file=9)
    assert [(row["id"], row["prompt"]) for row in rows] == list(zip(*table.to_pydict().values(), strict=True))
    assert sorted(read["prompt"].to_pylist()) == ["w", "x", "y", "z"]
    for row in (*rows, *read.to_pylist()):
        assert all((row[name]["error"] is None) == (row["id"] is not None) for name in ("base_model", "alpha", "beta"))
