"""`Converter`: the input of one job that is not Parquet, written once as Parquet into the job's output.

    OUTPUT/_lorabatch/input/<key>/00000.parquet …   one file for each source, in the order of the input
    OUTPUT/_lorabatch/input/<key>/sources.json      what they were made from; written last

`<key>` is a hash of the contents of the sources. New files are staged, and put in place once the job is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import pyarrow as pa

from ....system.local_cache import temporary_folder
from ....system.long_work import LongWork
from ....system.untrusted import MALFORMED, parse_json
from ...errors import JobRequestError, MissingFileError, StorageError
from ...options.values import TABLE_SCHEME, InputTable
from ...record import FileVersion, InputRecord
from ...storage.location import Location
from ...storage.redaction import redacted_url, storage_reason
from ...storage.single_file import put_file
from .binary_rows import convert_binary
from .csv_rows import CsvColumns, read_csv
from .frames import write_frame
from .json_rows import JsonColumns, read_json_lines
from .source import Item, Source, UnreadableSourceError
from .tables import Spool, write_parquet

# Version of the conversion: files of another version are not used.
_VERSION = 1
_SOURCES = "sources.json"
_STAGING = ".staging-"
_KEY_DIGITS = 16
_PROBLEMS_SHOWN = 10
# Seconds by which times of change may be off.
_SLACK_S = 2.0
_QUIET_S = 1.0
_COPY_BYTES = 1 << 20


class Converter:
    """The conversion of one job's input. Its owner calls `close`, which removes what was not put in place.

    `place`: folder of the output for converted input. `texts`: columns that are text in CSV files, whatever they look
    like. `numbers`: columns of CSV files that are settings with numbers. `as_json`: columns of JSON files whose objects
    are kept as JSON. `verify`: sources are read again, also where they look unchanged.
    `may_stage`: whether new files may be staged in the output; else they are on a disk of this machine.
    """

    def __init__(
        self,
        place: Location,
        *,
        texts: Sequence[str] = (),
        numbers: Sequence[str] = (),
        as_json: Sequence[str] = (),
        verify: bool = False,
        may_stage: bool = True,
    ) -> None:
        self._place, self._verify, self._may_stage = place, verify, may_stage
        # Columns whose types the job's options decide: texts, numbers and JSON.
        self._typed = [sorted(texts), sorted(numbers), sorted(as_json)]
        self._stack = ExitStack()
        # Folder with the new files; None when nothing was converted, or the files are in place.
        self._staged: Path | None = None
        #: Hash of the contents of all sources; "" without any.
        self.key = ""
        #: Formats of the sources, in words, each once.
        self.formats: tuple[str, ...] = ()
        #: URLs by which tables of this program are known from now on, in their order.
        self.table_urls: tuple[str, ...] = ()
        #: Columns that hold the JSON of values without a common type.
        self.json_columns: tuple[str, ...] = ()

    def close(self) -> None:
        """Remove new files that are not in place."""
        self._stack.close()

    def convert(self, items: Sequence[Item]) -> list[str]:
        """The Parquet files of the items, as paths or URLs, in their order: those in the output, where they were made
        from the same contents, else new ones.

        Raises `JobRequestError` with a sentence for each item that cannot be read, and `StorageError`.
        """
        if not items:
            return []
        known = self._records()
        for key, record in known.items():
            if self._is_made_from(record, items):
                return self._used(key, record)
        try:
            staging = self._stack.enter_context(self._staging())
            key, record = _Conversion(items, self._typed, staging).run()
        except OSError as error:
            raise StorageError(f"cannot convert the input: {storage_reason(error, {})}") from None
        if key in known:
            return self._used(key, known[key])
        found = self._used(key, record)
        (staging / _SOURCES).write_bytes(_encoded(record))
        self._staged = staging
        return [str(staging / url.rpartition("/")[2]) for url in found]

    def put_in_place(self, given: InputRecord) -> InputRecord:
        """Put staged files into the output; returns the input with the files there. Raises `StorageError`."""
        staged, self._staged = self._staged, None
        if staged is None:
            return given
        names = sorted(path.name for path in staged.glob("*.parquet"))
        if self._place.is_local:
            if self.key not in self._records():  # else another command was faster
                self._place.remove([self.key])  # incomplete
                try:
                    os.replace(staged, self._place.local_path(self.key))
                except OSError as error:
                    raise StorageError(f"cannot write {self._place.url}: {storage_reason(error, {})}") from None
        else:
            for name in (*names, _SOURCES):
                put_file(staged / name, f"{self._place.url}/{self.key}/{name}", self._place.storage_options)
        urls = {str(staged / name): redacted_url(self._url(self.key, name)) for name in names}
        files = (file.model_copy(update={"url": urls.get(file.url, file.url)}) for file in given.files)
        return given.model_copy(update={"files": tuple(files)})

    def remove_others(self) -> None:
        """Remove files of other conversions from the output. Raises `StorageError`."""
        names = [name for name in self._place.list() if name != self.key and not name.startswith(_STAGING)]
        self._place.remove(names)

    def _url(self, key: str, name: str) -> str:
        if self._place.is_local:
            return str(self._place.local_path(f"{key}/{name}"))
        return f"{self._place.url}/{key}/{name}"

    def _used(self, key: str, record: Mapping[str, Any]) -> list[str]:
        sources = record["sources"]
        self.key = key
        self.formats = tuple(dict.fromkeys(str(source["format"]) for source in sources))
        self.json_columns = tuple(map(str, record["json_columns"]))
        self.table_urls = tuple(TABLE_SCHEME + str(one["sha256"]) for one in sources if one["kind"] == _TABLE)
        return [self._url(key, str(source["file"])) for source in sources]

    def _records(self) -> dict[str, Mapping[str, Any]]:
        """The conversions in the output: key -> what it was made from. Incomplete and damaged ones are left out."""
        found: dict[str, Mapping[str, Any]] = {}
        for key in self._place.list():
            with suppress(MissingFileError, *MALFORMED):
                record = parse_json(self._place.read(f"{key}/{_SOURCES}"))
                files = {str(source["file"]) for source in record["sources"]}
                if record["version"] == _VERSION and files <= self._place.list(key).keys():
                    found[key] = record
        return found

    def _is_made_from(self, record: Mapping[str, Any], items: Sequence[Item]) -> bool:
        """Whether a conversion in the output was made from these sources. Their bytes are read where their versions do
        not say it.
        """
        sources = record["sources"]
        if len(sources) != len(items) or record["wishes"] != self._typed:
            return False
        with suppress(*MALFORMED):
            pairs = list(zip(sources, items, strict=True))
            may_be = all(_may_be_made_from(source, item) for source, item in pairs)
            return may_be and all(_is_same(source, item, verify=self._verify) for source, item in pairs)
        return False

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A folder for new files on the disk of the output where that is a local one."""
        with ExitStack() as stack:
            parent = None
            if self._may_stage and self._place.is_local:
                parent = self._place.local_path("")
                stack.enter_context(_made_folders(parent))
            folder = stack.enter_context(temporary_folder(parent, _STAGING)) / "files"
            folder.mkdir()
            yield folder


_TABLE = "table"


@contextmanager
def _made_folders(folder: Path) -> Iterator[None]:
    """Make a folder and those above it. Those that are empty when the block ends are removed again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def _encoded(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _may_be_made_from(source: Mapping[str, Any], item: Item) -> bool:
    """Whether a recorded source may be this one; no byte of it is read."""
    if isinstance(item, Source):
        return bool(source["kind"] == item.kind and source["size_bytes"] == item.facts()[0])
    return not isinstance(item, InputTable) and source["kind"] == _TABLE and item == TABLE_SCHEME + source["sha256"]


def _is_same(source: Mapping[str, Any], item: Item, *, verify: bool) -> bool:
    """Whether a recorded source has the content of this one, which may have it."""
    if not isinstance(item, Source):
        return True
    before, (_, now) = FileVersion.model_validate(source["version"]), item.facts()
    if not verify and source["url"] == item.shown_url:
        if before.tag and before.tag == now.tag:
            return True
        # A file that changed in the moment it was read may have changed again at the same time.
        is_settled = 0 < before.modified_s < before.seen_s - _SLACK_S
        if not now.tag and is_settled and before.modified_s == now.modified_s:
            return True
    with item.opened() as file:
        return bool(file.sha256() == source["sha256"])


class _Conversion:
    """One pass over all sources of a job, and the files that it writes."""

    def __init__(self, items: Sequence[Item], typed: list[list[str]], folder: Path) -> None:
        self._items, self._typed, self._folder = items, typed, folder
        texts, numbers, as_json = typed
        self._csv, self._json = CsvColumns(texts, numbers), JsonColumns(as_json)
        self._spools: dict[int, tuple[Spool, list[str]]] = {}
        self._problems: list[str] = []
        self._stack = ExitStack()

    def run(self) -> tuple[str, dict[str, Any]]:
        """Converts all sources into the folder. Returns the key of the conversion, and its record.

        Raises `JobRequestError`, and `OSError` of the folder's disk.
        """
        with self._stack:
            sources = [self._read(number) for number in range(len(self._items))]
            if not self._problems and self._json.is_batch_file():
                self._problems.append(
                    "input: lines with custom_id, method, url and body are a batch file of OpenAI's API. Import it: "
                    "lorabatch import FILE.jsonl rows.parquet"
                )
            for number, source in enumerate(sources):
                if source is not None and number in self._spools and not self._problems:
                    self._tried(number, lambda number=number, source=source: self._write_text(number, source["sha256"]))
        if self._problems:
            shown, more = self._problems[:_PROBLEMS_SHOWN], len(self._problems) - _PROBLEMS_SHOWN
            raise JobRequestError(*shown, *([f"input: {more} more files cannot be read."] if more > 0 else []))
        record = {
            "version": _VERSION,
            "wishes": self._typed,
            "json_columns": self._json.json_columns(),
            "sources": sources,
        }
        return _key(record), record

    def _read(self, number: int) -> dict[str, Any] | None:
        """Reads one item. Binary files and tables are written at once, texts when the types of all are known. Returns
        the item's part of the record; None when there is a problem.
        """
        item, file = self._items[number], _name(number)
        if isinstance(item, InputTable):
            digest = self._tried(number, lambda: write_frame(item.data, self._folder / file))
            return None if digest is None else {"file": file, "kind": _TABLE, "format": item.kind, "sha256": digest}
        if not isinstance(item, Source):
            self._problems.append(
                f"input={str(item)!r}: a table that a Python program gave, which the output has no more. Give it "
                "again: lorabatch.run(input=…)."
            )
            return None
        found: dict[str, Any] | None = self._tried(number, lambda: self._read_source(number, item, file))
        return found

    def _read_source(self, number: int, item: Source, file: str) -> dict[str, Any]:
        size, version = item.facts()
        work = LongWork(f"converting {item.name} to Parquet", size, quiet_s=_QUIET_S, scope="this job")
        item = replace(item, on_read=work.add)
        known, words = item.kind, ""
        if item.kind in ("Arrow", "ORC"):
            sha256 = self._convert_binary(item, self._folder / file)
        else:
            spool = self._stack.enter_context(Spool(self._folder.parent / f"spool-{number}"))
            if item.kind == "JSON Lines":
                names, sha256 = read_json_lines(item, spool, self._json)
            else:
                names, words, sha256 = read_csv(item, spool, self._csv)
            self._spools[number] = spool, names
        if item.has_changed(version):
            raise UnreadableSourceError("has changed while it was read. Start again when it is complete.")
        shown = known if words in ("", "commas", "tabs") else f"{known} with {words}"
        facts = {"url": item.shown_url, "name": item.name, "size_bytes": size, "version": version.model_dump()}
        return {"file": file, "kind": known, "format": shown, "sha256": sha256, **facts}

    def _convert_binary(self, item: Source, target: Path) -> str:
        """Convert an Arrow or ORC file, after a copy where it is not on this machine. Returns the hash of the file."""
        local, path = Path(item.path), target.with_suffix(".copy")
        with item.opened() as file:
            if item.shown_url == item.path and local.is_file():
                path, sha256 = local, file.sha256()
            else:
                with path.open("xb") as copy:
                    while piece := file.read(_COPY_BYTES):
                        copy.write(piece)
                sha256 = file.sha256()
        convert_binary(path, item.kind, target, sha256)
        target.with_suffix(".copy").unlink(missing_ok=True)
        return sha256

    def _write_text(self, number: int, sha256: str) -> bool:
        spool, names = self._spools[number]
        item = self._items[number]
        assert isinstance(item, Source), f"item {number} is {type(item).__name__}, not text of a file"
        columns: CsvColumns | JsonColumns = self._json if item.kind == "JSON Lines" else self._csv
        schema = pa.schema([pa.field(name, columns.type_of(name)) for name in names])
        batches = (columns.typed(batch, names) for batch in spool.batches())
        write_parquet(self._folder / _name(number), schema, batches, sha256)
        return True

    def _tried(self, number: int, read: Any) -> Any:
        """Calls `read` and returns its value; None after an error about the item, which becomes a problem."""
        item = self._items[number]
        where = f"input file {item.name!r}" if isinstance(item, Source) else f"input={str(item)!r}"
        options, url = (item.options, item.input_url) if isinstance(item, Source) else ({}, "")
        try:
            return read()
        except UnreadableSourceError as error:
            self._problems.append(f"{where}: {error}")
        except StorageError as error:
            self._problems.append(f"{where}: {error}")
        except OSError as error:
            if error.errno in (ENOSPC, EDQUOT):
                raise
            self._problems.append(f"{where}: {storage_reason(error, options, url)}")
        except pa.ArrowException as error:
            self._problems.append(f"{where}: cannot be read ({error}). Write it again or leave it out.")
        return None


def _name(number: int) -> str:
    return f"{number:05d}.parquet"


def _key(record: Mapping[str, Any]) -> str:
    """Hash of the contents of all sources, and of what decides how they are read."""
    sources = [(source["kind"], source["sha256"]) for source in record["sources"]]
    basis = json.dumps([record["version"], record["wishes"], sources])
    return hashlib.sha256(basis.encode()).hexdigest()[:_KEY_DIGITS]
