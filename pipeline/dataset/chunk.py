"""Reads one chunk, which is a row group of an input file, or several small files: `read_chunk` streams it.

`ChunkRef` and `IndexJob` hold all that a worker needs to index a chunk; both are sent to it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from ...engine.request import SamplingParams
from ...engine.text.chat.conversation import RENDERING_OPTIONS
from ...jobs.errors import StorageError
from ...jobs.input.column_types import as_carried
from ...jobs.input.columns import expected_field, records_samples, sample_field
from ...jobs.input.file_version import has_changed
from ...jobs.input.files import footer_sha256, unpack_schema
from ...jobs.input.row_group import MAX_ROW_GROUP_BYTES, OversizedRowGroupError, open_row_group
from ...jobs.options.stages import Stage
from ...jobs.record import AdapterRecord, FileVersion, JobRecord, ModelRecord, PartitionValues, index_key
from ...jobs.spec import JobSpec, ScoreBy
from ...jobs.stages import first_stage, requests_of_stages, stage_record, stage_spec
from ...jobs.storage.location import options_for
from ...jobs.storage.redaction import storage_reason
from ...jobs.storage.stores import open_store
from . import schema as prepared

# Most bytes of rows in one batch of a chunk of several small files.
_TOGETHER_BYTES = 64 << 20
_REPAIR = "Repair the file or leave it out."
# Tokens that a text of a choice is expected to have at most.
_CHOICE_TOKENS = 8
# Numbers of the errors of stores that are throttled, busy or away. Arrow's errors about bad bytes have no number.
_UNREACHED = {
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
}


@dataclass(frozen=True, slots=True)
class RowGroupRef:
    """A row group of an input file."""

    #: Path or URL of the file.
    file_url: str
    #: Name of the file in messages and in ids of rows without an id column.
    file_name: str
    #: Number of the row group in the file.
    row_group: int
    #: Number of the first row, counted from the file's start.
    first_row: int
    #: Rows of the row group.
    num_rows: int
    #: Hash of the file's footer when the job was frozen.
    footer_sha256: str
    #: Values of the columns that the names of the file's folders give.
    partition: PartitionValues
    #: Version of the file when the job was frozen; None when it is not known.
    version: FileVersion | None = None

    @property
    def place(self) -> str:
        """File, number and rows of the row group, for messages."""
        last_row = self.first_row + self.num_rows - 1
        return f"input file {self.file_name!r}, row group {self.row_group} (rows {self.first_row} to {last_row})"


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Rows that are indexed together: one row group, or those of several small files."""

    chunk_id: int
    row_groups: tuple[RowGroupRef, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all row groups of the chunk."""
        return sum(group.num_rows for group in self.row_groups)

    @property
    def place(self) -> str:
        """Files of the chunk, with row group and rows of a single one, for messages."""
        if len(self.row_groups) == 1:
            return self.row_groups[0].place
        return f"input files {', '.join(repr(group.file_name) for group in self.row_groups)}"


@dataclass(frozen=True, slots=True)
class IndexJob:
    """The options of a job that its chunks are indexed with."""

    #: Path or URL of the base model.
    model_url: str
    #: Sampling of the job.
    sampling: SamplingParams
    #: Role -> name of the input column that has it.
    roles: Mapping[str, str]
    #: Schema of the input, packed (`jobs.input.files.unpack_schema`).
    schema_ipc: str
    #: Tokens of the base model's vocabulary.
    vocab_size: int
    #: Most tokens of a prompt and its completion together.
    max_context_tokens: int
    #: Key of the index files; files written under another key are stale.
    key: str
    #: Time that chat templates see, in ISO format: the client's when the job was started, on all workers and in all
    #: runs.
    now: str
    #: System message of rows whose messages have none; None for no such message.
    system_prompt: str | None = None
    #: Whether special tokens inside of messages are control tokens; else they are text.
    allow_special_tokens: bool = False
    #: Column for the number of a row's completion; None for no such column.
    sample_field: pa.Field | None = None
    #: Column for the assistant's last message, which is taken out of the prompt; None when prompts keep it.
    expected_field: pa.Field | None = None
    #: Text of the job's own chat template; None for the templates of base and adapters.
    chat_template: str | None = None
    #: Role and template of each message that is made of columns; empty where a column has the prompts.
    templates: tuple[tuple[str, str], ...] = ()
    #: Option of the job that gives the templates; "" for none.
    template_option: str = ""
    #: Columns that the templates read.
    template_columns: tuple[str, ...] = ()
    #: Whether a chat template renders the prompts.
    renders_messages: bool = False
    #: The job's values of `RENDERING_OPTIONS`.
    rendering: Mapping[str, Any] = field(default_factory=dict)
    #: Options of stores of input, model and adapters, with secrets.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: Adapters with a tokenizer or vocabulary of their own, by name.
    prepared_apart: Mapping[str, AdapterRecord] = field(default_factory=dict)
    #: Columns of the input that are not copied to the output.
    dropped: tuple[str, ...] = ()
    #: Whether ids are made of what rows ask, see `content_id`; else of file and row number, without a column of ids.
    id_from_content: bool = False
    #: Content hash of the base model without its weights, which its tokenizer must have; "" for any.
    tokenizer_sha256: str = ""
    #: Adapter of all rows, when a stage names it; "" where a column names adapters, or rows have none.
    adapter: str = ""
    #: The stages of a job that has some, as its option gives them; "" without.
    stages: str = ""
    #: Columns that stages read; empty without stages.
    given: tuple[str, ...] = ()
    #: Prompts that one row is expected to have of all stages together; completions of one prompt share it.
    expected_prompts: float = 1.0
    #: Most tokens that one row is expected to have generated in all stages together.
    expected_tokens: float = 0.0
    #: The base model, in a job with tasks beside text; None in other jobs.
    base: ModelRecord | None = None
    #: Adapters that can be used, by name, in a job with tasks beside text.
    heads: Mapping[str, AdapterRecord] = field(default_factory=dict)
    #: How answers are compared with right ones; None when they are not.
    score_by: ScoreBy | None = None
    #: `JobRecord.adapter_groups`: adapters of a sweep by the adapter whose name their prepared rows have.
    groups: Mapping[str | None, tuple[str | None, ...]] = field(default_factory=dict)
    #: The option `allowed_adapters`; "" for no rule.
    allowed: str = ""

    @classmethod
    def from_record(cls, record: JobRecord, spec: JobSpec) -> IndexJob:
        """The options of a frozen job; of its first stage if it has stages. The model's URL and the storage options are
        the spec's.
        """
        if record.spec.stages is not None:
            return cls.of_stage(record, spec, first_stage(record.spec))
        return cls._of(record, spec, index_key(record))

    @classmethod
    def of_stage(cls, record: JobRecord, spec: JobSpec, stage: Stage) -> IndexJob:
        """The options of one stage of a frozen job."""
        roles = {role: name for role, name in record.input.roles.items() if role != "adapter" or not stage.has_adapter}
        roles |= {"adapter": stage.adapter_column} if stage.adapter_column else {}
        found = cls._of(stage_record(record, stage), spec, index_key(record))
        asked = requests_of_stages(record.spec, given_columns(record))
        return replace(
            found,
            roles=roles,
            adapter=stage.adapter or "",
            sampling=replace(found.sampling, n=1),
            template_option=f"stages.{stage.name}",
            sample_field=None,
            expected_prompts=sum(one.expected / one.stage.num_samples for one in asked),
            expected_tokens=sum(one.expected * _most_tokens(stage_spec(record.spec, one.stage)) for one in asked),
            stages=record.spec.stages or "",
            given=given_columns(record),
        )

    @classmethod
    def _of(cls, record: JobRecord, spec: JobSpec, key: str) -> IndexJob:
        has_tasks = bool(record.tasks)
        return cls(
            model_url=spec.model,
            sampling=record.spec.sampling,
            roles=record.input.roles,
            schema_ipc=record.input.schema_ipc,
            vocab_size=record.model.vocab_size,
            max_context_tokens=record.model.max_context_tokens,
            key=key,
            now=record.local_time or record.created_at,
            system_prompt=record.spec.system_prompt,
            allow_special_tokens=record.spec.allow_special_tokens,
            sample_field=_sample_field(record),
            expected_field=expected_field(record),
            chat_template=record.spec.chat_template,
            templates=record.spec.templates,
            template_option=record.spec.template_option,
            template_columns=record.input.template_columns,
            renders_messages=record.renders_messages,
            rendering={name: getattr(record.spec, name) for name in RENDERING_OPTIONS},
            storage_options=spec.storage_options,
            prepared_apart={adapter.name: adapter for adapter in record.adapters if adapter.is_prepared_apart},
            dropped=record.input.dropped,
            id_from_content=record.spec.id_from_content,
            tokenizer_sha256=record.model.tokenizer_sha256,
            base=record.model if has_tasks else None,
            heads={each.name: each for each in record.adapters if has_tasks and not each.is_refused},
            score_by=None if record.spec.expected is None else record.spec.score_by,
            groups=record.adapter_groups,
            allowed=record.spec.allowed_adapters or "",
        )

    def task_of(self, adapter: str | None) -> str:
        """The task of an adapter's rows unless they say otherwise; "" for text."""
        own = self.heads.get(adapter or "")
        return (own.task if own else "") or (self.base.task if self.base else "")

    def task_problem(self, task: str, adapter: str | None) -> list[str]:
        """Why an adapter, or the base, cannot do what a row asks, as a sentence; none if it can."""
        own, has_base_head = self.heads.get(adapter or ""), bool(self.base and self.base.labels)
        if self.base is None or (adapter and own is None):
            return []  # the row's adapter is unknown or refused, which is its problem
        whose = f"adapter {adapter!r} has" if adapter else "the base model has"
        if task == "classify" and not (has_base_head or (own and own.labels)):
            return [f"task={task!r}: {whose} no head that classifies"]
        if task in ("", "generate", "rerank") and has_base_head:
            return [f"task={task or 'generate'!r}: the base model classifies text and has no head that generates it"]
        return []


def _most_tokens(spec: JobSpec) -> int:
    sampling = spec.sampling
    return min(sampling.max_tokens, _CHOICE_TOKENS) if sampling.choice else sampling.max_tokens


def given_columns(record: JobRecord) -> tuple[str, ...]:
    """Columns of the input that the stages of a job read; that of the rows' adapters is among them."""
    of_rows = [name for role, name in record.input.roles.items() if role == "adapter"]
    return tuple(dict.fromkeys([*record.input.template_columns, *of_rows]))


def _sample_field(record: JobRecord) -> pa.Field | None:
    """Column of prepared rows for the number of a row's completion; None when the job has no such column."""
    if record.has_lists:
        return prepared.SAMPLE_FIELD
    return sample_field(record) if records_samples(record) else None


class DamagedChunkError(Exception):
    """Row groups cannot be read. `args`: a sentence for each, which names file and row group."""


def read_chunk(
    chunk: ChunkRef, schema_ipc: str, storage_options: Mapping[str, Any], *, is_narrow: bool = False
) -> Iterator[tuple[pa.RecordBatch, list[str]]]:
    """The rows of a chunk, at most a thousand and 64 MiB at a time, cast to the job's schema, and `file:row` of each.
    Page checksums are verified. `is_narrow`: files may have columns that the schema lacks; they are not read.

    Raises `DamagedChunkError`, also for a row group that takes too much memory, and `StorageError` for a store that
    cannot be reached.
    """
    schema = unpack_schema(schema_ipc)
    damages: list[str] = []
    waiting: list[pa.RecordBatch] = []
    places: list[str] = []
    num_bytes = 0
    for group in chunk.row_groups:
        next_row = group.first_row
        try:
            for batch in _read_row_group(group, schema, storage_options, is_narrow=is_narrow):
                num_bytes += batch.nbytes
                if len(chunk.row_groups) > 1 and num_bytes > MAX_ROW_GROUP_BYTES:
                    raise _too_large(chunk)
                if waiting and sum(one.nbytes for one in waiting) + batch.nbytes > _TOGETHER_BYTES:
                    yield _joined(waiting), places
                    waiting, places = [], []
                waiting.append(batch)
                places += [f"{group.file_name}:{row}" for row in range(next_row, next_row + batch.num_rows)]
                next_row += batch.num_rows
                if len(chunk.row_groups) == 1:
                    yield batch, places
                    waiting, places = [], []
        except DamagedChunkError as damage:
            damages += damage.args
    if damages:
        raise DamagedChunkError(*damages)
    if waiting:
        yield _joined(waiting), places


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()[0]


def _too_large(chunk: ChunkRef) -> DamagedChunkError:
    """Small files whose rows take gigabytes: few bytes may stand for many."""
    return DamagedChunkError(
        f"{chunk.place}: together take more than {MAX_ROW_GROUP_BYTES / 1e9:.1f} GB in memory. Write them as one file "
        "in small row groups, or leave them out."
    )


def _read_row_group(
    group: RowGroupRef, schema: pa.Schema, storage_options: Mapping[str, Any], *, is_narrow: bool
) -> Iterator[pa.RecordBatch]:
    columns = schema.names if is_narrow else None
    options = options_for(group.file_url, storage_options)
    num_rows = 0
    try:
        fs, path = open_store(group.file_url, options)
        fs.invalidate_cache(path)
        with fs.open(path, "rb") as handle:
            if footer_sha256(handle) != group.footer_sha256:
                raise _changed(group)
            with open_row_group(handle, group.row_group, columns, verify=True) as rows:
                for batch in rows.batches():
                    num_rows += batch.num_rows
                    yield _fitted(batch, schema, group.partition)
        # The version is checked last: the file may have been written to while it was read.
        _check_version(group, fs, path)
    except OversizedRowGroupError as error:
        raise DamagedChunkError(f"{group.place}: {error}. Write it in smaller row groups or leave it out.") from None
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        with suppress(OSError, ValueError):
            _check_version(group, *open_store(group.file_url, options))
        reason = storage_reason(error, options, group.file_url)
        if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _UNREACHED:
            raise StorageError(
                f"{group.place}: cannot be read now ({reason}). Resume when the store answers."
            ) from None
        raise DamagedChunkError(f"{group.place}: cannot be read ({reason}). {_REPAIR}") from None
    if num_rows != group.num_rows:
        found = f"holds {num_rows} rows, its footer says {group.num_rows}"
        raise DamagedChunkError(f"{group.place}: {found}. {_REPAIR}")


def _check_version(group: RowGroupRef, fs: Any, path: str) -> None:
    if group.version is not None and has_changed(fs, path, group.version):
        raise _changed(group)


def _changed(group: RowGroupRef) -> DamagedChunkError:
    return DamagedChunkError(
        f"input file {group.file_name!r}: has changed since the job was started. Put back what it was, or start over "
        "with --overwrite."
    )


def read_column(group: RowGroupRef, column: str, storage_options: Mapping[str, Any]) -> pa.Array:
    """One column, numbers or text; null where the file lacks it. Raises what pyarrow and storage raise."""
    fs, path = open_store(group.file_url, options_for(group.file_url, storage_options))
    with fs.open(path, "rb") as handle, open_row_group(handle, group.row_group, [column]) as rows:
        if column not in rows.file.schema_arrow.names:
            return pa.nulls(group.num_rows)
        values = rows.table().column(column).combine_chunks()
    return values.cast(pa.int64() if pa.types.is_integer(values.type) else pa.string())


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, partition: PartitionValues) -> pa.RecordBatch:
    """A batch of a file with the columns of `schema`. Columns that the file's folders name are added, other missing
    columns are null, and columns without any value take the type that they have in other files.
    """
    columns = []
    for column in schema:
        place = batch.schema.get_field_index(column.name)
        value = partition.get(column.name)
        if value is not None:
            columns.append(pa.repeat(value, batch.num_rows).cast(column.type))
        elif place < 0:
            columns.append(pa.nulls(batch.num_rows, column.type))
        else:
            columns.append(as_carried(batch.column(place), column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
