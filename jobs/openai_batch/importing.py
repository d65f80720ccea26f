"""`import_batch`: writes batch files of OpenAI's API as one Parquet file that a job reads, in bounded memory.

A line that is no request becomes a row too, with the reason in `openai_error` and no prompt: an error row of the job.
The file has the columns that its rows use; its metadata names the columns that are settings.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ...engine.request import SAMPLING_OPTIONS
from ...system.untrusted import shown, shown_name
from ..errors import JobError, JobRequestError, StorageError
from ..input.file_metadata import SETTINGS_KEY
from ..options.values import SETTING_ROLES
from ..progress import counted
from ..storage.location import Location
from ..storage.redaction import redacted_url, storage_reason
from ..storage.single_file import read_lines, replaced_file
from .parameters import COLUMN_KINDS
from .requests import MAX_LINE_BYTES, BatchRequest, read_request

#: Column with the reason why a line is no request; null for requests.
ERROR_COLUMN = "openai_error"
#: Column with the model that a request names.
MODEL_COLUMN = "openai_model"
_PROMPT_TYPES = {"messages": pa.string(), "prompt": pa.string(), "prompt_token_ids": pa.list_(pa.int64())}
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("adapter", pa.string()),
        pa.field(MODEL_COLUMN, pa.string()),
        *(pa.field(role, kind) for role, kind in _PROMPT_TYPES.items()),
        *(pa.field(name, arrow) for name, (arrow, _, _) in COLUMN_KINDS.items()),
        pa.field(ERROR_COLUMN, pa.string()),
    ]
)
# Columns of every file, whatever its rows use; each file has a prompt column too.
_ALWAYS = ("id", "adapter", MODEL_COLUMN)
_KINDS_OF_PROMPT = {
    "messages": "messages (/v1/chat/completions)",
    "prompt": "text (/v1/completions)",
    "prompt_token_ids": "token ids (/v1/completions)",
}
_SUFFIXES = (".parquet", ".pq", ".parq")
_GROUP_ROWS, _GROUP_BYTES = 8192, 32 << 20
_BOM = b"\xef\xbb\xbf"
_MODELS_COUNTED, _SHOWN = 1000, 10


@dataclass(slots=True)
class ImportedBatch:
    """The outcome of one import."""

    #: The file that was written, without passwords and signatures.
    output: str
    #: Names of models that ask for no adapter.
    base_models: Collection[str]
    #: Lines that are requests.
    num_requests: int = 0
    #: Lines that are no requests.
    num_refused: int = 0
    #: Requests without a limit on the length of their answers.
    num_unlimited: int = 0
    #: Model -> its requests, for the first thousand models.
    models: dict[str, int] = field(default_factory=dict)
    #: The first few lines that are no requests, one sentence each.
    refused: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """Lines for people."""
        lines = [f"{self.output}: {counted(self.num_requests, 'request')}"]
        for name, num_rows in list(self.models.items())[:_SHOWN]:
            kind = "the base model" if name in self.base_models else "an adapter"
            lines.append(f"  {counted(num_rows, 'request')} of model {shown(name)}, {kind}")
        if len(self.models) > _SHOWN:
            lines.append(f"  and those of {counted(len(self.models) - _SHOWN, 'more model')}")
        if self.num_unlimited:
            default = SAMPLING_OPTIONS["max_tokens"].default
            lines.append(f"Without max_tokens: {self.num_unlimited:,}. The job's --max-tokens holds ({default}).")
        if self.num_refused:
            lines.append(f"{counted(self.num_refused, 'error row')} for lines that are no requests:")
            lines += [f"  {line}" for line in self.refused]
        if self.num_refused > len(self.refused):
            lines.append(f"  and {self.num_refused - len(self.refused):,} more")
        return "\n".join(lines)


def import_batch(
    urls: Sequence[str], output: str, base_models: Collection[str], storage_options: Mapping[str, Any]
) -> ImportedBatch:
    """Write the requests of batch files as one Parquet file, in their order. `base_models`: models that ask for no
    adapter; every other model is the name of an adapter.

    Raises `JobRequestError` for files that are missing, hold no request, or mix kinds of prompts, and `StorageError`.
    After an error the output is as it was.
    """
    _check(urls, output, storage_options)
    imported = ImportedBatch(redacted_url(output), frozenset(base_models))
    try:
        with tempfile.TemporaryFile() as spool, _Rows(spool, imported) as rows:
            for url in urls:
                for place, line in _lines(url, storage_options):
                    rows.add(place, read_request(line, imported.base_models), len(line or b""))
            names = rows.finish()
            if imported.num_refused and not imported.num_requests:
                raise JobRequestError(f"batch: none of {imported.num_refused} lines is a request.", *imported.refused)
            with replaced_file(output, storage_options) as file:
                _copy(spool, names, file)
    except JobError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"cannot write a temporary file: {storage_reason(error, {})}") from None
    return imported


def _check(urls: Sequence[str], output: str, storage_options: Mapping[str, Any]) -> None:
    problems = []
    if not output.lower().endswith(_SUFFIXES):
        shown_output = redacted_url(output)
        problems.append(f"output={shown_output!r}: expected a name that ends with .parquet, after the batch files.")
    for url in urls:
        try:
            is_there = Location(url, storage_options).exists("")
        except StorageError as error:
            problems.append(f"batch={redacted_url(url)!r}: {error}")
        else:
            if not is_there:
                problems.append(f"batch={redacted_url(url)!r}: no such file. Name a JSONL file.")
    if problems:
        raise JobRequestError(*problems)


def _lines(url: str, storage_options: Mapping[str, Any]) -> Iterator[tuple[str, bytes | None]]:
    """The lines of a file that are not empty (None: a line that is too long), each after its place:
    `requests.jsonl:17`.
    """
    name = shown_name(redacted_url(url).rstrip("/").rpartition("/")[2])
    for number, line in enumerate(read_lines(url, storage_options, MAX_LINE_BYTES), 1):
        if number == 1 and line is not None:
            line = line.removeprefix(_BOM)
        if line is None or line.strip():
            yield f"{name}:{number}", line


class _Rows:
    """Collects rows and writes them to a file, a row group at a time, with every column of `_SCHEMA`."""

    def __init__(self, file: BinaryIO, imported: ImportedBatch) -> None:
        self._writer = pq.ParquetWriter(file, _SCHEMA, compression="lz4")
        self._imported = imported
        self._ids = _Ids()
        self._waiting: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._used = set(_ALWAYS)
        # Kind of prompt, and place of the first request, which has it.
        self._prompt: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        with suppress(OSError):  # what is not written by now is not needed
            self._writer.close()

    def add(self, place: str, request: BatchRequest, num_bytes: int) -> None:
        """Add the row of one line. Raises `JobRequestError` for another kind of prompt than earlier requests have."""
        custom_id, problems = request.custom_id, list(request.problems)
        if custom_id is not None and (first := self._ids.claim(custom_id, place)) is not None:
            problems.append(f"custom_id={shown(custom_id)}: {first} has it already.")
            custom_id = None
        row: dict[str, Any] = {"id": self._ids.made_up(place) if custom_id is None else custom_id}
        if problems:
            row[ERROR_COLUMN] = f"{place}: {' '.join(problems)}"
            self._count_refused(row[ERROR_COLUMN])
        else:
            self._check_prompt(place, request.prompt_role)
            row |= request.columns
            self._count(row)
        self._used |= {name for name, value in row.items() if value is not None}
        self._waiting.append(row)
        self._num_bytes += num_bytes
        if len(self._waiting) >= _GROUP_ROWS or self._num_bytes >= _GROUP_BYTES:
            self._write()

    def finish(self) -> list[str]:
        """Write the rows that wait, and end the file. Returns the columns that rows use, in order."""
        self._write()
        self._writer.close()
        used = self._used | {self._prompt[0] if self._prompt else "messages"}
        return [name for name in _SCHEMA.names if name in used]

    def _check_prompt(self, place: str, role: str) -> None:
        if self._prompt is None:
            self._prompt = role, place
        if self._prompt[0] != role:
            first, first_place = self._prompt
            raise JobRequestError(
                f"batch: the prompt is {_KINDS_OF_PROMPT[first]} at {first_place}, and {_KINDS_OF_PROMPT[role]} at "
                f"{place}; all rows of a job have one kind of prompt. Import each kind into a file of its own."
            )

    def _count(self, row: Mapping[str, Any]) -> None:
        found, model = self._imported, row[MODEL_COLUMN]
        found.num_requests += 1
        found.num_unlimited += "max_tokens" not in row
        if model in found.models or len(found.models) < _MODELS_COUNTED:
            found.models[model] = found.models.get(model, 0) + 1

    def _count_refused(self, sentence: str) -> None:
        self._imported.num_refused += 1
        if len(self._imported.refused) < _SHOWN:
            self._imported.refused.append(sentence)

    def _write(self) -> None:
        if not self._waiting:
            return
        columns = [pa.array([row.get(column.name) for row in self._waiting], column.type) for column in _SCHEMA]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA))
        self._waiting, self._num_bytes = [], 0


class _Ids:
    """The ids of all rows, as hashes in a database that leaves memory when it grows."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA cache_size = -65536")  # KiB
        self._database.execute("CREATE TABLE ids (hash BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def close(self) -> None:
        """Remove the database."""
        self._database.close()

    def claim(self, row_id: str, place: str) -> str | None:
        """Take an id for the row at `place`. Returns the place of the row that has it already, or None."""
        key = blake2b(row_id.encode(), digest_size=16).digest()
        added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, place))
        if added.rowcount:
            return None
        with closing(self._database.execute("SELECT place FROM ids WHERE hash = ?", (key,))) as found:
            return str(found.fetchone()[0])

    def made_up(self, place: str) -> str:
        """An id for a row without one: its place, followed by as many signs as make it unique."""
        row_id = place
        while self.claim(row_id, place) is not None:
            row_id += "'"
        return row_id


def _copy(spool: BinaryIO, names: Sequence[str], file: BinaryIO) -> None:
    """Write these columns of a Parquet file to another Parquet file."""
    source = pq.ParquetFile(spool)
    settings = [name for name in names if name in SETTING_ROLES]
    schema = pa.schema([_SCHEMA.field(name) for name in names], {SETTINGS_KEY: json.dumps(settings)})
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for group in range(source.num_row_groups):
            writer.write_table(source.read_row_group(group, columns=names).replace_schema_metadata(schema.metadata))
