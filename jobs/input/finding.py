"""Finds the files behind one `--input`, and their format. No file is read but for its first bytes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ...system.untrusted import MALFORMED, parse_json, shown_name
from ..storage.location import options_for
from ..storage.redaction import redacted_url, storage_reason
from ..storage.stores import open_store
from ..storage.urls import has_wildcard
from .conversion.source import Kind
from .formats import (
    FIRST_BYTES,
    PARQUET,
    SUFFIXES,
    advice_for,
    is_plain_json,
    kind_of_content,
    kind_of_name,
    may_be_stream,
    shown_ending,
)

#: Format of a table of this program, which is no `Kind`.
TABLE = "table"
_ENDINGS_EXPLAINED = 3
# Folders with records of other programs and ours, whose Parquet files hold no input rows.
_RECORDS = ("_lorabatch", "_temporary", "_delta_log", "_spark_metadata")
#: Folder in which a Delta table records which of its files count.
DELTA_LOG = "_delta_log"
# Files that the package `datasets` writes beside its Arrow files: the list of them, and the list of splits.
_DATASET_STATE, _DATASET_SPLITS = "state.json", "dataset_dict.json"
_DATASET_INFO, _DATASET_CACHE = "dataset_info.json", "cache-"
_MAX_STATE_BYTES = 64 << 20
_PARALLEL_LOOKS = 16


@dataclass(frozen=True, slots=True)
class FoundInput:
    """The files found behind one input, as paths of its file system."""

    #: The input, as given.
    url: str
    #: Its filesystem.
    fs: Any
    #: Storage options for its URL.
    options: Mapping[str, Any]
    #: Files to read, in order.
    paths: list[str]
    #: Folder above the folders whose names may hold columns.
    root: str
    #: Files that are not read.
    unread: list[str]
    #: Format of the files to read: `PARQUET`, `TABLE`, or a `Kind`.
    kind: str = PARQUET

    def address(self, path: str) -> str:
        """A file's path on this machine, or its URL."""
        if self.kind == TABLE or isinstance(self.fs, LocalFileSystem):
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

    def endings(self, paths: Sequence[str]) -> str:
        """Number of files by their ending; see `endings`."""
        return endings(list(map(self.shown, paths)))


def find_input(url: str, storage_options: Mapping[str, Any], problems: list[str]) -> FoundInput | None:
    """The files behind one input; None when it has none that can be read, with a sentence added to `problems`."""
    shown, options = redacted_url(url), options_for(url, storage_options)
    try:
        fs, path = open_store(url, options)
        fs.invalidate_cache()  # this process may have listed it for another job
        found = _find(url, fs, options, path)
    except _NoInputError as error:
        problems.append(f"input={shown!r}: {error}")
        return None
    except Exception as error:
        problems.append(f"input={shown!r}: {storage_reason(error, options, url)}")
        return None
    if found.paths:
        return found
    others = f" ({found.endings(found.unread)})" if found.unread else ""
    problems.append(
        f"input={shown!r}: no Parquet files there{others}. Expected a file of Parquet, {', '.join(get_args(Kind))}, a "
        f"folder with such files, or a glob that matches some.{_advice(found)}"
    )
    return None


def _advice(found: FoundInput) -> str:
    """Sentences about the first unread file of each ending: what it seems to be, and what to do; "" about no file."""
    by_ending: dict[str, str] = {}
    for path in found.unread:
        if _is_visible(_below(found.root, path)):
            by_ending.setdefault(_ending(path), path)
    said = {
        path: advice_for(redacted_url(found.address(path)), first_bytes(found.fs, path))
        for path in [*by_ending.values()][:_ENDINGS_EXPLAINED]
    }
    return "".join(f" {found.shown(path)!r}: {advice}." for path, advice in said.items() if advice)


def first_bytes(fs: Any, path: str) -> bytes:
    """The begin of a file; none of one that cannot be read."""
    try:
        with fs.open(path, "rb") as file:
            return bytes(file.read(FIRST_BYTES))
    except Exception:
        return b""


class _NoInputError(ValueError):
    """There are files, and which of them are the input is not known. The message is a clause with a next step."""


def _find(url: str, fs: Any, options: Mapping[str, Any], path: str) -> FoundInput:
    if has_wildcard(path) and not fs.exists(path):
        parts = path.split("/")
        fixed = next(i for i, part in enumerate(parts) if has_wildcard(part))
        paths = sorted(found for found in fs.glob(path) if fs.isfile(found))
        return _of_one_kind(FoundInput(url, fs, options, paths, "/".join(parts[:fixed]), []))
    # `isfile` and `exists` would take storage that refuses for empty storage.
    if fs.info(path)["type"] != "directory":
        return _of_one_kind(FoundInput(url, fs, options, [path], path.rpartition("/")[0], []))
    return _folder(url, fs, options, path.rstrip("/"))


def _of_one_kind(found: FoundInput) -> FoundInput:
    """Files that were named, with their format. Raises `_NoInputError` for several formats."""
    kinds = dict(zip(found.paths, _looked_at(found, found.paths), strict=True))
    several = {kind for kind in kinds.values() if kind is not None}
    unknown = [path for path, kind in kinds.items() if kind is None]
    if unknown and several - {PARQUET}:
        raise _NoInputError(
            f"beside files of {', '.join(sorted(several))} there are others, of no format that is read "
            f"({found.endings(unknown)}), such as {found.shown(unknown[0])!r}. Leave them out, for example with a glob "
            f"that names an ending.{_advice(_with_kind(found, [], unknown, PARQUET))}"
        )
    if len(several) > 1:
        raise _NoInputError(
            f"files of several formats there ({', '.join(sorted(several))}): {found.endings(found.paths)}. Give each "
            "format to a job of its own, or name one by its ending."
        )
    return _with_kind(found, found.paths, [], several.pop() if several else PARQUET)


def _with_kind(found: FoundInput, paths: list[str], unread: list[str], kind: str) -> FoundInput:
    return FoundInput(found.url, found.fs, found.options, paths, found.root, unread, kind)


def _folder(url: str, fs: Any, options: Mapping[str, Any], root: str) -> FoundInput:
    """The files of a folder: those of Parquet, or else of the one other format that has files there."""
    paths: list[str] = []
    unread: list[str] = []
    is_delta = False
    for path in sorted(fs.find(root)):
        below = _below(root, path)
        is_parquet = path.lower().endswith(SUFFIXES)
        if _is_visible(below):
            (paths if is_parquet else unread).append(path)
        elif is_parquet and not any(part in _RECORDS for part in below):
            unread.append(path)
        is_delta |= DELTA_LOG in below
    found = FoundInput(url, fs, options, paths, root, unread)
    # Hive, Impala and Spark write names without an ending.
    waiting = [path for path in unread if _is_visible(_below(root, path)) and path not in paths]
    looked_at = zip(waiting, _looked_at(found, waiting, by_name=False), strict=True)
    by_content = {path for path, kind in looked_at if kind == PARQUET}
    paths = sorted([*paths, *by_content])
    unread = [path for path in unread if path not in by_content]
    kind = PARQUET
    if not paths:
        kind, paths = _other_files(found, unread)
        unread = [path for path in unread if path not in paths]
    return _with_kind(found, paths, [*unread, *([f"{root}/{DELTA_LOG}"] if is_delta else [])], kind)


def _other_files(found: FoundInput, files: list[str]) -> tuple[str, list[str]]:
    """The files of the format that a folder without Parquet files has, and the format. Raises `_NoInputError`."""
    visible = {
        path: path.removeprefix(found.root).strip("/") for path in files if _is_visible(_below(found.root, path))
    }
    if f"{found.root}/{_DATASET_SPLITS}" in visible:
        splits = sorted({name.partition("/")[0] for name in visible.values() if "/" in name})
        raise _NoInputError(
            f"a data set with the splits {', '.join(map(shown_name, splits))}. Name one of these folders."
        )
    if f"{found.root}/{_DATASET_STATE}" in visible:
        return "Arrow", _files_of_dataset(found)
    by_kind: dict[str, list[str]] = {}
    described = {path.rpartition("/")[0] for path in visible if path.endswith(f"/{_DATASET_INFO}")}
    for path in visible:
        folder, _, name = path.rpartition("/")
        if folder in described and name.startswith(_DATASET_CACHE):
            continue  # a result that the package keeps beside the rows
        kind = kind_of_name(path)
        if kind is not None:
            by_kind.setdefault(kind if not is_plain_json(path) else ".json", []).append(path)
    plain_json = by_kind.pop(".json", [])
    if len(by_kind) > 1:
        raise _NoInputError(
            f"files of several formats there ({', '.join(sorted(by_kind))}): {found.endings(files)}. Name one with a "
            f"glob, such as {redacted_url(found.url).rstrip('/')}/*{_ending(next(iter(by_kind.values()))[0])}"
        )
    if by_kind:
        return by_kind.popitem()
    return "JSON Lines", plain_json


def _files_of_dataset(found: FoundInput) -> list[str]:
    """The files with the rows of a data set that `datasets` saved, in their order: others beside them hold copies."""
    try:
        with found.fs.open(f"{found.root}/{_DATASET_STATE}", "rb") as file:
            state = parse_json(file.read(_MAX_STATE_BYTES))
        names = [str(one["filename"]) for one in state["_data_files"]]
    except MALFORMED as error:
        raise _NoInputError(
            f"{_DATASET_STATE} does not list the files of a data set ({error}). Save it again."
        ) from None
    if any("/" in name or name.startswith(".") for name in names):
        raise _NoInputError(f"{_DATASET_STATE} names files outside of the folder. Save the data set again.")
    return [f"{found.root}/{name}" for name in names]


def _looked_at(found: FoundInput, paths: Sequence[str], *, by_name: bool = True) -> list[str | None]:
    """The format of each file by its first bytes, or else (`by_name`) by its ending; None where neither says one. A
    file with an ending of Parquet is not looked at.
    """

    def kind_of(path: str) -> str | None:
        if path.lower().endswith(SUFFIXES):
            return PARQUET
        # A filesystem for this thread, instead of `found.fs`: a connection of SFTP is for one thread.
        fs, _ = open_store(found.url, found.options)
        if isinstance(fs, LocalFileSystem) and not os.path.isfile(path):
            return None  # a pipe, or a link to a folder
        named = kind_of_name(path) if by_name else None
        try:
            with fs.open(path, "rb") as file:
                first = file.read(FIRST_BYTES)
        except (PermissionError, FileNotFoundError):
            return named  # it is named as not read
        return kind_of_content(first) or named or ("Arrow" if by_name and may_be_stream(first) else None)

    with ThreadPoolExecutor(_PARALLEL_LOOKS) as pool:
        return list(pool.map(kind_of, paths))


def endings(names: Sequence[str]) -> str:
    """Number of files by their ending, in words, the most frequent first: "2 .csv, 1 without an ending"."""
    counts = Counter(_ending(name) for name in names)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items(), key=lambda item: (-item[1], item)))


def _ending(name: str) -> str:
    file = name.rpartition("/")[2]
    if file == DELTA_LOG:
        return DELTA_LOG
    if not _is_visible(name.strip("/").split("/")):
        return "hidden"
    return shown_ending(file) or "without an ending"


def would_read(url: str, file: str) -> bool:
    """Whether `file` would be found behind the input `url`. Both are absolute paths or URLs."""
    source, file = resolved(url), resolved(file)
    if has_wildcard(source):
        return re.match(glob_translate(source), file) is not None
    below = file.removeprefix(f"{source}/")
    return below != file and _is_visible(below.split("/"))


def resolved(url: str) -> str:
    """One spelling for one place: local paths without links, `file://` and trailing slashes."""
    path = url.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _below(root: str, path: str) -> list[str]:
    return path.removeprefix(root).strip("/").split("/")


def _is_visible(parts: Sequence[str]) -> bool:
    return not any(part.startswith(("_", ".")) for part in parts)
