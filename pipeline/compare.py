"""`compare`: answers some rows of a finished job in float32 as well, and measures how the answers differ."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from distributed import Client

from ..engine.config import DeviceKind, products_format
from ..jobs.agreement import Agreement, Answer
from ..jobs.errors import JobRequestError
from ..jobs.history import keep_agreement
from ..jobs.input.columns import (
    DEFAULT_ID_COLUMN,
    answer_fields,
    output_name,
    records_samples,
    sample_field,
    settings_in,
)
from ..jobs.spec import JobSpec
from ..jobs.stages import refuse_stages
from ..jobs.storage.location import Location
from ..jobs.storage.redaction import redacted_url, storage_reason
from ..jobs.store import COMPARISON, JobStore
from .cluster.connect import connected
from .cluster.devices import find_device, find_device_of_workers
from .messages import ENGINE_FACTORY
from .run import Progress, SilentProgress, run

logger = logging.getLogger(__name__)
_ROWS = "rows.parquet"
# Most parts that rows are taken from.
_MOST_PARTS = 16
# Column for the number of the sampled row, in the small jobs' input and output.
_NUMBER = "lorabatch_row"
# Roles of columns by which rows have several completions.
_SEVERAL = ("n", "continuation")
_REFERENCE = {"dtype": "float32", "base_quantization": "none"}


def compare(
    store: JobStore,
    spec: JobSpec,
    num_rows: int,
    *,
    client: Client | None = None,
    progress: Progress | None = None,
    engine_factory: str = ENGINE_FACTORY,
) -> Agreement:
    """Answer `num_rows` rows of the finished job in `store` again, in its number format and in float32, by two small
    jobs, and keep how the answers agree beside the job. `spec`: options of the job, with which both small jobs run; on
    an embedded cluster they have one worker.

    Raises `JobRequestError` when there is nothing to compare, and what `run` raises.
    """
    record = store.read_record()
    shown = redacted_url(store.url)
    if not store.is_finished():
        raise JobRequestError(f"output={shown!r}: this job has not finished. Wait for it, or `lorabatch resume` it.")
    refuse_stages(record, shown)
    products = products_format(_device_kind(spec, client), spec.dtype, spec.base_quantization)
    if products == "float32":
        raise JobRequestError(
            f"output={shown!r}: this job was computed in float32, which others are compared with. Name a job that was "
            "run with --dtype bfloat16 or --base-quantization int8."
        )
    if lacking := sorted({*record.input.dropped} & {*record.input.roles.values(), *record.input.template_columns}):
        raise JobRequestError(
            f"output={shown!r}: its rows lack column {lacking[0]!r}, which this job reads and does not copy, so "
            "that they cannot be answered again. Compare a job that was run without --drop and --keep."
        )
    settings = [role for role, column in settings_in(record.input.roles).items() if role == column]
    # the sampled rows of a sweep have their adapter in a column, and an id several times
    columns = {**spec.columns, **({"adapter": record.input.roles["adapter"], "id": ""} if record.swept else {})}
    spec = spec.model_copy(update={"columns": columns})
    rows = _sample(store, num_rows)
    if not rows.num_rows:
        raise JobRequestError(f"output={shown!r}: no row of this job has an answer to compare.")
    options = {"client": client, "progress": progress or SilentProgress(), "engine_factory": engine_factory}
    with _folder(store) as folder:
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink)
        folder.write(_ROWS, sink.getvalue())
        ours = _answers(_small_job(spec, settings, folder.url, "own", {}), options)
        reference = _answers(_small_job(spec, settings, folder.url, "float32", _REFERENCE), options)
    both = sorted(ours.keys() & reference.keys())
    if not both:
        raise JobRequestError(f"output={shown!r}: none of {rows.num_rows} rows was answered again.")
    found = Agreement.of(record.job_id, products, [(ours[i], reference[i]) for i in both])
    store.check_holder(record.job_id)
    store.write_agreement(found)
    keep_agreement(record.model.sha256, found)
    return found


def _device_kind(spec: JobSpec, client: Client | None) -> DeviceKind:
    """Kind of the device that the job's engines run on."""
    if client is None and spec.is_embedded:
        return find_device(spec.device, spec.tensor_parallel).kind
    with connected(spec, client) as dask:
        return find_device_of_workers(dask, spec.device, spec.tensor_parallel).kind


def _small_job(spec: JobSpec, settings: Collection[str], folder: str, name: str, changes: Mapping[str, str]) -> JobSpec:
    """The options of a small job over the sampled rows. `settings`: settings that columns of their own name give for
    each row. `changes`: options that differ from the job's.
    """
    given = {
        "input": f"{folder}/{_ROWS}",
        "output": f"{folder}/{name}",
        # These two fit the job's number format and number of rows only.
        "cost_model": None,
        "rows_per_shard": None,
        "logprobs": True,
        "teacher_top_k": 0,
        "n": 1,
        "samples": "rows",
        "columns": {role: name for role, name in spec.columns.items() if role not in _SEVERAL},
        "row_settings": [role for role in settings if role not in (*_SEVERAL, *spec.columns)],
        "keep": (),
        "drop": (),
        "for_each_adapter": (),
        "include_base": False,
        "expected": None,
        "score_by": "exact",
        "shape": "long",
        "workers": 1 if spec.is_embedded else spec.workers,
        **changes,
    }
    return JobSpec(**spec.model_dump(exclude=set(given)) | given)


def _answers(spec: JobSpec, options: Mapping[str, Any]) -> dict[int, Answer]:
    """Run a small job and return its answers by number of the sampled row, without error rows."""
    result = run(spec, **options)
    store = JobStore(spec.output, spec.storage_options)
    found: dict[int, Answer] = {}
    for part in range(result.num_parts):
        with store.open_part(part) as file:
            ours = [f"{spec.output_prefix}{name}" for name in ("error", "token_ids", "token_logprobs")]
            columns = pq.read_table(file, columns=[_NUMBER, *ours]).select([_NUMBER, *ours]).to_pydict().values()
        rows = zip(*columns, strict=True)
        found |= {number: (ids, logprobs) for number, error, ids, logprobs in rows if error is None}
    return found


def _sample(store: JobStore, num_rows: int) -> pa.Table:
    """Input columns of `num_rows` answered rows, taken evenly from at most `_MOST_PARTS` parts, with a column of
    numbers. Columns by which a row has several completions are left out.
    """
    record = store.read_record()
    ours = {field.name for field in answer_fields(record)}
    ours |= {sample_field(record).name} if records_samples(record) else set()
    ours |= {record.input.roles[role] for role in _SEVERAL if role in record.input.roles}
    if record.swept:
        ours |= {record.input.roles.get("id", DEFAULT_ID_COLUMN)} - {*record.input.template_columns}
    parts = sorted(store.committed_parts())
    chosen = [parts[i] for i in _evenly(len(parts), min(num_rows, _MOST_PARTS))]
    tables: list[pa.Table] = []
    for number, part in enumerate(chosen):
        with store.open_part(part) as file:
            table = pq.read_table(file)
        table = table.filter(pc.is_null(table[output_name(record, "error")]))
        if records_samples(record):
            # only the first completion of each row, since ids of a row's completions are equal
            table = table.filter(pc.equal(table[sample_field(record).name], 0))
        # parts after one with too few rows give more
        share = -(-(num_rows - sum(map(len, tables))) // (len(chosen) - number))
        rows = table.take(pa.array(_evenly(table.num_rows, share), pa.int64()))
        tables.append(rows.select([name for name in rows.column_names if name not in ours]))
    sample = pa.concat_tables(tables) if tables else pa.table({})
    return sample.append_column(_NUMBER, pa.array(range(sample.num_rows), pa.int32())).replace_schema_metadata()


def _evenly(length: int, count: int) -> list[int]:
    """At most `count` indices into a sequence of `length` items, evenly spread."""
    count = min(length, count)
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


@contextmanager
def _folder(store: JobStore) -> Iterator[Location]:
    """A folder beside the job's records, which every worker that reaches the output reaches. It is removed before and
    after the block.
    """
    folder = Location(f"{store.url}/{COMPARISON}", store.location.storage_options)
    _remove(folder)
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Location) -> None:
    try:
        folder.fs.rm(folder.path(), recursive=True)
    except FileNotFoundError:
        pass
    except OSError as error:
        reason = storage_reason(error, folder.storage_options, folder.url)
        logger.warning("%s was not removed: %s", redacted_url(folder.url), reason)
