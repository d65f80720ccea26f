"""Audits of adapter folders for people: find them, audit them, print a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.adapter import AdapterAudit, audit_adapters, find_adapters
from ..engine.adapter.report import AUDIT_COLUMNS, audit_rows
from ..engine.config import read_model_config
from ..jobs.errors import JobRequestError
from ..jobs.local_copy import local_folder
from ..jobs.record import AdapterRecord, adapter_problem

_NAMES_SHOWN = 8
_STYLES = {"exact": "green", "exact-by-merge": "yellow", "refused": "red"}


def audit_folders(
    urls: Sequence[str], model: str, storage_options: Mapping[str, Any], *, check_values: bool
) -> list[AdapterAudit]:
    """Audit each folder that is an adapter, and each adapter right below a folder that is none. `urls`: or paths.

    Raises `JobRequestError` naming the folders in which no adapter was found, `StorageError` for what cannot be
    fetched, and what `read_model_config` raises.
    """
    config = read_model_config(local_folder(model, storage_options))
    found: dict[str, Path] = {}
    empty = []
    for url in urls:
        folder = local_folder(url, storage_options) if "://" in url else Path(url)
        if not folder.is_dir():
            empty.append(f"{folder}: not a folder. Check the path.")
            continue
        # what is fetched lies in the cache under another name
        name = url.rstrip("/").rsplit("/", 1)[-1] if "://" in url else folder.name
        adapters = {name: folder} if (folder / "adapter_config.json").exists() else find_adapters(folder)
        if not adapters:
            empty.append(
                f"{folder}: neither an adapter (adapter_config.json) nor a folder of adapters. Check the path."
            )
        for name, path in adapters.items():
            found[name if name not in found else str(path)] = path
    if empty:
        raise JobRequestError(*empty)
    return list(audit_adapters(found, config, check_values=check_values))


def adapter_notes(adapters: Sequence[AdapterRecord]) -> list[str]:
    """What a user should know of a job's adapters before it runs: how many of each verdict, which are refused and
    why, which bring a tokenizer or chat template."""
    if not adapters:
        return []
    counts = {verdict: sum(adapter.verdict == verdict for adapter in adapters) for verdict in _STYLES}
    notes = [f"{len(adapters)} adapters: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)]
    notes += [f"  {adapter_problem(a.name, {a.name: a})}" for a in adapters if a.is_refused]
    own = [adapter.name for adapter in adapters if adapter.tokenizer_sha256 and not adapter.is_refused]
    if own:
        shown = ", ".join(own[:_NAMES_SHOWN]) + (", …" if len(own) > _NAMES_SHOWN else "")
        notes.append(f"  with their own tokenizer or chat template: {shown}")
    return notes


def print_audits(audits: Sequence[AdapterAudit], console: Console | None = None) -> None:
    """One line per adapter, verdicts in colour, and how many there are of each."""
    table = Table()
    for column in AUDIT_COLUMNS:
        table.add_column(column, overflow="fold")
    for row in audit_rows(audits):
        verdict = row[1]
        table.add_row(row[0], f"[{_STYLES[verdict]}]{verdict}[/]", *row[2:])
    counts = {verdict: sum(audit.verdict == verdict for audit in audits) for verdict in _STYLES}
    console = console or Console()
    console.print(table)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), highlight=False)
