"""Counts the rows in a job's parts, to check that every row is there once, and for the numbers of its summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from ...jobs.errors import JobFailedError
from ...jobs.input.columns import output_name, readable_values
from ...jobs.input.completions import completions
from ...jobs.record import JobRecord
from ...jobs.store import JobStore
from ...scheduler.estimates.lengths import AnswerLengths, length_class
from ..dataset.writer import check_writer, num_reused_rows
from ..planning.plan import JobPlan
from ..result import AdapterCount, KindOfError

ENGINE_ERROR = "engine"
_LISTS = ("completion_tokens", "finish_reason")
# Keys of a row beside lorabatch's own columns.
_ID, _ADAPTER = "row id", "row adapter"


@dataclass(slots=True)
class Account:
    """Counts over some parts; `add` joins two. Adapters are keyed by name, "" is the base model. `num_reused`: rows
    that earlier runs had done. `answers`, `answer_tokens`: by adapter, class of length, and whether `max_tokens` ended
    them.

    `engine_errors`: rows that an engine gave up; `first_engine_error` is (place, sentence) of the first.
    """

    num_parts: int = 0
    num_rows: int = 0
    num_errors: int = 0
    num_reused: int = 0
    num_engine_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    answers: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    answer_tokens: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    first_engine_error: tuple[str, str] | None = None

    def add(self, other: Account) -> None:
        """Take in the counts of other parts."""
        self.num_parts += other.num_parts
        self.num_rows += other.num_rows
        self.num_errors += other.num_errors
        self.num_reused += other.num_reused
        self.num_engine_errors += other.num_engine_errors
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.rows.update(other.rows)
        self.errors.update(other.errors)
        self.tokens.update(other.tokens)
        self.answers.update(other.answers)
        self.answer_tokens.update(other.answer_tokens)
        self.first_engine_error = self.first_engine_error or other.first_engine_error

    def check_complete(self, plan: JobPlan) -> None:
        """Raise `JobFailedError` unless every row of the plan was counted."""
        if (self.num_rows, self.num_parts) != (plan.num_rows, len(plan.shards)):
            raise JobFailedError(
                f"output: its {self.num_parts} parts hold {self.num_rows} rows; the plan has {plan.num_rows} rows in "
                f"{len(plan.shards)} parts. The output was changed meanwhile; start over with --overwrite."
            )

    def adapter_counts(self) -> tuple[AdapterCount, ...]:
        """Per adapter, by name."""
        return tuple(
            AdapterCount(name, self.rows[name], self.errors[name], self.tokens[name]) for name in sorted(self.rows)
        )

    def answer_lengths(self) -> dict[str, AnswerLengths]:
        """Of each adapter that has answered a row."""
        groups: defaultdict[str, list[tuple[float, float, bool]]] = defaultdict(list)
        for key, num_rows in self.answers.items():
            name, _, is_cut = key
            groups[name].append((num_rows, self.answer_tokens[key], is_cut))
        return {name: AnswerLengths.of(of_adapter) for name, of_adapter in groups.items()}

    def engine_error_kind(self) -> tuple[KindOfError, ...]:
        """The rows that engines gave up, as one kind of error; empty when there are none."""
        if self.first_engine_error is None:
            return ()
        place, sentence = self.first_engine_error
        return (KindOfError(ENGINE_ERROR, self.num_engine_errors, place, sentence),)


def account_parts(shard_ids: Iterable[int], store: JobStore, record: JobRecord, run_id: str) -> Account:
    """Count the rows of these parts. `run_id`: of the run that counts. Raises `StorageError` when one is gone or
    another job's.
    """
    total = Account()
    for shard_id in shard_ids:
        total.add(_account_part(store, record, shard_id, run_id))
    return total


def _account_part(store: JobStore, record: JobRecord, shard_id: int, run_id: str) -> Account:
    adapter_column = record.input.roles.get("adapter")
    id_column = record.input.roles.get("id", "id")
    ours = ("error", "mode", "prompt_tokens", "completion_tokens", "finish_reason")
    columns = {name: output_name(record, name) for name in ours} | {_ID: id_column}
    columns |= {_ADAPTER: adapter_column} if adapter_column else {}
    with store.open_part(shard_id) as part:
        file = pq.ParquetFile(part)
        table = file.read(columns=list(columns.values()))
        num_reused = num_reused_rows(file, run_id)
    check_writer(table.schema, shard_id, record)
    account = Account(num_parts=1, num_reused=num_reused)
    for values in zip(*(readable_values(table.column(name)) for name in columns.values()), strict=True):
        row = dict(zip(columns, values, strict=True))
        for each in completions(row, _LISTS) if record.has_lists else (row,):
            _count(account, each, row.get(_ADAPTER), f"{id_column}={row[_ID]!r}")
    return account


def _count(account: Account, completion: Mapping[str, Any], adapter: str | None, place: str) -> None:
    name, error = adapter or "", completion["error"]
    account.num_rows += 1
    account.rows[name] += 1
    account.tokens[name] += completion["completion_tokens"]
    account.prompt_tokens += completion["prompt_tokens"]
    account.completion_tokens += completion["completion_tokens"]
    if error is None:
        key = (name, length_class(completion["completion_tokens"]), completion["finish_reason"] == "length")
        account.answers[key] += 1
        account.answer_tokens[key] += completion["completion_tokens"]
        return
    account.errors[name] += 1
    account.num_errors += 1
    if completion["mode"] is not None:
        account.num_engine_errors += 1
        account.first_engine_error = account.first_engine_error or (place, error)
