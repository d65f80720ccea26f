"""What a user should know of a job and did not ask: about its adapters, its files, and rows that name no adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from ...engine.peft.findings import Verdict
from ..record import JobRecord, adapter_problem

_NAMES_SHOWN = 8


def job_notes(record: JobRecord) -> list[str]:
    """What is known before a row is read: how many adapters have which verdict, which are refused and why, which have
    a tokenizer or chat template of their own, and which files are left unread.
    """
    adapters, unread = record.adapters, record.input.unread
    notes = []
    if adapters:
        counts = {verdict: sum(adapter.verdict == verdict for adapter in adapters) for verdict in get_args(Verdict)}
        notes.append(f"{len(adapters)} adapters: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n))
    notes += [f"  {adapter_problem(a.name, {a.name: a})}" for a in adapters if a.is_refused]
    own = [adapter.name for adapter in adapters if adapter.tokenizer_sha256 and not adapter.is_refused]
    if own:
        notes.append(f"  with their own tokenizer or chat template: {_shown(own)}")
    if unread:
        files = "1 file is" if len(unread) == 1 else f"{len(unread)} files are"
        notes.append(f"input: {files} not read, only Parquet is: {_shown(unread)}")
    other = {name: value for name, value in record.model.generation.items() if record.spec.get(name) != value}
    if other:
        theirs = ", ".join(f"{name} {value:g}" for name, value in other.items())
        ours = ", ".join(f"{name} {record.spec[name]:g}" for name in other if name in record.spec)
        notes.append(
            f"model: its generation_config.json has {theirs}; this job has {ours}. --generation-config takes what the "
            "model has"
        )
    return notes


def messages_note(record: JobRecord) -> tuple[str, ...]:
    """Which chat template renders messages, if not the model's, and what becomes of special tokens inside of them; for
    a job that has messages.
    """
    if "messages" not in record.input.roles:
        return ()
    notes = []
    if record.spec.get("chat_template"):
        own = [adapter.name for adapter in record.adapters if adapter.tokenizer_sha256 and not adapter.is_refused]
        also = f" and of those that adapters have: {_shown(own)}" if own else ""
        notes.append(f"messages: rendered by the job's chat template, instead of the model's{also}")
    if record.spec.get("allow_special_tokens"):
        notes.append("messages: special tokens inside of them are control tokens (allow_special_tokens)")
    else:
        notes.append(
            "messages: special tokens inside of them are text; --allow-special-tokens makes them control tokens"
        )
    return tuple(notes)


def row_notes(record: JobRecord, rows_per_adapter: Mapping[str, int]) -> tuple[str, ...]:
    """What the index has found: that no row names an adapter, or which adapters no row names.

    `rows_per_adapter`: as the rows name them; "" counts those that name none.
    """
    names = [adapter.name for adapter in record.adapters]
    unused = [name for name in names if not rows_per_adapter.get(name)]
    num_rows, column = sum(rows_per_adapter.values()), record.input.roles.get("adapter")
    if column is not None and num_rows and num_rows == rows_per_adapter.get(""):
        given = f", none of the {len(names)} adapters does" if len(names) > 1 else ", its adapter does not"
        return (
            f"column {column!r} (adapter): null or empty in all {num_rows:,} rows; the base model answers them"
            + (given if names else ""),
        )
    if unused and num_rows:
        verb = "is" if len(unused) == 1 else "are"
        return (f"{len(unused)} of {len(names)} adapters {verb} named by no row: {_shown(unused)}",)
    return ()


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
