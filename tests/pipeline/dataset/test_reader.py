"""A shard's rows come back in the plan's order, as the requests that the input asks."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.errors import DamagedRecordError, MissingFileError, StorageError
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset import schema
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.reader import ShardReader, ShardRows, read_shard
from lorabatch.pipeline.dataset.schema import KeptFiles


def test_requests_say_what_the_rows_ask(prepare_job: Callable[..., Any]) -> None:
    table = pa.table(
        {
            "id": ["base", "a", "b"],
            "adapter": [None, "alpha", "beta"],
            "prompt": ["x", "y", "z"],
            "temperature": pa.array([None, 1, None], pa.int64()),
            "stop": [None, ["end", "\n"], None],
            "logprobs": [None, True, None],
            "seed": pa.array([None, 7, None], pa.int8()),
        }
    )
    job = prepare_job(table, temperature=0.5, top_k=4, stop="halt")
    tokenizer = Tokenizer.from_folder(job.spec.model)
    found = {
        id_: request
        for shard in job.shards()
        for id_, request in zip(shard.table.column("id").to_pylist(), shard.requests, strict=True)
    }
    job_sampling = SamplingParams(max_tokens=8, temperature=0.5, top_k=4, stop=("halt",))
    own = SamplingParams(max_tokens=8, temperature=1.0, top_k=4, stop=("end", "\n"), logprobs=True, seed=7)
    assert {id_: request.sampling for id_, request in found.items()} == {
        "base": job_sampling,
        "a": own,
        "b": job_sampling,
    }
    assert isinstance(found["a"].sampling.temperature, float)
    assert {id_: request.adapter_id for id_, request in found.items()} == {
        "base": None,
        "a": "a" * 64,
        "b": "b" * 64,
    }
    assert list(found["b"].prompt_token_ids) == tokenizer.encode_batch(["z"], is_rendered=False)[0]
    assert len({request.stream_id for request in found.values()}) == 3
    assert all(0 <= request.stream_id < 2**64 for request in found.values())


def test_the_random_stream_belongs_to_the_row_wherever_it_is(prepare_job: Callable[..., Any]) -> None:
    def streams(table: pa.Table, **given: Any) -> dict[int, int]:
        job = prepare_job(table, **given)
        return {
            id_: request.stream_id
            for shard in job.shards()
            for id_, request in zip(shard.table.column("id").to_pylist(), shard.requests, strict=True)
        }

    table = pa.table({"id": range(40), "prompt": [f"p{i}" for i in range(40)]})
    reversed_rows = table.take(pa.array(range(39, -1, -1)))
    assert streams(table) == streams(reversed_rows, row_group_rows=3, rows_per_shard=2)


def test_rows_that_cannot_be_answered_carry_their_sentences(prepare_job: Callable[..., Any]) -> None:
    adapters = ["zzz", "alpah", "broken", "alpha"]
    job = prepare_job(pa.table({"id": range(4), "prompt": ["a", "a", "", ""], "adapter": adapters}))
    sentences = {}
    for shard in job.shards():
        for id_, request in zip(shard.table.column("id").to_pylist(), shard.requests, strict=True):
            assert isinstance(request, RowAnswer)
            sentences[id_] = request.error
    assert sentences[0] == "adapter='zzz': not among this job's adapters; known: alpha, beta, broken."
    assert "did you mean 'alpha'?" in sentences[1]
    assert sentences[2].startswith("prompt=''")
    assert sentences[2].endswith("adapter='broken': refused. all of lora_B is zero.")
    assert sentences[3] == "prompt='': expected text that is not empty. Fill it or drop the row."


def test_a_repaired_adapter_needs_no_new_index(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": ["a"], "adapter": ["broken"]}))
    job.plan()
    repaired = job.record.adapters[2].model_copy(update={"verdict": "exact", "sha256": "c" * 64})
    record = job.record.model_copy(update={"adapters": (*job.record.adapters[:2], repaired)})
    (request,) = read_shard(job.store, record, 0).requests
    assert isinstance(request, Request)
    assert request.adapter_id == "c" * 64


def test_shards_of_more_chunks_than_stay_open_are_read_by_many_threads(prepare_job: Callable[..., Any]) -> None:
    table = pa.table({"id": range(400), "prompt": [f"prompt {i}" for i in range(400)]})
    job = prepare_job(table, row_group_rows=20, rows_per_shard=13)
    shard_ids = [shard.shard_id for shard in job.plan().shards] * 3
    expected = {shard_id: read_shard(job.store, job.record, shard_id) for shard_id in set(shard_ids)}
    with closing(ShardReader(job.store, job.record)) as reader, ThreadPoolExecutor(8) as pool:
        for shard_id, found in zip(shard_ids, pool.map(reader.rows, shard_ids), strict=True):
            assert (found, found.table) == (expected[shard_id], expected[shard_id].table)
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "_lorabatch" in line}
        assert len(mapped) == 9, "the plan, and eight of twenty chunks"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 90),
    row_group_rows=st.integers(1, 50),
    rows_per_shard=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_rows_keep_their_values_whatever_the_chunks_and_shards(
    prepare_job: Callable[..., Any], num_rows: int, row_group_rows: int, rows_per_shard: int, seed: int
) -> None:
    names = [("alpha", "beta", None, "gamma")[(i * (seed + 1) + seed) % 4] for i in range(num_rows)]
    tags = pa.array([f"tag {i % 3}" for i in range(num_rows)]).dictionary_encode()
    table = pa.table(
        {
            "id": range(num_rows),
            "prompt": [f"prompt {i}" for i in range(num_rows)],
            "adapter": names,
            "tag": tags,
            "nested": [[{"n": i, "t": None}] for i in range(num_rows)],
        }
    )
    job = prepare_job(table, row_group_rows=row_group_rows, rows_per_shard=rows_per_shard)
    shards = job.shards()
    found = pa.concat_tables([shard.table.select(table.column_names) for shard in shards], promote_options="default")
    assert found.schema.equals(table.schema)
    assert found.sort_by("id").to_pylist() == table.to_pylist()
    for shard in shards:
        ids = zip(shard.requests, shard.table.column("__lb_request_id").to_pylist(), strict=True)
        assert all(request.request_id == id_ for request, id_ in ids if isinstance(request, Request))
        assert list(shard.fingerprints) == shard.table.column("__lb_fingerprint").to_pylist()
        adapters = shard.table.column("adapter").to_pylist()
        for name, request in zip(adapters, shard.requests, strict=True):
            assert isinstance(request, RowAnswer) == (name == "gamma")


def test_rows_of_a_shard_are_read_without_the_rest_of_the_chunk(
    prepare_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["alpha"] * 2000 + ["beta"] * 10
    job = prepare_job(pa.table({"id": range(2010), "prompt": ["a"] * 2010, "adapter": names}), row_group_rows=5000)
    plan = job.plan()
    batches: list[int] = []

    class Counting:
        def __init__(self, reader: Any) -> None:
            self.get_batch = lambda number: (batches.append(number), reader.get_batch(number))[1]

    use = KeptFiles.use

    @contextmanager
    def counted(*arguments: Any) -> Any:
        with use(*arguments) as reader:
            yield Counting(reader)

    monkeypatch.setattr(KeptFiles, "use", counted)
    shard_id = next(s.shard_id for s in plan.shards if s.adapters == ("b" * 64,))
    rows = read_shard(job.store, job.record, shard_id)
    # One batch of the plan, one of the prepared rows.
    assert len(batches) == 2
    assert rows.num_rows == 10


@pytest.mark.parametrize("whole_file_bytes", [1 << 20, 0], ids=["whole", "by_range"])
def test_shards_read_from_remote_storage_are_the_same(
    prepare_job: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, whole_file_bytes: int
) -> None:
    monkeypatch.setattr(schema, "_WHOLE_FILE_BYTES", whole_file_bytes)
    table = pa.table({"id": range(50), "prompt": [f"p{i}" for i in range(50)], "adapter": ["alpha", None] * 25})
    local = prepare_job(table, row_group_rows=4, rows_per_shard=9)
    remote = prepare_job(table, row_group_rows=4, rows_per_shard=9, output=f"memory://{tmp_path}/out")
    expected, found = local.shards(), remote.shards()
    assert not remote.store.location.is_local
    assert [shard.table for shard in found] == [shard.table for shard in expected]
    assert [shard.requests for shard in found] == [shard.requests for shard in expected]


def test_small_remote_files_are_read_once_for_all_shards(
    prepare_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"id": range(50), "prompt": [f"p{i}" for i in range(50)], "adapter": ["alpha", None] * 25})
    job = prepare_job(table, row_group_rows=25, rows_per_shard=5, output=f"memory://{tmp_path}/out")
    num_shards = len(job.plan().shards)
    opened: Counter[str] = Counter()
    original = Location.open

    def counted(location: Location, name: str, *options: Any) -> BinaryIO:
        opened[name] += 1
        return original(location, name, *options)

    monkeypatch.setattr(Location, "open", counted)
    with closing(ShardReader(job.store, job.record)) as reader:
        for shard_id in range(num_shards):
            shard = reader.rows(shard_id)
            assert reader.contents(shard_id) == shard.contents(job.record)
            assert len(reader.tokens(shard_id, [0])) == 1
            assert len(reader.numbers(shard_id, ["max_tokens"])["max_tokens"]) == shard.num_rows
    assert num_shards > 5
    assert len(opened) == 5, opened  # the plan, two chunks and their indexes
    assert set(opened.values()) == {1}, opened


@pytest.mark.parametrize("kept_bytes", [0, 10_000, 1 << 20])
def test_contents_of_remote_files_take_no_more_memory_than_their_limit(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(schema, "_KEPT_BYTES", kept_bytes)
    written = {}
    for number in range(4):
        with io.BytesIO() as file:
            with pa.ipc.new_file(file, pa.schema([("row", pa.int32())])) as writer:
                writer.write_table(pa.table({"row": pa.array([number] * 1000, pa.int32())}))
            written[number] = file.getvalue()
    kept, asked = KeptFiles(""), []

    def source_of(number: int) -> BinaryIO:
        asked.append(number)
        return io.BytesIO(written[number])

    for number in [0, 1, 2, 3, 3, 2]:
        with kept.use(number, source_of) as reader:
            assert reader.get_batch(0).column("row")[0].as_py() == number
    expected = {0: [0, 1, 2, 3, 3, 2], 10_000: [0, 1, 2, 3], 1 << 20: [0, 1, 2, 3]}
    assert asked == expected[kept_bytes], {number: len(data) for number, data in written.items()}


def test_prepared_rows_that_are_gone_or_damaged_are_named(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": ["a"]}))
    job.plan()
    path = job.store.location.local_path("_lorabatch/rows/chunk-00000.arrow")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedRecordError, match=r"chunk-00000\.arrow"):
        read_shard(job.store, job.record, 0)
    job.store.clean_up()
    with pytest.raises(MissingFileError, match="chunk-00000"):
        read_shard(JobStore(job.store.url), job.record, 0)


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_shard_that_takes_too_much_memory_is_named(
    prepare_job: Callable[..., Any], tmp_path: Path, place: str
) -> None:
    output = str(tmp_path / "out") if place == "local" else f"memory://{tmp_path}/out"
    table = pa.table({"id": range(40), "prompt": ["a"] * 40, "note": ["x" * 10_000] * 40})
    job = prepare_job(table, row_group_rows=10, rows_per_shard=40, output=output)
    job.plan()
    with pytest.raises(StorageError) as refusal:
        read_shard(job.store, job.record, 0, max_bytes=399_000)
    sentence = (
        "part-00000.parquet: its 40 rows take more than 0.0 GB in memory. Start over with fewer --rows-per-shard."
    )
    assert str(refusal.value) == sentence
    assert read_shard(job.store, job.record, 0, max_bytes=500_000).num_rows == 40


@pytest.mark.long
def test_the_largest_shard_is_read_and_a_larger_one_is_refused(
    prepare_job: Callable[..., Any],
) -> None:
    def half(start: int, num_rows: int) -> pa.Table:
        notes = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array(["x" * 1_000_000]))
        ids = range(start, start + num_rows)
        return pa.table({"id": ids, "prompt": ["a"] * num_rows, "note": notes.cast(pa.string())})

    def shard_of(num_rows: int) -> ShardRows:
        n = num_rows // 2
        job = prepare_job({"a.parquet": half(0, n), "b.parquet": half(n, n)}, n, rows_per_shard=num_rows)
        job.plan()
        return read_shard(job.store, job.record, 0)

    assert shard_of(2100).num_rows == 2100
    with pytest.raises(StorageError, match=r"its 2160 rows take more than 2\.1 GB in memory"):
        shard_of(2160)
