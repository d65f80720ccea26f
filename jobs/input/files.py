"""The Parquet files behind `--input`, and what their footers say. No row is read here."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ..errors import JobRequestError
from ..record import InputFile
from ..storage.location import options_for
from ..storage.redaction import redacted_url, storage_reason

_WEB = ("http://", "https://")
_GLOB_SIGNS = "*?["
_SUFFIXES = (".parquet", ".pq", ".parq")
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_TAIL_BYTES = 8
_PARALLEL_FOOTERS = 16
_PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Footer:
    """One file and its Arrow schema."""

    file: InputFile
    schema: pa.Schema


def read_footers(url: str, storage_options: Mapping[str, Any]) -> tuple[Footer, ...]:
    """Footers of all files, in the order of their names.

    `url`: a file, a folder (all Parquet files below it, without names that start with `_` or `.`) or a glob.
    Raises `JobRequestError` naming every file that cannot be used.
    """
    options = options_for(url, storage_options)
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
        paths = _find(fs, path)
    except JobRequestError:
        raise
    except Exception as error:
        raise JobRequestError(f"input={redacted_url(url)!r}: {storage_reason(error, options, url)}") from None
    if not paths:
        raise JobRequestError(
            f"input={redacted_url(url)!r}: no Parquet files there. Expected a .parquet file, a folder with such "
            "files, or a glob that matches some."
        )
    names = _names(paths, path)

    def read(path: str) -> Footer | str:
        return _read_footer(fs, path, names[path], options, url)

    with ThreadPoolExecutor(_PARALLEL_FOOTERS) as pool:
        outcomes = list(pool.map(read, paths))
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if len(problems) > _PROBLEMS_SHOWN:
        problems[_PROBLEMS_SHOWN:] = [f"input: {len(problems) - _PROBLEMS_SHOWN} more files cannot be read."]
    if problems:
        raise JobRequestError(*problems)
    return tuple(outcome for outcome in outcomes if isinstance(outcome, Footer))


def footer_sha256(file: BinaryIO) -> str:
    """Hash of a Parquet file's footer, as `InputFile` has it. Raises ValueError where there is none."""
    return hashlib.sha256(_footer_bytes(file)[0]).hexdigest()


def would_read(url: str, file: str) -> bool:
    """Whether a file would be among those that `read_footers` finds behind `url`. Absolute paths or URLs, both."""
    source, file = _resolved(url), _resolved(file)
    if any(sign in source for sign in _GLOB_SIGNS):
        return re.match(glob_translate(source), file) is not None
    below = file.removeprefix(f"{source}/")
    return below != file and _is_visible(below.split("/"))


def unified_schema(footers: tuple[Footer, ...]) -> pa.Schema:
    """One schema for all files: a column that a file lacks is null there.

    Raises `JobRequestError` naming the file and the column when two files disagree on a type, and when a file
    has two columns of one name.
    """
    problems = []
    unified = pa.schema([])
    for footer in footers:
        repeated = sorted({name for name in footer.schema.names if footer.schema.names.count(name) > 1})
        if repeated:
            problems.append(f"input file {footer.file.name!r}: has several columns named {repeated[0]!r}.")
            continue
        for field in footer.schema.remove_metadata():
            try:
                unified = pa.unify_schemas([unified, pa.schema([field])], promote_options="default")
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                problems.append(
                    f"input file {footer.file.name!r}: column {field.name!r} is {field.type}, but "
                    f"{unified.field(field.name).type} in {footers[0].file.name!r}. Give all files one type."
                )
    if problems:
        raise JobRequestError(*dict.fromkeys(problems))
    everywhere = set.intersection(*(set(footer.schema.names) for footer in footers)) if footers else set()
    return pa.schema([f if f.name in everywhere else f.with_nullable(True) for f in unified])


def pack_schema(schema: pa.Schema) -> str:
    """A schema as text, for records."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def unpack_schema(text: str) -> pa.Schema:
    """The schema that `pack_schema` packed."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _find(fs: Any, path: str) -> list[str]:
    if any(sign in path for sign in _GLOB_SIGNS) and not fs.exists(path):
        return sorted(found for found in fs.glob(path) if fs.isfile(found))
    if fs.isfile(path):
        return [path]
    if not fs.exists(path):
        raise FileNotFoundError(path)
    root = path.rstrip("/")
    below = {found: found[len(root) :].strip("/").split("/") for found in fs.find(root)}
    visible = {found: parts for found, parts in below.items() if _is_visible(parts)}
    partitioned = [part for parts in visible.values() for part in parts[:-1] if "=" in part]
    if partitioned:
        raise JobRequestError(
            f"input: the folder is partitioned by {partitioned[0].split('=')[0]!r} ({partitioned[0]}/…), and "
            "columns kept in folder names are not read. Write that column into the files."
        )
    return sorted(found for found in visible if found.lower().endswith(_SUFFIXES))


def _is_visible(parts: Sequence[str]) -> bool:
    return not any(part.startswith(("_", ".")) for part in parts)


def _resolved(url: str) -> str:
    """One spelling for one place: local paths without links, `file://` and trailing slashes."""
    path = url.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _names(paths: list[str], root: str) -> dict[str, str]:
    """Path -> a short name, unique in the job: below the folder given, or the file name."""
    folder = root.rstrip("/") + "/"
    # On the web a path is a whole URL, and what follows the question mark may open the file.
    plain = {path: path.partition("?")[0] if path.startswith(_WEB) else path for path in paths}
    short = {path: plain[path].removeprefix(folder).rsplit("/", 1)[-1] for path in paths}
    if len(set(short.values())) == len(paths):
        return short
    parts = [plain[path].split("/") for path in paths]
    common = 0
    while len({tuple(p[: common + 1]) for p in parts}) == 1:
        common += 1
    return {path: "/".join(p[common:]) for path, p in zip(paths, parts, strict=True)}


def _read_footer(fs: Any, path: str, name: str, options: Mapping[str, Any], given: str) -> Footer | str:
    """The footer, or a sentence that says why the file is refused. `given`: the URL it was found with."""
    try:
        with fs.open(path, "rb") as file:
            footer, size = _footer_bytes(file)
        metadata = _parsed(footer)
    except ValueError as error:
        return f"input file {name!r}: not a readable Parquet file ({error}). Write it again or leave it out."
    except Exception as error:
        return f"input file {name!r}: {storage_reason(error, options, given)}"
    url = path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)
    return Footer(
        InputFile(
            url=redacted_url(url),
            name=name,
            size_bytes=size,
            footer_sha256=hashlib.sha256(footer).hexdigest(),
            row_group_rows=tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)),
        ),
        metadata.schema.to_arrow_schema(),
    )


def _parsed(footer: bytes) -> pq.FileMetaData:
    """What a footer says. Raises ValueError; pyarrow raises `OSError` where the bytes are no footer."""
    try:
        return pq.read_metadata(io.BytesIO(_MAGIC + footer))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error).strip()) from None


def _footer_bytes(file: BinaryIO) -> tuple[bytes, int]:
    """The footer with its length and magic, and the file's size. Raises ValueError."""
    size = file.seek(0, io.SEEK_END)
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
