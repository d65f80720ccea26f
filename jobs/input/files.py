"""Finds the Parquet files behind `--input` and reads their footers. No row is read here."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ..errors import JobRequestError
from ..record import InputFile
from ..storage.location import options_for
from ..storage.redaction import redacted_url, storage_reason
from ..storage.stores import open_store
from .column_types import INT96_UNIT, carried_field
from .file_version import file_version
from .parquet_schema import column_kinds
from .row_group import MAX_ROW_GROUP_ROWS
from .spark_metadata import SPARK_CALENDAR_KEYS

_WEB = ("http://", "https://")
_GLOB_SIGNS = "*?["
_SUFFIXES = (".parquet", ".pq", ".parq")
_CONVERTED = {".csv": "CSV", ".tsv": "CSV", ".jsonl": "JSON", ".ndjson": "JSON", ".json": "JSON"}
_OTHER_FORMATS = {
    **_CONVERTED,
    **{".arrow": "Arrow", ".feather": "Arrow", ".ipc": "Arrow", ".orc": "ORC", ".avro": "Avro", ".xlsx": "Excel"},
}
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy")
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
# Folders with records of other programs and ours, whose Parquet files hold no input rows.
_RECORDS = ("_lorabatch", "_temporary", "_delta_log", "_spark_metadata")
#: Folder in which a Delta table records which of its files count.
DELTA_LOG = "_delta_log"
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


@dataclass(frozen=True, slots=True)
class _Found:
    """The files found behind one input, as paths of its file system."""

    #: The input, as given.
    url: str
    #: Its filesystem.
    fs: Any
    #: Storage options for its URL.
    options: Mapping[str, Any]
    #: Parquet files, in order.
    paths: list[str]
    #: Folder above the folders whose names may hold columns.
    root: str
    #: Files that are not read.
    unread: list[str]

    def address(self, path: str) -> str:
        """A file's path on this machine, or its URL."""
        if isinstance(self.fs, LocalFileSystem):
            return path
        url, own = self.url.rstrip("/"), str(self.fs._strip_protocol(self.url)).rstrip("/")
        if own and "::" not in url and url.endswith(own):
            # `unstrip_protocol` leaves out the server of SFTP and others.
            return url.removesuffix(own) + path
        return str(self.fs.unstrip_protocol(path))

    def folder(self, path: str) -> str:
        """A file's folders below `root`; see `Footer.folder`."""
        return path.removeprefix(self.root).strip("/").rpartition("/")[0]

    def shown(self, path: str) -> str:
        """Name of an unread file for messages; a hidden file has its folders below the root before its name."""
        below = _below(self.root, path)
        return below[-1] if _is_visible(below) else "/".join(below)


def read_footers(urls: Sequence[str], storage_options: Mapping[str, Any]) -> tuple[tuple[Footer, ...], tuple[str, ...]]:
    """Footers of all files, in the order of the inputs, and of their names within each; and the names of files in the
    same folders that are not read.

    `urls`: files, folders (all Parquet files below them, whatever their ending, without names that start with `_` or
    `.`) and globs. Raises `JobRequestError` naming every input and file that cannot be used.
    """
    problems: list[str] = []
    inputs = [found for url in urls if (found := _found(url, storage_options, problems)) is not None]
    files = [(found, path) for found in inputs for path in found.paths]
    problems += _read_twice(files)
    names = _names([found.address(path) for found, path in files])
    kinds = _KindsOfSchemas()

    def read(number: int) -> Footer | str:
        return _read_footer(*files[number], names[number], kinds)

    with ThreadPoolExecutor(_PARALLEL_FOOTERS) as pool:
        outcomes = list(pool.map(read, range(len(files))))
    unusable = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if len(unusable) > _PROBLEMS_SHOWN:
        unusable[_PROBLEMS_SHOWN:] = [f"input: {len(unusable) - _PROBLEMS_SHOWN} more files cannot be read."]
    problems += unusable
    if problems:
        raise JobRequestError(*problems)
    unread = tuple(found.shown(path) for found in inputs for path in found.unread)
    return tuple(outcome for outcome in outcomes if isinstance(outcome, Footer)), unread


def _found(url: str, storage_options: Mapping[str, Any], problems: list[str]) -> _Found | None:
    """The files behind one input; None when it has none that can be read, with a sentence added to `problems`."""
    shown, options = redacted_url(url), options_for(url, storage_options)
    try:
        fs, path = open_store(url, options)
        fs.invalidate_cache()  # this process may have listed it for another job
        found = _Found(url, fs, options, *_find(fs, path))
        _add_by_content(found)
    except Exception as error:
        problems.append(f"input={shown!r}: {storage_reason(error, options, url)}")
        return None
    if found.paths:
        return found
    other = next((path for path in found.unread if other_format(path) in _CONVERTED.values()), None)
    if other is not None:
        folder, ending = shown.rstrip("/"), other.rpartition("/")[2].partition(".")[2]
        problems.append(
            f"input={shown!r}: {other_format(other)} and no Parquet files there; only Parquet is read. "
            + _conversion(f"{folder}/**/*.{ending}", folder)
        )
    else:
        others = f" ({endings(found.unread)})" if found.unread else ""
        problems.append(
            f"input={shown!r}: no Parquet files there{others}. Expected a Parquet file, a folder with such files, or a "
            "glob that matches some."
        )
    return None


def _add_by_content(found: _Found) -> None:
    """Move unread files that begin as Parquet files do to `paths`: Hive, Impala and Spark write names without an
    ending.
    """

    def begins_so(path: str) -> bool:
        # A filesystem for this thread, instead of `found.fs`: a connection of SFTP is for one thread.
        fs, _ = open_store(found.url, found.options)
        if isinstance(fs, LocalFileSystem) and not os.path.isfile(path):
            return False  # a pipe, or a link to a folder
        try:
            with fs.open(path, "rb") as file:
                return file.read(len(_MAGIC)) in (_MAGIC, _ENCRYPTED_MAGIC)
        except (PermissionError, FileNotFoundError):
            return False  # it is named as not read

    waiting = [path for path in found.unread if _is_visible(_below(found.root, path)) and path not in found.paths]
    with ThreadPoolExecutor(_PARALLEL_FOOTERS) as pool:
        parquet = {path for path, is_so in zip(waiting, pool.map(begins_so, waiting), strict=True) if is_so}
    found.paths[:] = sorted([*found.paths, *parquet])
    found.unread[:] = [path for path in found.unread if path not in parquet]


def endings(names: Sequence[str]) -> str:
    """Number of files by their ending, in words, the most frequent first: "2 .csv, 1 without an ending"."""
    counts = Counter(_ending(name) for name in names)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items(), key=lambda item: (-item[1], item)))


def _ending(name: str) -> str:
    file = name.rpartition("/")[2]
    if file == DELTA_LOG:
        return DELTA_LOG
    if file.startswith(("_", ".")) or not _is_visible(name.strip("/").split("/")):
        return "hidden"
    stem = next((file.removesuffix(end) for end in _COMPRESSIONS if file.lower().endswith(end)), file)
    ending = stem.rpartition(".")[2] if "." in stem else ""
    ending = f".{ending}" if ending else ""
    return (ending + file[len(stem) :]) or "without an ending"


def footer_sha256(file: BinaryIO) -> str:
    """Hash of a Parquet file's footer, as in `InputFile`. Raises ValueError for a file without a footer."""
    return hashlib.sha256(_footer_bytes(file)[0]).hexdigest()


def would_read(url: str, file: str) -> bool:
    """Whether `read_footers` would find `file` behind `url`. Both are absolute paths or URLs."""
    source, file = _resolved(url), _resolved(file)
    if any(sign in source for sign in _GLOB_SIGNS):
        return re.match(glob_translate(source), file) is not None
    below = file.removeprefix(f"{source}/")
    return below != file and _is_visible(below.split("/"))


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


def _find(fs: Any, path: str) -> tuple[list[str], str, list[str]]:
    """Paths of Parquet files, the folder above the folders whose names may hold columns, and paths of other files."""
    if any(sign in path for sign in _GLOB_SIGNS) and not fs.exists(path):
        parts = path.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(sign in part for sign in _GLOB_SIGNS))
        return sorted(found for found in fs.glob(path) if fs.isfile(found)), "/".join(parts[:fixed]), []
    # `isfile` and `exists` would take storage that refuses for empty storage.
    if fs.info(path)["type"] != "directory":
        return [path], path.rpartition("/")[0], []
    root = path.rstrip("/")
    paths: list[str] = []
    unread: list[str] = []
    is_delta = False
    for found in sorted(fs.find(root)):
        below = _below(root, found)
        is_parquet = found.lower().endswith(_SUFFIXES)
        if _is_visible(below):
            (paths if is_parquet else unread).append(found)
        elif is_parquet and not any(part in _RECORDS for part in below):
            unread.append(found)
        is_delta |= DELTA_LOG in below
    return paths, root, [*unread, *([f"{root}/{DELTA_LOG}"] if is_delta else [])]


def _below(root: str, path: str) -> list[str]:
    return path.removeprefix(root).strip("/").split("/")


def other_format(name: str) -> str | None:
    """The format of a data file that is not Parquet, by the ending of its name; None for other files."""
    stem = name.lower()
    stem = next((stem.removesuffix(end) for end in _COMPRESSIONS if stem.endswith(end)), stem)
    return next((kind for suffix, kind in _OTHER_FORMATS.items() if stem.endswith(suffix)), None)


def _conversion(source: str, stem: str) -> str:
    """A command that writes a Parquet file, under a name that is free on this machine: DuckDB replaces files."""
    names = (f"{stem}.parquet", *(f"{stem}-{number}.parquet" for number in range(2, 100)))
    target = next(name for name in names if not os.path.lexists(name))
    return f"""Convert it, for example: duckdb -c "COPY (FROM '{source}') TO '{target}'\""""


def _is_visible(parts: Sequence[str]) -> bool:
    return not any(part.startswith(("_", ".")) for part in parts)


def _resolved(url: str) -> str:
    """One spelling for one place: local paths without links, `file://` and trailing slashes."""
    path = url.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _read_twice(files: Sequence[tuple[_Found, str]]) -> list[str]:
    """A problem for files that are behind two inputs: their rows would be answered twice."""
    first: dict[str, _Found] = {}
    twice = []
    for found, path in files:
        if first.setdefault(_resolved(found.address(path)), found) is not found:
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


def _read_footer(found: _Found, path: str, name: str, kinds: _KindsOfSchemas) -> Footer | str:
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
        kind = other_format(name)
        if kind in _CONVERTED.values():
            shown = redacted_url(found.address(path))
            stem = name.rpartition("/")[2].partition(".")[0]
            return f"input file {name!r}: {kind}; only Parquet is read. {_conversion(shown, stem)}"
        if kind is not None:
            return f"input file {name!r}: {kind}; only Parquet is read. Write it as Parquet or leave it out."
        return f"input file {name!r}: not a readable Parquet file ({error}). Write it again or leave it out."
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
