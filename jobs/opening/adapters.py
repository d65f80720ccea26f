"""Finds the adapters of a job and audits them; names come from folders or from `NAME=URL`.

`audit_all` audits for a job's record, by headers alone where workers will read the values; `audit_folders` audits for
the command `audit`. `as_before` compares a record's adapters with those of the job that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.config import read_model_config
from ...engine.errors import AdapterRefusedError
from ...engine.model_config.model import ModelConfig
from ...engine.peft import find_adapter_folders
from ...engine.peft.audit import AdapterAudit
from ...engine.peft.findings import reason
from ...engine.peft.folder import GGUF_SUFFIX, PICKLE_NAMES, is_adapter
from ...system.local_cache import temporary_folder
from ..errors import JobRequestError, StorageError
from ..record import AdapterRecord, JobRecord, is_version_id, version_id
from ..storage.adapter_copy import adapter_folder
from ..storage.adapter_files import (
    REQUESTS_AT_ONCE,
    Alike,
    Versions,
    depends_on_place,
    read_files,
    read_headers,
    versions_at,
)
from ..storage.local_copy import local_folder, local_path
from ..storage.redaction import redacted_url
from ..store import JobStore
from .adapter_urls import adapters_at, latest_checkpoint, stands_for_adapters
from .confined_audit import MAX_PROCESSES, Auditors

_MAX_NAME_CHARS = 256


def find_adapters(adapters: str | Mapping[str, str] | None, storage_options: Mapping[str, Any]) -> dict[str, str]:
    """Name -> folder or URL, sorted by name. `adapters`: what `adapters_at` describes, or URLs by name.

    Raises `JobRequestError` with every problem.
    """
    if adapters is None:
        return {}
    problems: list[str] = []
    if isinstance(adapters, str):
        found = adapters_at(adapters, storage_options)
    else:
        found = {}
        for name, url in adapters.items():
            try:
                found[name] = latest_checkpoint(url, storage_options)
            except JobRequestError as error:
                problems += error.problems
    problems += [problem for name in found if (problem := _name_problem(name)) is not None]
    problems += [
        f"adapters: {name}={redacted_url(url)}: carries a password or a signature, which is never recorded, and "
        "workers fetch adapters as recorded. Put what opens it into --storage-options."
        for name, url in found.items()
        if redacted_url(url) != url
    ]
    if problems:
        raise JobRequestError(*problems)
    return dict(sorted(found.items()))


def audit_all(
    adapters: Mapping[str, str],
    model_folder: Path,
    model: ModelConfig,
    storage_options: Mapping[str, Any],
    base_name: str = "",
    *,
    reads_all: bool = False,
) -> tuple[AdapterRecord, ...]:
    """Audit every adapter, several at a time. One that cannot be fetched is refused, like one that is damaged.
    `base_name`: see `Auditors`. `reads_all`: whether values are read here also of adapters whose store tells versions.

    Raises `NoProcessError` when the machine cannot start the processes in which adapters are read.
    """
    versions = {} if reads_all else versions_at(adapters.values(), storage_options)
    with (
        ThreadPoolExecutor(REQUESTS_AT_ONCE if versions else MAX_PROCESSES) as threads,
        Auditors(model_folder, model, base_name) as auditors,
    ):
        auditing = _Auditing(auditors, model, storage_options, versions)
        return tuple(threads.map(auditing.record, adapters.items()))


def as_before(
    adapters: Sequence[AdapterRecord], before: JobRecord, store: JobStore, read: Callable[[str, str], AdapterRecord]
) -> tuple[AdapterRecord, ...]:
    """The adapters of a record, with the identities that they have in the job of `store` where their content is the
    same. `read`: audits an adapter of a name and URL with all its values, which is needed where its versions are not
    those of `before`.
    """
    known = {adapter.name: adapter for adapter in before.adapters if not adapter.is_refused}
    with ThreadPoolExecutor(MAX_PROCESSES) as threads:

        def found(adapter: AdapterRecord) -> AdapterRecord:
            earlier = known.get(adapter.name)
            if earlier is None or adapter.is_refused or adapter.sha256 == earlier.sha256:
                return adapter
            if adapter.files and adapter.files == earlier.files and adapter.url == earlier.url:
                return adapter.model_copy(update={"sha256": earlier.sha256})
            content = store.content_of(earlier.sha256)
            if content is None:
                return adapter
            if is_version_id(adapter.sha256):
                whole = read(adapter.name, adapter.url)
                adapter = whole if whole.is_refused else adapter.model_copy(update={"sha256": whole.sha256})
            return adapter.model_copy(update={"sha256": earlier.sha256}) if adapter.sha256 == content else adapter

        return tuple(threads.map(found, adapters))


def audit_folders(
    urls: Sequence[str], model: str, storage_options: Mapping[str, Any], *, check_values: bool
) -> list[AdapterAudit]:
    """Audit each folder that is an adapter, and each adapter right below a folder that is none. `urls`: URLs or paths.

    Raises `JobRequestError` naming the folders in which no adapter was found, `StorageError` for what cannot be
    fetched, and what `read_model_config` raises.
    """
    model_folder = local_folder(model, storage_options)
    config = read_model_config(model_folder)
    found: dict[str, str | Path] = {}
    empty = []
    for url in urls:
        if stands_for_adapters(url, storage_options):
            found |= adapters_at(url, storage_options)
            continue
        folder = local_path(url, storage_options, pickles=PICKLE_NAMES) if "://" in url else Path(url)
        if folder.is_file() and folder.suffix == GGUF_SUFFIX:
            found[folder.stem if folder.stem not in found else str(folder)] = folder
            continue
        if not folder.is_dir():
            empty.append(f"{folder}: not a folder. Check the path.")
            continue
        # a fetched folder has another name in the cache
        name = url.rstrip("/").rsplit("/", 1)[-1] if "://" in url else folder.name
        adapters = {name: folder} if is_adapter(folder) else find_adapter_folders(folder)
        if not adapters:
            empty.append(
                f"{folder}: neither an adapter (adapter_config.json) nor a folder of adapters. Check the path."
            )
        for name, path in adapters.items():
            found[name if name not in found else str(path)] = path
    if empty:
        raise JobRequestError(*empty)
    with ThreadPoolExecutor(MAX_PROCESSES) as threads, Auditors(model_folder, config, model) as auditors:

        def audit(item: tuple[str, str | Path]) -> AdapterAudit:
            name, path = item
            try:
                return auditors.audit(name, adapter_folder(str(path), storage_options), check_values=check_values)
            except (StorageError, AdapterRefusedError) as error:
                return AdapterAudit(name, Path(path), "refused", (reason(name, str(error)),), (), None)

        return list(threads.map(audit, found.items()))


def _name_problem(name: str) -> str | None:
    """Why a name cannot be an adapter's, or None. Names appear in rows, records and reports and are never made into
    paths; a name that is a path is a mistake, or an attempt to read elsewhere.
    """
    is_path = name in (".", "..") or any(sign in name for sign in "/\\")
    if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable() or is_path:
        return (
            f"adapters: name {name[:_MAX_NAME_CHARS]!r}: expected 1 to {_MAX_NAME_CHARS} printable characters without "
            "slashes. Give it another name: --adapters NAME=URL."
        )
    return None


@dataclass(frozen=True, slots=True)
class _Auditing:
    """Audits adapters for a job's record; fields are the arguments of `audit_all`."""

    #: Processes that audit.
    auditors: Auditors
    #: Configuration of the base model.
    model: ModelConfig
    #: Options of the stores of adapters.
    storage_options: Mapping[str, Any]
    #: URL -> versions of the files of adapters that are audited by their headers.
    versions: Mapping[str, Versions]
    #: Facts that the adapters have in common.
    alike: Alike = field(default_factory=Alike)

    def record(self, item: tuple[str, str]) -> AdapterRecord:
        """The record of the adapter of a name and a URL."""
        name, url = item
        versions = self.versions.get(url)
        try:
            if versions is not None:
                return self._by_headers(name, url, versions)
            found = self.auditors.audit(name, adapter_folder(url, self.storage_options), is_brief=True)
        except StorageError as error:
            return AdapterRecord(name=name, url=redacted_url(url), verdict="refused", reasons=(str(error),))
        except AdapterRefusedError as error:
            reasons = (reason(name, str(error)),)
            return AdapterRecord(name=name, url=redacted_url(url), verdict="refused", reasons=reasons)
        return self._of(name, url, found, found.identity_sha256 or "")

    def _by_headers(self, name: str, url: str, versions: Versions) -> AdapterRecord:
        """The record of an adapter of which the workers will read the values."""
        with temporary_folder(prefix="adapter-") as folder:
            digest = read_headers(url, versions, self.storage_options, folder, self.alike)
            found = self.auditors.audit(name, folder, check_values=False, is_brief=True)
        read = {each: versions[each] for each in read_files(versions)}
        place = redacted_url(url) if depends_on_place(read) else ""
        own = [found.tokenizer_sha256, found.labels, found.problem_type]
        identity = "" if found.verdict == "refused" else version_id([place, read, digest, own])
        return self._of(name, url, found, identity).model_copy(update={"files": read})

    def _of(self, name: str, url: str, found: AdapterAudit, identity: str) -> AdapterRecord:
        return AdapterRecord(
            name=name,
            url=redacted_url(url),
            verdict=found.verdict,
            reasons=found.reasons,
            sha256=identity,
            rank=found.max_rank,
            weight_bytes=found.weight_bytes,
            tokenizer_sha256=found.tokenizer_sha256,
            missing_header=found.missing_header,
            vocab_size=found.vocab_size if found.vocab_size != self.model.vocab_size else 0,
            task=found.task,
            labels=found.labels,
            problem_type=found.problem_type,
            num_tower_tensors=found.num_tower_tensors,
        )
