"""Answers of two jobs, or of two adapters, joined by row: against a join by dictionaries, and what cannot be joined."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import lorabatch
from lorabatch.cli import app
from lorabatch.jobs.comparison import NUM_EXAMPLES, Comparison, compare_answers
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.record import InputFile, InputRecord, JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore

MakeRecord = Callable[..., JobRecord]
Row = dict[str, Any]
ROLES = {"id": "id", "adapter": "adapter", "prompt": "prompt"}
FILE = InputFile(url="/in", name="in", size_bytes=1, footer_sha256="f" * 64, row_group_rows=(3, 4))


@pytest.fixture
def finished(tmp_path: Path, record: MakeRecord) -> Callable[..., JobStore]:
    """`finished(rows, num_parts=2, **changes)`: the output of a job that is done, with these rows."""
    made: list[JobStore] = []

    def make(
        rows: Sequence[Row] | pa.Table,
        num_parts: int = 2,
        roles: dict[str, str] = ROLES,
        file: InputFile = FILE,
        **options: Any,
    ) -> JobStore:
        store = JobStore(str(tmp_path / f"job{len(made)}"))
        made.append(store)
        spec = JobSpec(model="/model", input="/in.parquet", output=store.url, **options)
        recorded = InputRecord(files=(file,), roles=roles, schema_ipc="")
        store.freeze(record(spec=spec.without_secrets(), input=recorded, job_id=f"job-{len(made)}"))
        table = rows if isinstance(rows, pa.Table) else table_of(rows)
        for part in range(num_parts if table.num_rows else 0):
            sink = io.BytesIO()
            pq.write_table(table.take(pa.array(range(part, table.num_rows, num_parts), pa.int64())), sink)
            store.commit_part(part, sink.getvalue())
        store.write_summary({"rows": table.num_rows})
        store.mark_success()
        return store

    return make


def table_of(rows: Sequence[Row]) -> pa.Table:
    """The rows; columns without a value are texts, as in an output."""
    table = pa.Table.from_pylist(list(rows))
    fields = [f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


def row(
    key: Any, completion: str | None, adapter: str | None = "alpha", reason: str = "stop", tokens: int = 3, **more: Any
) -> Row:
    error = None if completion is not None else "no answer"
    reason = "error" if completion is None else reason
    answer = {"completion": completion, "finish_reason": reason, "completion_tokens": tokens, "error": error}
    return {"id": key, "adapter": adapter} | more | answer


SIDE = st.dictionaries(
    st.integers(0, 12),
    st.tuples(
        st.sampled_from([None, "a", "b", "ä\u2028"]), st.sampled_from([None, "", "alpha", "beta"]), st.booleans()
    ),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(ours=SIDE, others=SIDE, num_parts=st.integers(1, 3))
def test_every_row_is_counted_once_as_by_dictionaries(
    finished: Callable[..., JobStore], ours: dict[int, Any], others: dict[int, Any], num_parts: int
) -> None:
    sides = [
        {
            key: row(key, text, adapter, "length" if is_long else "stop")
            for key, (text, adapter, is_long) in side.items()
        }
        for side in (ours, others)
    ]
    both = sides[0].keys() & sides[1].keys()
    stores = [finished(list(side.values()), num_parts) for side in sides]
    if not both:
        with pytest.raises(JobRequestError, match="no 'id' is on both sides"):
            compare_answers(*stores)
        return
    found = compare_answers(*stores)
    first, second = sides
    same = {key for key in both if answer_of(first[key]) == answer_of(second[key])}
    assert (found.num_equal, found.num_different) == (len(same), len(both) - len(same))
    assert found.num_alone == (len(first.keys() - both), len(second.keys() - both))
    assert found.is_equal == (first.keys() == second.keys() == same)
    reasons = Counter((first[key]["finish_reason"], second[key]["finish_reason"]) for key in both)
    assert found.finish_reasons == reasons
    assert found.num_other_adapter == sum((first[k]["adapter"] or "") != (second[k]["adapter"] or "") for k in both)
    assert found.completion_tokens == (3 * len(both), 3 * len(both))
    assert total(found, "num_equal") == found.num_equal
    assert total(found, "num_different") == found.num_different
    alone = [part.num_alone for part in found.adapters.values()]
    assert tuple(map(sum, zip(*alone, strict=True))) == found.num_alone
    assert {name for name, _, _ in found.examples} <= {str(key) for key in both - same}
    assert len(found.examples) == min(NUM_EXAMPLES, len(both - same))
    for name, left, right in found.examples:
        for shown, given_rows in ((left, first), (right, second)):
            assert shown == {c: given_rows[int(name)][c] for c in shown} | {"adapter": shown["adapter"]}
    json.dumps(found.to_json())


def answer_of(found: Row) -> tuple[Any, Any]:
    return found["completion"], found["finish_reason"]


def total(found: Comparison, name: str) -> int:
    return sum(getattr(part, name) for part in found.adapters.values())


def test_a_job_beside_itself_is_equal_and_a_changed_option_is_named(finished: Callable[..., JobStore]) -> None:
    rows = [row(str(i), f"text {i}") for i in range(30)]
    one, other = finished(rows, max_tokens=16), finished(rows[::-1], 3, max_tokens=32)
    found = compare_answers(one, other)
    assert found.is_equal
    assert found.examples == ()
    assert [change for change in found.changes if change.startswith("max_tokens")] == ["max_tokens: was 16, now 32"]
    assert compare_answers(one, one).changes == ()


def test_examples_are_of_all_adapters_in_turn(finished: Callable[..., JobStore]) -> None:
    names = ["alpha"] * 50 + ["beta"] * 3 + [None]
    one, other = (
        finished([row(i, f"{side} {i}", name) for i, name in enumerate(names)]) for side in ("first", "second")
    )
    found = compare_answers(one, other)
    shown = Counter(left["adapter"] for _, left, _ in found.examples)
    assert shown == {"": 1, "beta": 3, "alpha": 6}
    assert found.examples[0][1:] == tuple(
        {"adapter": "", "finish_reason": "stop", "completion": f"{side} 53", "error": None}
        for side in ("first", "second")
    )


def test_two_adapters_of_one_job_are_joined_by_a_column_that_both_have(finished: Callable[..., JobStore]) -> None:
    rows = [row(f"{name}-{i}", f"{i % 2 or name}", name, question=i) for i in range(6) for name in ("alpha", "beta")]
    store = finished([*rows, row("base", "x", None, question=0)])
    found = compare_answers(store, store, adapters=("alpha", "beta"), on="question")
    assert (found.num_equal, found.num_different, found.num_alone) == (3, 3, (0, 0))
    assert found.num_other_adapter == 6
    assert [side.rpartition(", ")[2] for side in found.sides] == ["adapter alpha", "adapter beta"]
    found = compare_answers(store, store, adapters=("", "beta"), on="question")
    assert (found.num_equal, found.num_different, found.num_alone) == (0, 1, (0, 5))
    assert found.sides[0].endswith(", base model")


def test_lists_of_completions_and_completions_as_rows_are_the_same_rows(finished: Callable[..., JobStore]) -> None:
    texts = {"a": ["x", "y", "z"], "b": ["u"], "c": ["v", "w"]}
    listed = [
        {"id": key, "adapter": None, "completion": answers, "finish_reason": ["stop"] * len(answers)}
        | {"completion_tokens": [1] * len(answers), "error": None}
        for key, answers in texts.items()
    ]
    rows = [
        row(key, text, None, tokens=1, sample=i) for key, answers in texts.items() for i, text in enumerate(answers)
    ]
    options = {"temperature": 1.0, "n": 3}
    one, other = finished(listed, samples="lists", **options), finished(rows, **options)
    assert compare_answers(one, other).num_equal == 6
    rows[1]["completion"] = "another"
    found = compare_answers(one, finished(rows[:-1], **options))
    assert (found.num_equal, found.num_different, found.num_alone) == (4, 1, (1, 0))
    assert [name for name, _, _ in found.examples] == ["a, sample 1"]
    assert [shown["completion"] for shown in found.examples[0][1:]] == ["y", "another"]


def test_ids_of_other_widths_dictionaries_and_prefixed_columns_are_joined(finished: Callable[..., JobStore]) -> None:
    rows = [row(i, f"text {i}") for i in range(5)]
    table = pa.Table.from_pylist(rows)
    narrow = table.set_column(0, "id", table["id"].cast(pa.int16()))
    narrow = narrow.set_column(1, "adapter", narrow["adapter"].dictionary_encode())
    prefixed = narrow.rename_columns([*narrow.column_names[:2], *(f"new_{name}" for name in narrow.column_names[2:])])
    assert compare_answers(finished(table), finished(prefixed, output_prefix="new_")).num_equal == 5
    texts = table.set_column(0, "id", table["id"].cast(pa.string()))
    coded = texts.set_column(0, "id", texts["id"].dictionary_encode())
    assert compare_answers(finished(texts), finished(coded)).num_equal == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: [r | {"id": str(r["id"])} for r in rows], "'id' has type int64 and 'id' has type string"),
        (lambda rows: [r | {"id": [r["id"]]} for r in rows], "on='id': has type list.* Name a column of texts"),
        (lambda rows: [r | {"id": r["id"] + 100} for r in rows], r"no 'id' is on both sides \(0, 2, 4, …; 100, 102"),
        (lambda rows: [], "no 'id' is on both sides .*no rows"),
        (lambda rows: [r | {"id": 7} for r in rows], "1 values are in several rows of .*, such as 7"),
        (lambda rows: [r | {"id": r["id"] or None} for r in rows], "1 rows of .* have no value there"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_words(
    finished: Callable[..., JobStore], change: Callable[[list[Row]], list[Row]], expected: str
) -> None:
    rows = [row(i, f"text {i}") for i in range(5)]
    with pytest.raises(JobRequestError, match=expected):
        compare_answers(finished(rows), finished(change(rows)))


def test_columns_adapters_made_ids_and_jobs_that_are_not_there_are_named(finished: Callable[..., JobStore]) -> None:
    rows = [row(i, f"text {i}", ["alpha", None][i % 2]) for i in range(4)]
    store = finished(rows)
    with pytest.raises(JobRequestError, match=r"on='question': .* has no such column. It has id, adapter, completion"):
        compare_answers(store, store, on="question")
    with pytest.raises(JobRequestError, match=r"adapter='gamma': no row of .* names it. .*\(base model\), alpha"):
        compare_answers(store, store, adapters=("alpha", "gamma"))
    made = {"adapter": "adapter", "prompt": "prompt"}
    one = finished([r | {"id": f"in:{r['id']}"} for r in rows], roles=made)
    other = finished(
        [r | {"id": f"in:{r['id']}"} for r in rows], roles=made, file=FILE.model_copy(update={"size_bytes": 2})
    )
    with pytest.raises(JobRequestError, match=r"ids were made .* 'in' is not the same file in both jobs"):
        compare_answers(one, other)
    assert compare_answers(one, finished([r | {"id": f"in:{r['id']}"} for r in rows])).is_equal
    store.unmark_success()
    with pytest.raises(JobRequestError, match="this job has not finished"):
        compare_answers(one, store)
    with pytest.raises(JobRequestError, match="no job there"):
        compare_answers(one, JobStore(f"{store.url}-nowhere"))


def compare(*words: str) -> tuple[int, str]:
    """Exit code, and what `lorabatch compare` prints."""
    done = CliRunner().invoke(app, ["compare", *words], env={"COLUMNS": "150"})
    return done.exit_code, done.output


def test_the_command_shows_what_differs_and_exits_with_1(finished: Callable[..., JobStore]) -> None:
    rows = [row(i, "the same beginning " * 20 + f"and end {i}", ["alpha", None][i % 2]) for i in range(8)]
    one = finished(rows, max_tokens=16)
    changed = [r | {"completion": r["completion"] + "\x1b[31m", "finish_reason": "length"} for r in rows[:2]]
    other = finished([*changed, *rows[2:7]], max_tokens=32)
    assert compare(one.url, one.url)[0] == 0
    code, printed = compare(one.url, other.url)
    assert code == 1
    for line in ("max_tokens: was 16, now 32", "finish reason stop, then length: 2 rows", "finish reason stop: 5 rows"):
        assert line in printed
    assert "5 rows equal, 2 different, 1 only on the first side, 0 only on the second" in printed
    assert "and end 1\\x1b[31m" in printed
    assert "\x1b[31m" not in printed
    cells = [line.strip("│┃ ").replace(" ", "") for line in printed.splitlines()]
    assert "alpha│3│1│0│0│3.0│3.0" in cells
    assert "(basemodel)│2│1│1│0│3.0│3.0" in cells
    code, printed = compare(one.url, other.url, "--json")
    found = json.loads(printed)
    assert code == 1
    assert (found["num_equal"], found["num_different"], found["num_alone"]) == (5, 2, [1, 0])
    assert found["finish_reasons"] == [["stop", "stop", 5], ["stop", "length", 2]]
    assert [example["row"] for example in found["examples"]] == ["1", "0"]
    same = lorabatch.Job(one.url).compare_with(lorabatch.Job(other.url))
    assert found == json.loads(json.dumps(same.to_json()))
    assert "5 rows equal" in str(same)
    assert "only on the first side" in same._repr_html_()


def test_the_command_compares_two_adapters_of_a_job(finished: Callable[..., JobStore]) -> None:
    rows = [row(f"{name}-{i}", f"answer {i}", name, question=i) for i in range(3) for name in ("alpha", "beta")]
    store = finished(rows)
    code, printed = compare(store.url, "--adapter", "alpha", "--adapter", "beta", "--on", "question")
    assert code == 0
    assert "Joined by question: 3 rows equal" in printed
    code, printed = compare(store.url, store.url, "--adapter", "alpha")
    assert code == 0
    assert "3 rows equal" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--adapter", "alpha"], "--adapter was given 1 times: expected two adapters of one job"),
        (["--on", "question"], "--adapter was given 0 times"),
        (["other", *["--adapter", "alpha"] * 3], "--adapter was given 3 times"),
        (["other", "--rows", "3"], "--rows: only for one job"),
        (["other", "--cluster", "local"], "--cluster: only for one job"),
        (["other"], "no job there"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    finished: Callable[..., JobStore], words: list[str], said: str, tmp_path: Path
) -> None:
    store = finished([row(1, "x")])
    code, printed = compare(store.url, *[str(tmp_path / word) if word == "other" else word for word in words])
    assert code == 2
    assert said in printed
