"""Rows of several tasks in one job: what each asks, and the columns that its answer has."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.columns import task_clashes
from lorabatch.jobs.record import AdapterRecord, differences
from lorabatch.pipeline.dataset.answers import RowAnswer, decode_journal, encode_answers
from lorabatch.pipeline.dataset.row_checks import without_padding
from lorabatch.pipeline.dataset.task_columns import probabilities
from lorabatch.pipeline.dataset.writer import answers_in_part, output_schema, part_bytes

Prepare = Callable[..., Any]
HEADS = (
    AdapterRecord(
        name="topics",
        url="/topics",
        verdict="exact",
        sha256="a" * 64,
        task="classify",
        labels=("sport", "war", "art"),
        problem_type="single_label_classification",
    ),
    AdapterRecord(
        name="tags",
        url="/tags",
        verdict="exact",
        sha256="b" * 64,
        task="classify",
        labels=("old", "new"),
        problem_type="multi_label_classification",
    ),
    AdapterRecord(
        name="stars",
        url="/stars",
        verdict="exact",
        sha256="c" * 64,
        task="classify",
        labels=("LABEL_0",),
        problem_type="regression",
    ),
    AdapterRecord(name="vectors", url="/vectors", verdict="exact", sha256="d" * 64, task="embed"),
    AdapterRecord(name="text", url="/text", verdict="exact", sha256="e" * 64),
)
NAMES = ["topics", "tags", "stars", "vectors", "text", None, "unknown"]
LOGITS = {"topics": [1.0, -1.0, 3.0], "tags": [0.0, 2.0], "stars": [4.5], "vectors": [0.6, 0.8]}


def with_heads(job: Any, adapters: tuple[AdapterRecord, ...] = HEADS) -> Any:
    return replace(job, record=job.record.model_copy(update={"adapters": adapters}))


def by_adapter(job: Any) -> dict[str | None, list[Request | RowAnswer]]:
    found: dict[str | None, list[Request | RowAnswer]] = {}
    for rows in job.shards():
        for name, request in zip(rows.adapters, rows.requests, strict=True):
            found.setdefault(name, []).append(request)
    return found


def answers_of(rows: Any) -> dict[str, RowAnswer]:
    """What an engine would answer, by `LOGITS`."""
    answers = {}
    for name, request, fingerprint in zip(rows.adapters, rows.requests, rows.fingerprints, strict=True):
        if isinstance(request, RowAnswer):
            continue
        numbers = LOGITS.get(name or "") if request.sampling.is_pooled else None
        labels = next((each.labels for each in HEADS if each.name == name), ())
        best = labels[int(np.argmax(numbers))] if numbers and labels else ""
        answers[request.request_id] = RowAnswer(
            fingerprint,
            request.adapter_id,
            best if numbers else "said",
            "stop",
            len(request.prompt_token_ids),
            0 if numbers else 3,
            "unmerged",
            1,
            pooled=None if numbers is None else np.array(numbers, "<f4").tobytes(),
            choice_logprobs=(math.log(0.3), math.log(0.1)) if request.sampling.task == "rerank" else None,
        )
    return answers


def written(job: Any) -> dict[str | None, dict[str, Any]]:
    """The rows of all parts by adapter, whose answers are read back as they were."""
    found = {}
    for rows in job.shards():
        answers = answers_of(rows)
        part = part_bytes(rows, answers, job.record)
        table = pq.read_table(io.BytesIO(part))
        assert table.schema.equals(output_schema(job.record))
        assert answers_in_part(io.BytesIO(part), rows, job.record) == answers
        assert list(decode_journal(encode_answers(answers.values()))) == list(answers.values())
        found |= {row["adapter"]: row for row in table.to_pylist()}
    return found


def table(**columns: Any) -> pa.Table:
    rows = {"id": list(range(len(NAMES))), "adapter": NAMES, "prompt": ["a b"] * len(NAMES)}
    return pa.table(rows | columns)


def test_adapters_say_what_their_rows_ask(prepare_job: Prepare) -> None:
    job = with_heads(prepare_job(table(), max_tokens=9, temperature=0.5, top_logprobs=2, n=2, pooling="mean"))
    found = by_adapter(job)
    assert [request.sampling for request in found["topics"]] == [SamplingParams().of_task("classify")]
    assert [request.sampling.pooling for request in found["vectors"]] == ["mean"]
    for name in ("text", None):
        assert [(r.sampling.task, r.sampling.max_tokens, r.sampling.top_logprobs) for r in found[name]] == [
            ("", 9, 2)
        ] * 2
    (unknown, *_) = found["unknown"]
    assert isinstance(unknown, RowAnswer)
    assert "head" not in (unknown.error or "")


def test_one_schema_holds_rows_of_all_tasks_and_is_read_back(prepare_job: Prepare) -> None:
    job = with_heads(prepare_job(table()))
    assert output_schema(job.record).field("embedding").type == pa.list_(pa.float32())
    found = written(job)
    assert [found[name]["label"] for name in NAMES] == ["art", "new", None, None, None, None, None]
    assert [(s["label"], s["logit"]) for s in found["topics"]["scores"]] == [
        ("sport", 1.0),
        ("war", -1.0),
        ("art", 3.0),
    ]
    assert math.fsum(s["probability"] for s in found["topics"]["scores"]) == pytest.approx(1.0)
    assert [s["probability"] for s in found["tags"]["scores"]] == pytest.approx([0.5, 0.880797], abs=1e-6)
    assert found["stars"]["scores"] == [{"label": "LABEL_0", "logit": 4.5, "probability": None}]
    assert found["vectors"]["embedding"] == pytest.approx([0.6, 0.8])
    assert found["text"]["scores"] is found["text"]["embedding"] is found["unknown"]["scores"] is None


def test_lists_of_completions_have_one_item_for_a_row_without_text(prepare_job: Prepare) -> None:
    found = written(with_heads(prepare_job(table(), samples="lists", n=2)))
    assert (len(found["topics"]["scores"]), len(found["text"]["scores"])) == (1, 2)


def test_a_column_gives_each_row_its_task(prepare_job: Prepare) -> None:
    tasks = ["generate", None, "embed", "rerank", "classify", "classify", None]
    job = with_heads(prepare_job(table(task=tasks)))
    found = by_adapter(job)
    assert [found[name][0].sampling.task for name in NAMES[:4]] == ["", "classify", "embed", "rerank"]
    assert found["vectors"][0].sampling.choice == ("yes", "no")
    assert found["text"][0].error == (
        "task='classify': adapter 'text' has no head that classifies. Correct the row, or leave it null for the job's "
        "value."
    )
    assert found[None][0].error.startswith("task='classify': the base model has no head that classifies")
    names = output_schema(job.record).names
    assert {"label", "scores", "embedding", "relevance", "choice_logprobs"} <= {*names}


@pytest.mark.parametrize("value", ["rank", 3, ""])
def test_an_unknown_task_is_refused_with_the_known_ones(prepare_job: Prepare, value: Any) -> None:
    if value:
        with pytest.raises(JobRequestError, match=f"task={value}: expected one of generate, classify, embed, rerank"):
            prepare_job(table(), task=value)
    if isinstance(value, str):
        found = by_adapter(with_heads(prepare_job(table(task=[value] * len(NAMES)))))
        is_error = isinstance(found["text"][0], RowAnswer)
        assert is_error == bool(value)


def test_rows_are_reranked_by_two_texts(prepare_job: Prepare) -> None:
    found = written(with_heads(prepare_job(table(), task="rerank", choice=[" yes", " no"]), HEADS[4:]))
    assert found["text"]["relevance"] == pytest.approx(0.75)
    assert found["unknown"]["relevance"] is None
    assert "label" not in found["text"]
    with pytest.raises(JobRequestError, match="expected two texts, the first for relevance"):
        prepare_job(table(), task="rerank", choice=["a", "b", "c"])
    with pytest.raises(JobRequestError, match="regex: a row that reranks chooses one of two texts"):
        prepare_job(table(), task="rerank", regex="x")


def test_a_row_without_text_scores_none(prepare_job: Prepare) -> None:
    found = by_adapter(with_heads(prepare_job(table(continuation=[" x"] * len(NAMES)))))
    assert "this row's task is classify, which scores no text" in found["topics"][0].error
    assert found["text"][0].sampling.continuation_token_ids


def test_a_job_without_heads_is_what_it_was(prepare_job: Prepare) -> None:
    job = prepare_job(table())
    assert not {"label", "scores", "embedding", "relevance"} & {*output_schema(job.record).names}
    given = with_heads(prepare_job(table(), task="generate"))
    assert not {"label", "scores"} & {*output_schema(given.record).names}
    assert all(
        isinstance(r, RowAnswer) or not r.sampling.is_pooled for rows in by_adapter(given).values() for r in rows
    )


def test_clashing_names_are_found_once_adapters_are_known(prepare_job: Prepare) -> None:
    gold = table(label=["x"] * len(NAMES))
    job = with_heads(prepare_job(gold))
    (problem,) = task_clashes(job.record)
    assert "input column 'label'" in problem
    assert "--output-prefix answer_" in problem
    assert task_clashes(with_heads(prepare_job(gold, output_prefix="answer_")).record) == []
    with pytest.raises(JobRequestError, match="input column 'label': the output has a column of that name"):
        prepare_job(gold, task="classify")


def test_adapters_of_another_task_make_another_job(prepare_job: Prepare) -> None:
    job = prepare_job(table())
    now = with_heads(job, HEADS[3:]).record
    assert differences(job.record, now) == [
        "adapters: tasks beside text were none, now embed: the output has other columns"
    ]
    assert differences(with_heads(job, HEADS[:1]).record, with_heads(job, HEADS[:2]).record) == []


def test_padding_behind_a_prompt_is_passed_over() -> None:
    assert without_padding([5, 0, 6, 0, 0], 0) == [5, 0, 6]
    assert without_padding([0, 0], 0) == [0]
    assert without_padding([5, 6], None) == [5, 6]


def test_probabilities_follow_the_kind_of_problem() -> None:
    far = np.array([1000.0, -1000.0], np.float32)
    assert probabilities(far, "single_label_classification") == [1.0, 0.0]
    assert probabilities(far, "multi_label_classification") == [1.0, 0.0]
    assert probabilities(far, "regression") == [None, None]
