"""Reads the footers of the input's Parquet files, after `finding.py` has found them. No row is read here."""

from __future__ import annotations

import base64
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import JobRequestError
from ..options.values import TABLE_SCHEME
from ..record import InputFile
from ..storage.location import options_for
from ..storage.redaction import redacted_url, storage_reason
from ..storage.stores import open_store
from .column_types import INT96_UNIT, carried_field
from .conversion.source import Item, Kind, Source
from .file_version import file_version
from .finding import TABLE, FoundInput, find_input, first_bytes, resolved
from .formats import PARQUET, refusal
from .parquet_schema import column_kinds
from .row_group import MAX_ROW_GROUP_ROWS
from .spark_metadata import SPARK_CALENDAR_KEYS

_WEB = ("http://", "https://")
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
# Keys of footer metadata about formats and programs, which has no use in another file.
_KNOWN_METADATA = (
    *SPARK_CALENDAR_KEYS, "ARROW:schema", "writer.model.name", "writer.date", "avro.schema",
    "parquet.avro.schema", "parquet.proto.descriptor", "parquet.proto.class", "duckdb.interval_bloom_filter",
)  # fmt: skip
_TAIL_BYTES = 8
_PARALLEL_FOOTERS = 16
_SCHEMAS_KEPT = 16
_PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of one Parquet file."""

    #: The file.
    file: InputFile
    #: Its Arrow schema, in the types in which columns are carried.
    schema: pa.Schema
    #: The file's folders below the given folder, or below the path before a glob's first wildcard; their names may hold
    #: columns.
    folder: str = ""
    #: Column -> Parquet's kinds of its values; see `column_kinds`.
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: The footer's metadata, key -> text, without `_KNOWN_METADATA`.
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Whether the footer has an Arrow schema beside Parquet's own.
    has_arrow_schema: bool = True


def distinct_kinds(footers: Iterable[Footer]) -> list[tuple[str, Mapping[str, tuple[str, ...]]]]:
    """Name and `column_kinds` of one file for each distinct `column_kinds`."""
    found: dict[int, tuple[str, Mapping[str, tuple[str, ...]]]] = {}
    for footer in footers:
        # files of one schema share the object
        found.setdefault(id(footer.kinds), (footer.file.name, footer.kinds))
    return list(found.values())


#: Makes Parquet files of items that are not Parquet; returns their paths or URLs, in order. See `Converter.convert`.
Convert = Callable[[Sequence[Item]], Sequence[str]]


def read_footers(
    urls: Sequence[str], storage_options: Mapping[str, Any], convert: Convert | None = None
) -> tuple[tuple[Footer, ...], tuple[str, ...]]:
    """Footers of all files, in the order of the inputs, and of their names within each; and the names of files in the
    same folders that are not read.

    `urls`: files, folders (all files of one format below them, Parquet before others, without names that start with `_`
    or `.`), globs and tables. `convert`: converts what is not Parquet; without, it is found and not read. Raises
    `JobRequestError` naming every input and file that cannot be used.
    """
    problems: list[str] = []
    inputs = [
        _found_table(url, number) if url.startswith(TABLE_SCHEME) else find_input(url, storage_options, problems)
        for number, url in enumerate(urls, 1)
    ]
    files = [(found, path) for found in inputs if found is not None for path in found.paths]
    problems += _read_twice(files)
    addresses = [found.address(path) for found, path in files]
    names = _names(addresses)
    others = {number: _item(*file, names[number]) for number, file in enumerate(files) if file[0].kind != PARQUET}
    made: dict[int, str] = {}
    if convert is not None and others:
        try:
            made = dict(zip(others, convert(list(others.values())), strict=True))
        except JobRequestError as error:
            problems += error.problems
    kinds = _KindsOfSchemas()

    def read(number: int) -> Footer | str:
        found, path = files[number]
        if number in made:
            return _read_converted(made[number], storage_options, found.folder(path), names[number], kinds)
        return _read_footer(found, path, names[number], kinds)

    with ThreadPoolExecutor(_PARALLEL_FOOTERS) as pool:
        outcomes = list(pool.map(read, [n for n in range(len(files)) if n in made or n not in others]))
    unusable = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if len(unusable) > _PROBLEMS_SHOWN:
        unusable[_PROBLEMS_SHOWN:] = [f"input: {len(unusable) - _PROBLEMS_SHOWN} more files cannot be read."]
    problems += unusable
    if problems:
        raise JobRequestError(*problems)
    unread = tuple(found.shown(path) for found in inputs if found is not None for path in found.unread)
    return tuple(outcome for outcome in outcomes if isinstance(outcome, Footer)), unread


def _found_table(url: str, number: int) -> FoundInput:
    """A table of this program in the form of a found input. Its path is the same whenever it is given."""
    return FoundInput(url, None, {}, [f"table-{number}"], "", [], TABLE)


def _item(found: FoundInput, path: str, name: str) -> Item:
    """The item to convert for a file that is not Parquet."""
    if found.kind == TABLE:
        return found.url
    kind = cast(Kind, found.kind)
    return Source(found.url, found.options, path, redacted_url(found.address(path)), name, kind)


def _read_converted(
    url: str, storage_options: Mapping[str, Any], folder: str, name: str, kinds: _KindsOfSchemas
) -> Footer | str:
    """The footer of a converted file. Its name and folder are those of the file from which it was made. It has no
    version: its content never changes.
    """
    options = options_for(url, storage_options)
    fs, path = open_store(url, options)
    footer = _read_footer(FoundInput(url, fs, options, [path], "", []), path, name, kinds)
    if isinstance(footer, str):
        return footer
    file = footer.file.model_copy(update={"url": redacted_url(url), "version": None})
    return replace(footer, file=file, folder=folder)


def footer_sha256(file: BinaryIO) -> str:
    """Hash of a Parquet file's footer, as in `InputFile`. Raises ValueError for a file without a footer."""
    return hashlib.sha256(_footer_bytes(file)[0]).hexdigest()


def unified_schema(footers: tuple[Footer, ...]) -> pa.Schema:
    """One schema for all files; a column that some file lacks is nullable.

    Raises `JobRequestError` naming the file and the column when two files disagree on a type, and when a file
    has two columns of one name.
    """
    problems = []
    # Column -> schema of this column alone: unifying whole schemas takes time by the square of their columns.
    unified: dict[str, pa.Schema] = {}
    for footer in footers:
        repeated = sorted(name for name, count in Counter(footer.schema.names).items() if count > 1)
        if repeated:
            problems.append(f"input file {footer.file.name!r}: has several columns named {repeated[0]!r}.")
            continue
        for column in footer.schema.remove_metadata():
            own = pa.schema([column])
            before = unified.setdefault(column.name, own)
            try:
                unified[column.name] = pa.unify_schemas([before, own], promote_options="default")
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                problems.append(
                    f"input file {footer.file.name!r}: column {column.name!r} is {column.type}, but "
                    f"{before.field(0).type} in {footers[0].file.name!r}. Give all files one type."
                )
    if problems:
        raise JobRequestError(*dict.fromkeys(problems))
    everywhere = set.intersection(*(set(footer.schema.names) for footer in footers)) if footers else set()
    fields = [schema.field(0) for schema in unified.values()]
    return pa.schema([f if f.name in everywhere else f.with_nullable(True) for f in fields])


def pack_schema(schema: pa.Schema) -> str:
    """A schema as text, for records."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def unpack_schema(text: str) -> pa.Schema:
    """The schema that `pack_schema` packed; "" stands for one without columns."""
    if not text:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _read_twice(files: Sequence[tuple[FoundInput, str]]) -> list[str]:
    """A problem for files that are behind two inputs: their rows would be answered twice."""
    first: dict[str, FoundInput] = {}
    twice = []
    for found, path in files:
        if first.setdefault(resolved(found.address(path)), found) is not found:
            twice.append(path)
    if not twice:
        return []
    more = f" and {len(twice) - 1} more files are" if len(twice) > 1 else " is"
    return [f"input: {redacted_url(twice[0])!r}{more} behind two of the inputs. Leave one of these inputs out."]


def _names(addresses: Sequence[str]) -> list[str]:
    """A short name for each file, unique in the job: the file's own name, with folders when names alone repeat."""
    # On the web, the text after a question mark may be a secret that opens the file.
    plain = [redacted_url(a).partition("?")[0] if a.startswith(_WEB) else a for a in addresses]
    short = [address.rpartition("/")[2] for address in plain]
    if len(set(short)) == len(short):
        return short
    parts = [address.split("/") for address in plain]
    longest = min(map(len, parts)) - 1
    common = 0
    while common < longest and len({tuple(p[: common + 1]) for p in parts}) == 1:
        common += 1
    return ["/".join(p[common:]) for p in parts]


class _KindsOfSchemas:
    """A cache of `column_kinds`, with one object for all files of one schema."""

    def __init__(self) -> None:
        self._known: list[tuple[pq.ParquetSchema, Mapping[str, tuple[str, ...]]]] = []

    def of(self, schema: pq.ParquetSchema, footer: bytes) -> Mapping[str, tuple[str, ...]]:
        """The `column_kinds` of a footer with this schema. Raises ValueError for a damaged footer."""
        for known, kinds in self._known[-_SCHEMAS_KEPT:]:
            if known.equals(schema):
                return kinds
        kinds = column_kinds(footer)
        self._known.append((schema, kinds))
        return kinds


def _read_footer(found: FoundInput, path: str, name: str, kinds: _KindsOfSchemas) -> Footer | str:
    """The footer, or a sentence that says why the file is refused."""
    try:
        # A filesystem for this thread, instead of `found.fs`: a connection of SFTP is for one thread.
        fs, _ = open_store(found.url, found.options)
        version = file_version(fs, path)
        with fs.open(path, "rb") as file:
            footer, size = _footer_bytes(file)
        parsed = _parsed(footer)
        metadata, of_columns = parsed.metadata, kinds.of(parsed.schema, footer)
        schema = pa.schema([carried_field(column) for column in parsed.schema_arrow])
    except ValueError as error:
        return refusal(name, redacted_url(found.address(path)), first_bytes(fs, path), str(error))
    except Exception as error:
        return f"input file {name!r}: {storage_reason(error, found.options, found.url)}"
    row_group_rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    wrong = next((i for i, num_rows in enumerate(row_group_rows) if not 0 <= num_rows <= MAX_ROW_GROUP_ROWS), None)
    if wrong is not None:
        return (
            f"input file {name!r}, row group {wrong}: {row_group_rows[wrong]} rows, expected at most "
            f"{MAX_ROW_GROUP_ROWS}. Write it in smaller row groups or leave it out."
        )
    return Footer(
        InputFile(
            url=redacted_url(found.address(path)),
            name=name,
            size_bytes=size,
            footer_sha256=hashlib.sha256(footer).hexdigest(),
            row_group_rows=row_group_rows,
            version=version,
        ),
        schema,
        found.folder(path),
        of_columns,
        _texts(metadata.metadata or {}),
        b"ARROW:schema" in (metadata.metadata or {}),
    )


def _texts(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    """A footer's metadata as texts, without the keys that have no use in another file."""
    texts = {key.decode("utf-8", "replace"): text.decode("utf-8", "replace") for key, text in metadata.items()}
    return {key: text for key, text in texts.items() if key not in _KNOWN_METADATA}


def _parsed(footer: bytes) -> pq.ParquetFile:
    """A Parquet file in memory with this footer and no rows. Raises ValueError for bytes that are no footer."""
    try:
        return pq.ParquetFile(io.BytesIO(_MAGIC + footer), coerce_int96_timestamp_unit=INT96_UNIT)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error).strip()) from None


def _footer_bytes(file: BinaryIO) -> tuple[bytes, int]:
    """The footer with its length and magic, and the file's size. Raises ValueError."""
    # Over SFTP, `seek` returns nothing.
    file.seek(0, io.SEEK_END)
    size = file.tell()
    if size < len(_MAGIC) + _TAIL_BYTES:
        raise ValueError(f"{size} bytes are too few")
    file.seek(size - _TAIL_BYTES)
    tail = file.read(_TAIL_BYTES)
    if tail.endswith(_ENCRYPTED_MAGIC):
        raise ValueError("its footer is encrypted, which is not supported")
    if not tail.endswith(_MAGIC):
        raise ValueError("it does not end as Parquet files do; it may be cut off")
    length = int.from_bytes(tail[:4], "little")
    if length + len(_MAGIC) + _TAIL_BYTES > size:
        raise ValueError(f"its footer of {length} bytes is larger than the file")
    file.seek(size - _TAIL_BYTES - length)
    return file.read(length + _TAIL_BYTES), size
