"""Turns model and adapter URLs into local folders, fetched once per host; hashes a base model's content.

| given | becomes |
|---|---|
| local folder | itself |
| local or remote `.gguf` file | the model folder it converts to |
| fsspec URL of a folder | a copy in the cache, keyed by the names, sizes and versions of its files |
| `owner/name`, `owner/name@revision` | the hub's snapshot, through `huggingface_hub` |
| folder of a repository in a hub's cache | its snapshot, see `hub_snapshot` |
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from ...engine.errors import ModelFilesError
from ...engine.model_config.folder import READ, weight_files
from ...engine.models.gguf.converted import resolve_gguf
from ...system.local_cache import default_cache_root, file_lock, make_private, temporary_folder
from ...system.long_work import LongWork
from ...system.untrusted import read_regular
from ..errors import StorageError
from .limits import note_moved
from .location import options_for
from .redaction import redacted_url, storage_reason
from .stores import open_store
from .urls import hub_parts, is_hub_id

# Not fetched: pickles can run code when read, and nothing here reads those of models. Their names are kept as empty
# files, so that messages can say what the folder holds.
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
_VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "created", "md5Hash", "content_md5")
# Seconds before a copy reports its progress; most adapters take less and report nothing.
_QUIET_S = 1.0
#: Folder of a repository in a hub's cache.
HUB_REPOSITORY = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_MAX_REVISION_BYTES = 200
_MAX_LISTED = 5
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def is_on_this_machine(url: str) -> bool:
    """Whether the URL is a path that needs no fetching: an existing one, or one that cannot be a hub id."""
    return "://" not in url and not is_hub_id(url)


def is_remote(url: str) -> bool:
    """Whether the content behind a URL must be fetched before it can be read."""
    return "://" in url and not url.startswith("file://")


def local_folder(
    url: str, storage_options: Mapping[str, Any], cache_root: Path | None = None, *, pickles: Collection[str] = ()
) -> Path:
    """A local folder with the content behind `url`. `pickles`: names of pickled files that are fetched from folders
    without safetensors.

    Raises `StorageError` when there is no such folder or it cannot be fetched, and `EngineError` for a GGUF file that
    cannot be converted.
    """
    path = local_path(url, storage_options, cache_root, pickles=pickles)
    if path.is_file():
        return resolve_gguf(path, cache_root or default_cache_root())
    cached = sorted(match["owner"] + "/" + match["name"] for match in _repositories(path))
    if cached:
        shown = ", ".join(cached[:_MAX_LISTED]) + (", …" if len(cached) > _MAX_LISTED else "")
        raise StorageError(f"{redacted_url(url)!r}: a hub's cache. Name one of its models: {shown}.")
    return path


def _repositories(folder: Path) -> list[re.Match[str]]:
    """The repositories in the root of a hub's cache; none for every other folder."""
    return [match for path in folder.glob("models--*") if (match := HUB_REPOSITORY.fullmatch(path.name))]


def hub_snapshot(folder: Path) -> Path:
    """The snapshot of a repository's folder in a hub's cache: the one of `refs/main`, else the only one. Every other
    folder is its own. Raises `StorageError` where it is unclear which one is meant.
    """
    if HUB_REPOSITORY.fullmatch(folder.name) is None or not (folder / "snapshots").is_dir():
        return folder
    snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    with suppress(OSError, ValueError):
        revision = read_regular(folder / "refs" / "main", _MAX_REVISION_BYTES).decode().strip()
        snapshots = [path for path in snapshots if path.name == revision] or snapshots
    if len(snapshots) != 1:
        raise StorageError(
            f"{folder}: {len(snapshots)} snapshots, and refs/main names none of them. Give the one that is meant: "
            f"{folder}/snapshots/REVISION."
        )
    return snapshots[0]


def local_path(
    url: str, storage_options: Mapping[str, Any], cache_root: Path | None = None, *, pickles: Collection[str] = ()
) -> Path:
    """`local_folder` that leaves a GGUF file as it is: its path. Raises `StorageError` alone."""
    path = Path(url.removeprefix("file://"))
    if is_remote(url):
        path = _fetched(url, storage_options, cache_root or default_cache_root(), pickles)
    elif is_hub_id(url):
        path = _hub_snapshot(url, pickles)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        found = "a file" if path.exists() else "nothing"
        raise StorageError(f"{redacted_url(url)!r}: expected a folder, found {found} there. Check the path.")
    return hub_snapshot(path)


def _fetched(url: str, storage_options: Mapping[str, Any], root: Path, pickles: Collection[str]) -> Path:
    options = options_for(url, storage_options)
    try:
        fs, remote = open_store(url, options)
        fs.invalidate_cache(remote)
        is_file = _is_file(fs, remote)
        listing = {remote: fs.info(remote)} if is_file else fs.find(remote, detail=True)
        if not listing:
            raise FileNotFoundError(remote)
        name = remote.rstrip("/").rsplit("/", 1)[-1]
        wanted = _wanted_pickles(listing, pickles)
        folder = root / "fetched" / f"{name}-{_listing_key(fs.unstrip_protocol(remote), listing, wanted)}"
        if not folder.exists():
            # Workers of this host that start together need one copy.
            with file_lock(folder.with_name(f".{folder.name}.lock")):
                if not folder.exists():
                    sizes = {path: int(info.get("size") or 0) for path, info in listing.items()}
                    left = {path for path in sizes if path.endswith(_PICKLES)} - set(wanted)
                    _fetch(fs, remote.rsplit("/", 1)[0] if is_file else remote, sizes, left, folder, redacted_url(url))
    except Exception as error:
        raise StorageError(f"{redacted_url(url)!r}: {storage_reason(error, options, url)}") from None
    return folder / name if is_file else folder


def _is_file(fs: Any, path: str) -> bool:
    """Whether it is a file. A user who may only list what is below a folder may not ask for the folder itself."""
    try:
        return bool(fs.isfile(path))
    except PermissionError:
        return False


def _wanted_pickles(paths: Collection[str], names: Collection[str]) -> list[str]:
    """Paths of pickles of these names in folders that have no safetensors file."""
    safe = {path.rpartition("/")[0] for path in paths if path.endswith(".safetensors")}
    places = {path: path.rpartition("/") for path in paths}
    return sorted(path for path, (folder, _, name) in places.items() if name in names and folder not in safe)


def _listing_key(url: str, listing: Mapping[str, Mapping[str, Any]], pickles: list[str]) -> str:
    versions = [
        [path, info.get("size"), *(str(info[key]) for key in _VERSION_KEYS if key in info)]
        for path, info in sorted(listing.items())
    ]
    facts: list[Any] = [redacted_url(url), versions]
    return hashlib.sha256(json.dumps([*facts, pickles] if pickles else facts).encode()).hexdigest()[:16]


class _Copied(Callback):  # type: ignore[misc]
    """Notes the progress of one file's copy. Some stores report none before its end."""

    def __init__(self, work: LongWork) -> None:
        super().__init__()
        self._work, self._num_noted = work, 0

    def call(self, *_: Any, **__: Any) -> None:
        """Note the bytes since the last call; fsspec calls this after each change."""
        if self.value > self._num_noted:
            note_moved()
            self._work.add(self.value - self._num_noted)
            self._num_noted = self.value

    def end(self, num_bytes: int) -> None:
        """Note the rest of the file's size."""
        self.absolute_update(max(num_bytes, self.value))


def copy_file(fs: Any, path: str, target: Path, num_bytes: int) -> None:
    """Copy one file of a store of `num_bytes`, and report progress where that takes long. Raises what fsspec raises."""
    copied = _Copied(LongWork(f"copying {path}", num_bytes, quiet_s=_QUIET_S))
    fs.get_file(path, str(target), callback=copied)
    copied.end(num_bytes)


def _fetch(fs: Any, remote: str, files: Mapping[str, int], left: Collection[str], folder: Path, shown: str) -> None:
    """Copy into a temporary folder, then rename: the folder is whole or absent. `files`: path -> size in bytes.
    `left`: paths that are made empty files. `shown`: the URL for messages.
    """
    make_private(folder.parent)
    wanted = {file: size for file, size in files.items() if file not in left}
    work = LongWork(f"copying {shown}", sum(wanted.values()), quiet_s=_QUIET_S)
    with temporary_folder(folder.parent, ".fetch-") as scratch:
        for file in files:
            target = scratch / file.removeprefix(remote).lstrip("/")
            if not target.resolve().is_relative_to(scratch.resolve()):
                raise ValueError(f"{file!r} would be written outside its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            if file not in wanted:
                target.touch()
                continue
            copied = _Copied(work)
            fs.get_file(file, str(target), callback=copied)
            copied.end(wanted[file])
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was faster; its copy has the same key, hence the same content.
            if not folder.exists():
                raise


def _hub_snapshot(hub_id: str, pickles: Collection[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StorageError(
            f"{hub_id!r}: no such local folder. To take it from the hub: pip install huggingface_hub; or give the "
            "path of a folder."
        ) from None
    repository, _, revision = hub_parts(hub_id)
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES)))
        if pickles and not any(folder.glob("*.safetensors")):
            files = [*_HUB_FILES, *pickles, "*.gguf"]
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=files))
        return folder
    except Exception as error:
        why = " ".join(str(error).split())
        raise StorageError(
            f"{hub_id!r}: no such local folder, and the hub did not give it ({why}). Check the name, the revision, the "
            "network and HF_TOKEN, or give the path of a folder."
        ) from None


def model_sha256(
    folder: Path, *, with_weights: bool = True, use_remembered: bool = True, cache_root: Path | None = None
) -> str:
    """Hash of configuration, tokenizer and (`with_weights`) the safetensors files that are read. Of a file's path, only
    its name counts, so a copied folder is the same model.

    Weights are read once per host: digests are remembered by `file_key`. Without `use_remembered` every file is read,
    for file systems and clocks that are not trusted.
    """
    files = identity_files(folder, with_weights=with_weights)
    return sha256_of_files(
        (path.name, file_sha256(path, use_remembered=use_remembered, cache_root=cache_root)) for path in files
    )


def sha256_of_files(digests: Iterable[tuple[str, str]]) -> str:
    """Hash of a folder from the names and hashes of its files."""
    whole = hashlib.sha256()
    for name, digest in digests:
        whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()


def identity_files(folder: Path, *, with_weights: bool) -> list[Path]:
    """The existing files of a base model's folder that engines read, which decide its answers."""
    try:
        weights = weight_files(folder) if with_weights else []
    except ModelFilesError:
        weights = sorted(folder.glob("*.safetensors"))  # loading refuses them with a message
    return [path for path in (*(folder / name for name in READ), *weights) if path.exists()]


def file_sha256(path: Path, *, use_remembered: bool = True, cache_root: Path | None = None) -> str:
    """Hash of a file's content, remembered by `file_key`."""
    path = path.resolve()
    with path.open("rb") as file:
        return open_file_sha256(path, file, use_remembered=use_remembered, cache_root=cache_root)


def open_file_sha256(
    path: Path, file: BufferedReader, *, use_remembered: bool = True, cache_root: Path | None = None
) -> str:
    """Hash of an open file's content, even if its path leads to another file by now."""
    key = file_key(path, os.fstat(file.fileno()))
    remembered = _remembered(key, cache_root)
    if use_remembered and remembered.exists():
        return remembered.read_text()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if file_key(path, os.fstat(file.fileno())) == key:
        _remember(remembered, digest)
    return digest


def file_key(path: Path, facts: os.stat_result) -> str:
    """Key of a file's version: path, size, times of change and inode. One of the times, ctime, no program can set."""
    return f"{path} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"


def _remembered(key: str, cache_root: Path | None) -> Path:
    return (cache_root or default_cache_root()) / "digests" / hashlib.sha256(key.encode()).hexdigest()


def _remember(path: Path, text: str) -> None:
    """Write a remembered digest; a cache that cannot be written raises nothing and costs only time."""
    try:
        make_private(path.parent)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        return
