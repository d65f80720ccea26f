"""Finds the adapters that a folder, glob, hub id or hub cache stands for, and the latest checkpoint of a training run.

| given | adapters |
|---|---|
| `FOLDER` | itself if it is an adapter, else one for each folder or `.gguf` file right below it, by its name |
| `runs/*/checkpoint-*` | one for each folder that matches, by the parts that wildcards stand for: `a-checkpoint-500` |
| `RUN/latest`, also at the end of a glob | the checkpoint of the largest number, by the name of the run |
| `ORG/NAME`, `ORG/NAME@REVISION` | the hub's, as `NAME` |
| a hub's cache | one for each repository with an adapter, as `NAME`, or `ORG--NAME` where two have one name |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...engine.peft.folder import CONFIG_NAME, GGUF_SUFFIX, PICKLE_NAMES, is_adapter
from ..errors import JobRequestError, StorageError
from ..storage.local_copy import HUB_REPOSITORY, local_path
from ..storage.location import Location
from ..storage.redaction import redacted_url
from ..storage.urls import LATEST, absolute, has_wildcard, hub_parts, is_hub_id

_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
_HIDDEN = ("_", ".")


def adapters_at(url: str, storage_options: Mapping[str, Any]) -> dict[str, str]:
    """Name -> folder or URL of each adapter that `url` stands for. Raises `JobRequestError`."""
    url = url if is_hub_id(url) else absolute(url)
    try:
        if _is_glob(url):
            return _matching(url, storage_options)
        if is_hub_id(url):
            local_path(url, storage_options, pickles=PICKLE_NAMES)
            return {hub_parts(url)[1]: url}
        run = _run_of(url, storage_options)
        if run is not None:
            return {run.rpartition("/")[2]: latest_checkpoint(url, storage_options)}
        return _below(Location(url, storage_options))
    except StorageError as error:
        raise JobRequestError(f"adapters={redacted_url(url)!r}: {error}") from None


def stands_for_adapters(url: str, storage_options: Mapping[str, Any]) -> bool:
    """Whether `url` is of a kind that only `adapters_at` resolves: anything but a folder's own path or URL."""
    if _is_glob(url) or is_hub_id(url) or _run_of(url, storage_options) is not None:
        return True
    path = Path(url)
    return (
        "://" not in url and path.is_dir() and bool(_in_hub_cache(path, dict.fromkeys(p.name for p in path.iterdir())))
    )


def latest_checkpoint(url: str, storage_options: Mapping[str, Any]) -> str:
    """The URL of the checkpoint of the largest number for `RUN/latest`, unless there is a folder of that name; every
    other URL as it is. Raises `JobRequestError` where a run has no checkpoint.
    """
    run = _run_of(url, storage_options)
    if run is None:
        return url
    folders = [name for name, size in Location(run, storage_options).list().items() if size is None]
    numbers = {int(match[1]): name for name in folders if (match := _CHECKPOINT.fullmatch(name))}
    if not numbers:
        raise JobRequestError(
            f"adapters={redacted_url(url)!r}: no checkpoint in {redacted_url(run)}. Expected folders checkpoint-NUMBER "
            "there, of which the largest number is the latest."
        )
    return f"{run}/{numbers[max(numbers)]}"


def _run_of(url: str, storage_options: Mapping[str, Any]) -> str | None:
    """The folder of the training run of which `url` names the latest checkpoint, or None."""
    run, _, name = url.rstrip("/").rpartition("/")
    if name != LATEST or not run or LATEST in Location(run, storage_options).list():
        return None
    return run


def _is_glob(url: str) -> bool:
    is_local = "://" not in url
    has_signs = has_wildcard(url) and not url.startswith(("http://", "https://"))
    return has_signs and not (is_local and Path(url).exists())


def _matching(url: str, storage_options: Mapping[str, Any]) -> dict[str, str]:
    parts = url.rstrip("/").split("/")
    fixed = next(i for i, part in enumerate(parts) if has_wildcard(part))
    root, segments = "/".join(parts[:fixed]), parts[fixed:]
    is_latest = segments[-1] == LATEST and len(segments) > 1
    found: dict[str, str] = {}
    for path, matched in _walk(Location(root or "/", storage_options), "", segments[:-1] if is_latest else segments):
        target = f"{root}/{path}"
        if is_latest:
            target = latest_checkpoint(f"{target}/{LATEST}", storage_options)
        name = "-".join(matched).removesuffix(GGUF_SUFFIX)
        if found.setdefault(name, target) != target:
            raise JobRequestError(
                f"adapters={redacted_url(url)!r}: {redacted_url(found[name])} and {redacted_url(target)} would both be "
                f"{name!r}. Name them: --adapters NAME=URL."
            )
    if not found:
        raise JobRequestError(
            f"adapters={redacted_url(url)!r}: no folder matches. Give a folder of adapters, or a glob that finds some."
        )
    return found


def _walk(place: Location, folder: str, segments: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Folders (and adapters in GGUF) that match, each with the parts that wildcards stand for."""
    first, rest = segments[0], segments[1:]
    entries = place.list(folder)
    if first == "**":
        if rest:
            yield from _walk(place, folder, rest)
        for name, size in sorted(entries.items()):
            if size is None and not name.startswith(_HIDDEN):
                path = f"{folder}/{name}".lstrip("/")
                if not rest:
                    yield path, (name,)
                for below, matched in _walk(place, path, segments):
                    yield below, (name, *matched)
        return
    is_pattern = has_wildcard(first)
    for name, size in sorted(entries.items()):
        if not (fnmatchcase(name, first) if is_pattern else name == first):
            continue
        if is_pattern and name.startswith(_HIDDEN) and not first.startswith(_HIDDEN):
            continue
        path, own = f"{folder}/{name}".lstrip("/"), (name,) if is_pattern else ()
        if not rest:
            if size is None or name.endswith(GGUF_SUFFIX):
                yield path, own
        elif size is None:
            for below, matched in _walk(place, path, rest):
                yield below, (*own, *matched)


def _below(folder: Location) -> dict[str, str]:
    """The adapter in a folder, or those right below it."""
    entries, shown = folder.list(), redacted_url(folder.url)
    if folder.is_local:
        cached = _in_hub_cache(Path(folder.path()), entries)
        if cached:
            return cached
    if CONFIG_NAME in entries:
        return {folder.url.rstrip("/").rpartition("/")[2]: folder.url}
    found = {
        name.removesuffix(GGUF_SUFFIX) if size is not None else name: f"{folder.url}/{name}"
        for name, size in entries.items()
        if not name.startswith(_HIDDEN) and (size is None or name.endswith(GGUF_SUFFIX))
    }
    if not found:
        raise JobRequestError(
            f"adapters={shown!r}: no adapter folders there. Expected one folder per adapter, each with "
            f"{CONFIG_NAME} and adapter_model.safetensors."
        )
    return found


def _in_hub_cache(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Adapters of a hub's cache, or of one repository of it; empty for every other folder."""
    match = HUB_REPOSITORY.fullmatch(folder.name)
    if match and "snapshots" in names:
        return {match["name"]: str(folder)}
    repositories = [match for name in sorted(names) if (match := HUB_REPOSITORY.fullmatch(name))]
    # A cache has base models, too.
    adapters = [match for match in repositories if any(map(is_adapter, (folder / match.string).glob("snapshots/*")))]
    if repositories and not adapters:
        raise JobRequestError(f"adapters={str(folder)!r}: a hub's cache, and none of its repositories is an adapter.")
    owners = Counter(match["name"] for match in adapters)
    return {
        match["name"] if owners[match["name"]] == 1 else f"{match['owner']}--{match['name']}": str(
            folder / match.string
        )
        for match in adapters
    }
