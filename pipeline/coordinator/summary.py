"""Counts the rows in a job's parts, to check that every row is there once, and for the numbers of its summary."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from ...jobs.errors import JobFailedError, MissingFileError
from ...jobs.input.columns import readable_values
from ...jobs.input.completions import completions
from ...jobs.opening.opened_job import ENGINE_ERROR
from ...jobs.parts import (
    ROW_ADAPTER,
    ROW_ID,
    answers_hash,
    counted_columns,
    curable,
    damage_of,
    in_words,
    mark_in,
)
from ...jobs.progress import AdapterCount
from ...jobs.record import JobRecord
from ...jobs.store import JobStore
from ...scheduler.estimates.lengths import AnswerLengths, length_class
from ..dataset.reader import ShardReader
from ..planning.plan import JobPlan
from ..result import KindOfError

_LISTS = ("completion", "completion_tokens", "finish_reason")


@dataclass(slots=True)
class Account:
    """Counts over some of a job's parts. Adapters are keyed by name, the base model by None."""

    #: Parts that were counted.
    num_parts: int = 0
    #: Rows of the counted parts; each completion of a row with several counts.
    num_rows: int = 0
    #: Rows without an answer.
    num_errors: int = 0
    #: Rows that earlier runs had done.
    num_reused: int = 0
    #: Rows that an engine gave up.
    num_engine_errors: int = 0
    #: Tokens of all prompts.
    prompt_tokens: int = 0
    #: Tokens of all completions.
    completion_tokens: int = 0
    #: Rows by adapter.
    rows: Counter[str | None] = field(default_factory=Counter)
    #: Rows without an answer by adapter.
    errors: Counter[str | None] = field(default_factory=Counter)
    #: Completion tokens by adapter.
    tokens: Counter[str | None] = field(default_factory=Counter)
    #: Answers by adapter, class of length, and whether `max_tokens` ended them.
    answers: Counter[tuple[str | None, int, bool]] = field(default_factory=Counter)
    #: Tokens of the answers, by the keys of `answers`.
    answer_tokens: Counter[tuple[str | None, int, bool]] = field(default_factory=Counter)
    #: Place and sentence of the first error of an engine; None without one.
    first_engine_error: tuple[str, str] | None = None
    #: Bytes, and hash of the contents, of each part that counts.
    parts: dict[int, tuple[int, str]] = field(default_factory=dict)
    #: Parts that do not count because they are not what their shards would be now, each with a clause that says why.
    unusable: dict[int, str] = field(default_factory=dict)
    #: Parts that do not count because they hold errors that another run may not have, each with a clause that says why.
    curable: dict[int, str] = field(default_factory=dict)

    def add(self, other: Account) -> None:
        """Add the counts of other parts to this account."""
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
        self.parts |= other.parts
        self.unusable |= other.unusable
        self.curable |= other.curable

    def check_complete(self, plan: JobPlan) -> None:
        """Raise `JobFailedError` unless every row of the plan was counted."""
        if self.unusable or (self.num_rows, self.num_parts) != (plan.num_rows, len(plan.shards)):
            found = in_words(self.unusable) or f"its {self.num_parts} parts hold {self.num_rows} rows"
            raise JobFailedError(
                f"output: {found}; the plan has {plan.num_rows} rows in {len(plan.shards)} parts. The output was "
                "changed while the job ran. Run the same command again: it computes what is missing."
            )

    def adapter_counts(self) -> tuple[AdapterCount, ...]:
        """Counts of each adapter, in order of the adapters' names."""
        names = sorted(self.rows, key=lambda name: name or "")
        return tuple(AdapterCount(name or "", self.rows[name], self.errors[name], self.tokens[name]) for name in names)

    def answer_lengths(self) -> dict[str | None, AnswerLengths]:
        """Lengths of the answers of each adapter that has answered a row, by its name."""
        groups: defaultdict[str | None, list[tuple[float, float, bool]]] = defaultdict(list)
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


def account_parts(
    shard_ids: Iterable[int], store: JobStore, record: JobRecord, run_id: str, reopens: bool = False
) -> Account:
    """Compare these parts with the plan and count the rows of those that are right. `run_id`: id of the run that
    counts. `reopens`: parts of earlier runs with curable errors are not counted but returned in `Account.curable`.

    Raises `StorageError` when storage fails.
    """
    total = Account()
    with closing(ShardReader(store, record)) as shards:
        for shard_id in shard_ids:
            total.add(_account_part(store, record, shard_id, shards.contents(shard_id), run_id, reopens))
    return total


def _account_part(
    store: JobStore, record: JobRecord, shard_id: int, expected: str, run_id: str, reopens: bool
) -> Account:
    """The account of one part. `expected`: hash of its contents that the part records if it is right."""
    columns = counted_columns(record)
    try:
        with store.open_part(shard_id) as part:
            num_bytes = part.seek(0, os.SEEK_END)
            mark = mark_in(part)
            problem = mark if isinstance(mark, str) else mark.problem(shard_id, record, expected)
            if isinstance(mark, str) or problem:
                return Account(unusable={shard_id: problem})
            if reopens and mark.run_id != run_id and (clause := curable(mark)):
                return Account(curable={shard_id: clause})
            table = pq.read_table(part, columns=list(columns.values()), page_checksum_verification=True)
    except MissingFileError:
        return Account(unusable={shard_id: "is gone"})
    except Exception as error:
        return Account(unusable={shard_id: damage_of(error)})
    values = {name: readable_values(table.column(column)) for name, column in columns.items()}
    if answers_hash(values) != mark.answers:
        return Account(unusable={shard_id: "has other answers than were written"})
    account = Account(num_parts=1, num_reused=mark.reused_by(run_id), parts={shard_id: (num_bytes, mark.contents)})
    for of_row in zip(*values.values(), strict=True):
        row = dict(zip(columns, of_row, strict=True))
        for each in completions(row, _LISTS) if record.has_lists else (row,):
            # The input may have an empty name, which is the base model too.
            _count(account, each, row.get(ROW_ADAPTER) or None, f"{columns[ROW_ID]}={row[ROW_ID]!r}")
    return account


def _count(account: Account, completion: Mapping[str, Any], name: str | None, place: str) -> None:
    error = completion["error"]
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
