"""Files of adapters in a store: their versions from listings, the headers of their weights alone, and whole copies.

A job is opened by what `versions_at` and `read_headers` find: a listing, the configuration, and the first bytes of each
file of weights. The values of the weights are read by the workers that need them (`fetched_adapter`). What is not in
safetensors has no versions here, and is copied whole by `adapter_copy.adapter_folder`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from ...engine.errors import AdapterRefusedError
from ...engine.peft.folder import CONFIG_NAME, INDEX_NAME, MLX_NAME, WEIGHTS_NAME
from ...engine.peft.heads import MODEL_CONFIG
from ...engine.peft.tensor_file import MAX_HEADER_BYTES
from ...engine.tokenizer_files import NAMES as TOKENIZER_NAMES
from ...system.local_cache import file_lock, temporary_folder
from ..errors import StorageError
from .adapter_copies import AdapterCopies
from .local_copy import copy_file, is_remote
from .location import options_for
from .redaction import redacted_url, storage_reason
from .stores import open_store

#: Requests to a store at once, for files of different adapters.
REQUESTS_AT_ONCE = 32
# Adapters of one parent from which on its listing, one request for hundreds of files, is cheaper than theirs.
_LISTED_TOGETHER = 8
# Files that are read whole when a job is opened. Those of a tokenizer decide how rows are prepared.
_READ_WHOLE = frozenset((CONFIG_NAME, MODEL_CONFIG, INDEX_NAME, *TOKENIZER_NAMES))
_SHARD = re.compile(r"adapter_model-.*\.safetensors")
# Larger ones are refused by whoever reads them.
_MAX_WHOLE_BYTES = 129 << 20
# Headers of 30 layers have 57 KB, headers of 80 layers 200 KB.
_FIRST_HEADER_BYTES = 64 << 10
# Tags that follow from the content alone, as those of S3.
_CONTENT_TAG = re.compile(r"[0-9a-fA-F]{32}(-\d+)?")
_TIMES = ("LastModified", "mtime", "last_modified", "created", "updated")

# Bytes of a file, and number of files, that `Alike` keeps.
_MOST_ALIKE_BYTES = 64 << 10
_MOST_ALIKE = 256

#: Name of each file of an adapter's folder -> its version in the store: size and tag.
Versions = dict[str, str]


class Alike:
    """Keeps lengths of headers, and contents of small files, that adapters which were trained alike have in common.
    Files of one version have one content where the version follows from it: it is read once.
    """

    def __init__(self) -> None:
        #: Name of a file of weights -> length of its header in the adapter that was read last, in bytes.
        self.header_bytes: dict[str, int] = {}
        self._lock = Lock()
        self._contents: dict[str, Future[bytes]] = {}

    def read(self, version: str, read: Callable[[], bytes]) -> bytes:
        """The content of a file of this version. `read`: reads it. Raises what `read` raises."""
        if not _is_of_content(version) or _size(version) > _MOST_ALIKE_BYTES:
            return read()
        with self._lock:
            known = self._contents.get(version)
            if known is None and len(self._contents) < _MOST_ALIKE:
                own = self._contents[version] = Future()
            else:
                own = None
        if own is None:
            # A fault of another's file need not be one of this file.
            return read() if known is None or known.exception() is not None else known.result()
        content = b""
        try:
            content = read()
        finally:
            if len(content) == _size(version):
                own.set_result(content)
            else:
                with self._lock:
                    del self._contents[version]
                own.set_exception(OSError("not read whole"))
        return content


def versions_at(urls: Iterable[str], storage_options: Mapping[str, Any]) -> dict[str, Versions]:
    """The versions of all files of those adapters that can be opened by their headers, by URL.

    Left out are adapters on disks, on a hub and in other formats than safetensors, those that cannot be listed, and
    those of a store that names neither tags nor times.
    """
    by_parent: defaultdict[str, list[str]] = defaultdict(list)
    for url in dict.fromkeys(urls):
        if is_remote(url):
            by_parent[url.rstrip("/").rpartition("/")[0]].append(url)
    alone: list[str] = []
    found: dict[str, Versions] = {}
    for parent, members in by_parent.items():
        together = _listed_below(parent, storage_options) if len(members) >= _LISTED_TOGETHER else None
        if together is None:
            alone += members
        else:
            found |= {url: together.get(url.rstrip("/").rpartition("/")[2], {}) for url in members}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        found |= zip(alone, threads.map(lambda url: _listed(url, storage_options), alone), strict=True)
    return {url: versions for url, versions in found.items() if _is_readable(versions)}


def read_files(versions: Mapping[str, str]) -> list[str]:
    """Names of the files that decide what an adapter computes, weights last."""
    weights = [name for name in versions if name in (WEIGHTS_NAME, MLX_NAME) or _SHARD.fullmatch(name)]
    return [*sorted(versions.keys() & _READ_WHOLE), *sorted(weights)]


def depends_on_place(versions: Mapping[str, str]) -> bool:
    """Whether files of the same versions elsewhere may have other content: their tags do not follow from it."""
    return not all(_is_of_content(versions[name]) for name in read_files(versions))


def read_headers(
    url: str,
    versions: Versions,
    storage_options: Mapping[str, Any],
    folder: Path,
    alike: Alike | None = None,
) -> str:
    """Make `folder` look like the adapter's: configuration and tokenizer whole, of weights the header, all else without
    content but of its size. `alike`: that of the other adapters. Returns a hash of what was read. Raises
    `StorageError`.
    """
    alike = alike or Alike()
    options = options_for(url, storage_options)
    digest = hashlib.sha256()
    read = read_files(versions)
    try:
        fs, remote = open_store(url, options)
        for name, version in versions.items():
            size = _size(version)
            content = b""
            if name in _READ_WHOLE and size <= _MAX_WHOLE_BYTES:
                content = _whole(fs, f"{remote}/{name}", version, alike)
            elif name in read:
                content = _header(fs, f"{remote}/{name}", size, alike.header_bytes.get(name, _FIRST_HEADER_BYTES))
                alike.header_bytes[name] = max(len(content), 8)
            with (folder / name).open("wb") as file:
                file.write(content)
                file.truncate(size)
            digest.update(json.dumps([name, len(content)]).encode() + content)
    except Exception as error:
        raise StorageError(f"{redacted_url(url)!r}: {storage_reason(error, options, url)}") from None
    return digest.hexdigest()


def fetched_adapter(url: str, versions: Versions, copies: AdapterCopies, fetch: Callable[[Path], None]) -> Path:
    """A local folder with the files that decide what an adapter computes, fetched once per host. `fetch`: writes them
    to a folder, such as `from_store`. The folder is held.

    Raises what `fetch` raises, and OSError where the disk has no room.
    """
    names = read_files(versions)
    key = hashlib.sha256(json.dumps([redacted_url(url), [[name, versions[name]] for name in names]]).encode())
    folder = copies.root / f"{url.rstrip('/').rpartition('/')[2]}-{key.hexdigest()[:16]}"

    def write() -> None:
        with temporary_folder(copies.root, ".fetch-") as scratch:
            fetch(scratch)
            copies.put(scratch, folder)

    if copies.hold([folder]):
        # Workers of this host need one copy.
        with file_lock(folder.with_name(f".{folder.name}.lock")):
            if copies.hold([folder]):
                copies.with_room(sum(_size(versions[name]) for name in names), write)
    return folder


def is_whole(folder: Path, versions: Versions) -> bool:
    """Whether a copy has all files that decide what the adapter computes, with their sizes."""
    with suppress(OSError):
        return all((folder / name).stat().st_size == _size(versions[name]) for name in read_files(versions))
    return False


def from_store(
    url: str, versions: Versions, storage_options: Mapping[str, Any], folder: Path, alike: Alike | None = None
) -> None:
    """Copy the files that decide what an adapter computes to `folder`. `alike`: that of the other adapters.

    Raises `StorageError` when they cannot be fetched, `AdapterRefusedError` when the store has other versions, and
    OSError where the disk has no room.
    """
    wanted = {name: versions[name] for name in read_files(versions)}
    _copy(url, wanted, storage_options, folder, alike or Alike())


def _copy(url: str, versions: Versions, storage_options: Mapping[str, Any], folder: Path, alike: Alike) -> None:
    """Copy these files of an adapter. The listing comes last: where it has the versions, so have the copies."""
    options = options_for(url, storage_options)
    try:
        fs, remote = open_store(url, options)

        def copy(name: str) -> Exception | None:
            try:
                if name in _READ_WHOLE and _size(versions[name]) <= _MOST_ALIKE_BYTES:
                    (folder / name).write_bytes(_whole(fs, f"{remote}/{name}", versions[name], alike))
                else:
                    copy_file(fs, f"{remote}/{name}", folder / name, _size(versions[name]))
            except Exception as error:
                return error
            return None

        with ThreadPoolExecutor(len(versions)) as threads:
            failed = [error for error in threads.map(copy, versions) if error is not None]
        now = _entries(fs, remote)
        changed = [name for name in versions if now.get(name) != versions[name]]
        if changed:
            raise AdapterRefusedError(
                f"{changed[0]}: has changed in {redacted_url(url)} since the job was opened, so it is not the adapter "
                "that was audited"
            )
        if failed:
            raise failed[0]
        if not is_whole(folder, versions):
            raise OSError(f"fewer bytes came than the {sum(map(_size, versions.values()))} that are listed")
    except AdapterRefusedError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageError(f"{redacted_url(url)!r}: {storage_reason(error, options, url)}") from None


def _entries(fs: Any, remote: str) -> Versions:
    """Versions of the files of one folder; none when it is gone."""
    fs.invalidate_cache(remote)
    try:
        return _versions(fs.ls(remote, detail=True))
    except FileNotFoundError:
        return {}


def _is_readable(versions: Mapping[str, str]) -> bool:
    read = read_files(versions)
    has_weights = not versions.keys().isdisjoint((WEIGHTS_NAME, MLX_NAME, INDEX_NAME))
    return has_weights and all(versions[name] for name in read)


def _listed(url: str, storage_options: Mapping[str, Any]) -> Versions:
    """Versions of the files of one folder; none when it cannot be listed."""
    with suppress(Exception):
        return _entries(*open_store(url, options_for(url, storage_options)))
    return {}


def _listed_below(url: str, storage_options: Mapping[str, Any]) -> dict[str, Versions] | None:
    """Versions of the files of each folder right below a folder; None when they cannot be listed."""
    with suppress(Exception):
        fs, remote = open_store(url, options_for(url, storage_options))
        fs.invalidate_cache(remote)
        found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for path, facts in fs.find(remote, detail=True).items():
            folder, _, rest = path.removeprefix(remote).lstrip("/").partition("/")
            if rest and "/" not in rest:
                found[folder].append(facts | {"name": path})
        return {folder: _versions(entries) for folder, entries in found.items()}
    return None


def _versions(entries: Sequence[Mapping[str, Any]]) -> Versions:
    named = {str(entry["name"]).rpartition("/")[2]: entry for entry in entries if entry["type"] == "file"}
    return {name: _version(entry) for name, entry in sorted(named.items()) if name not in ("", ".", "..")}


def _version(facts: Mapping[str, Any]) -> str:
    """Size and tag of a file, "" where the store names nothing that changes with the content."""
    size = int(facts.get("size") or 0)
    tag = str(facts.get("ETag") or facts.get("etag") or "").strip('"')
    if not _CONTENT_TAG.fullmatch(tag):
        tag = str(facts.get("md5Hash") or facts.get("content_md5") or "") or tag
    is_of_content = bool(_CONTENT_TAG.fullmatch(tag) or facts.get("md5Hash") or facts.get("content_md5"))
    if is_of_content:
        return f"{size} {tag}"
    times = [str(facts[key]) for key in _TIMES if facts.get(key)]
    return f"{size} at {' '.join([tag, *times])}" if tag or times else ""


def _is_of_content(version: str) -> bool:
    """Whether a version follows from the content: files elsewhere that have it are the same."""
    return bool(version) and " at " not in version


def _size(version: str) -> int:
    return int(version.partition(" ")[0])


def _whole(fs: Any, path: str, version: str, alike: Alike) -> bytes:
    """The content of a small file."""
    size = _size(version)
    return alike.read(version, lambda: bytes(fs.cat_file(path, start=0, end=size))) if size else b""


def _header(fs: Any, path: str, size: int, expected: int) -> bytes:
    """The first bytes of a safetensors file: its header, or less where it claims more than a file may have. `expected`:
    bytes that are asked for at first.
    """
    data = bytes(fs.cat_file(path, start=0, end=min(size, expected))) if size else b""
    length = 8 + int.from_bytes(data[:8], "little")
    if length > min(size, 8 + MAX_HEADER_BYTES):
        return data[:8]
    if length > len(data):
        data += fs.cat_file(path, start=len(data), end=length)
    return data[:length]
