"""Counts the rows in a job's parts, to check that every row is there once, and for the numbers of its summary."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...jobs.errors import DamagedRecordError, JobFailedError, MissingFileError
from ...jobs.input.columns import RIGHT_SCORE_FIELD, readable_values, right_column
from ...jobs.input.completions import completions
from ...jobs.opening.opened_job import ENGINE_ERROR
from ...jobs.options.stages import stages_of
from ...jobs.outcome import EXAMPLE_CHARACTERS, NUM_EXAMPLES, AdapterOutcome, KindOfError
from ...jobs.parts import (
    ROW_ADAPTER,
    ROW_ID,
    PartMark,
    answers_hash,
    counted_columns,
    curable,
    damage_of,
    in_words,
    mark_in,
)
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from ...jobs.store import JobStore
from ...scheduler.estimates.lengths import AnswerLengths, length_class
from ...scheduler.forecast import row_seconds
from ...scheduler.workload import BASE_MODEL, Workload
from ...system.untrusted import shortened
from ..dataset.index import prompt_ends
from ..dataset.reader import ShardReader
from ..dataset.row_checks import ErrorKind
from ..dataset.staged_writer import counted_requests
from ..planning import prediction
from ..planning.plan import JobPlan, serving_adapters
from ..planning.settings import RunSettings
from ..planning.validation import ADAPTER_ERROR
from .scores import ScoreTally, score_outcomes

_LISTS = ("completion", "completion_tokens", "finish_reason", RIGHT_SCORE_FIELD.name)
# Columns of the index that are counted beside the parts' own.
_NUMBERS = ("max_tokens", "shared_tokens", "error_kind", "is_drawn", "is_scored", "fixed_tokens", "task")
# Sentences of a kind of error by which the plan's kinds are recognised.
_MOST_SENTENCES = 100
# Adapters whose examples a summary has.
_MOST_WITH_EXAMPLES = 100


@dataclass(slots=True)
class _Tally:
    """Counts of one adapter's rows in some parts."""

    #: Rows, each completion of a row with several.
    num_rows: int = 0
    #: Rows without an answer.
    num_errors: int = 0
    #: Tokens of the prompts.
    prompt_tokens: int = 0
    #: Tokens of the completions.
    completion_tokens: int = 0
    #: Rows by finish reason.
    reasons: Counter[str] = field(default_factory=Counter)
    #: Error rows by kind.
    kinds: Counter[str] = field(default_factory=Counter)
    #: Answers that `max_tokens` cut off, by their tokens; of many numbers only the least and the most.
    cut: Counter[int] = field(default_factory=Counter)
    #: Answers by task, length class and whether they were cut.
    answers: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    #: Tokens of the answers, by the keys of `answers`.
    answer_tokens: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    #: Tokens of the shortest and of the longest answer; None without any.
    bounds: tuple[int, int] | None = None
    #: Seconds of one engine by the cost model.
    engine_s: float = 0.0
    #: Shard, place in it and example of the first answers.
    examples: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    #: Scores of the answers, in a job that says what is right.
    scores: ScoreTally = field(default_factory=ScoreTally)

    def add(self, other: _Tally) -> None:
        self.scores.add(other.scores)
        for name in ("num_rows", "num_errors", "prompt_tokens", "completion_tokens", "engine_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("reasons", "kinds", "answers", "answer_tokens"):
            getattr(self, name).update(getattr(other, name))
        # Only the least and the most of many limits are shown.
        cut = self.cut + other.cut
        self.cut = cut if len(cut) <= 2 else Counter({min(cut): 1, max(cut): cut.total() - 1})
        bounds = [bounds for bounds in (self.bounds, other.bounds) if bounds]
        self.bounds = (min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else None
        self.examples = sorted([*self.examples, *other.examples], key=lambda one: one[:2])[:NUM_EXAMPLES]

    def lengths(self) -> dict[str, float]:
        """Tokens of an answer, as `AdapterOutcome.answer_tokens`."""
        by_class: Counter[int] = Counter()
        tokens: Counter[int] = Counter()
        for key, num_rows in self.answers.items():
            by_class[key[1]] += num_rows
            tokens[key[1]] += self.answer_tokens[key]
        if self.bounds is None:
            return {}
        ends = dict(zip(sorted(by_class), accumulate(by_class[number] for number in sorted(by_class)), strict=True))

        def at(share: float) -> float:
            number = next(number for number, end in ends.items() if end >= share * by_class.total())
            return round(tokens[number] / by_class[number], 1)

        mean = round(tokens.total() / by_class.total(), 1)
        shortest, longest = self.bounds
        return {"shortest": shortest, "mean": mean, "median": at(0.5), "p95": at(0.95), "longest": longest}


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
    #: Tokens of all prompts.
    prompt_tokens: int = 0
    #: Tokens of all completions.
    completion_tokens: int = 0
    #: Counts of each adapter's rows, by its name.
    adapters: dict[str | None, _Tally] = field(default_factory=dict)
    #: Kind of error -> place and sentence of the first row that was counted.
    first_errors: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Kind of error -> some of the sentences of its rows.
    sentences: dict[str, set[str]] = field(default_factory=dict)
    #: Whether the index of all counted parts was read: seconds, tasks and kinds of errors are known.
    has_numbers: bool = True
    #: Name of each stage -> its requests, their errors, and their tokens; empty for a job without stages.
    stages: dict[str, Counter[str]] = field(default_factory=dict)
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
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        for name, tally in other.adapters.items():
            self.adapters.setdefault(name, _Tally()).add(tally)
        self.first_errors = other.first_errors | self.first_errors
        for kind, sentences in other.sentences.items():
            self._add_sentences(kind, sentences)
        for name, counts in other.stages.items():
            self.stages.setdefault(name, Counter()).update(counts)
        self.has_numbers &= other.has_numbers
        self.parts |= other.parts
        self.unusable |= other.unusable
        self.curable |= other.curable

    def _add_sentences(self, kind: str, sentences: Iterable[str]) -> None:
        found = self.sentences.setdefault(kind, set())
        found.update(sentence for sentence in sentences if len(found) < _MOST_SENTENCES)

    def check_complete(self, plan: JobPlan) -> None:
        """Raise `JobFailedError` unless every row of the plan was counted."""
        if self.unusable or (self.num_rows, self.num_parts) != (plan.num_rows, len(plan.shards)):
            found = in_words(self.unusable) or f"its {self.num_parts} parts hold {self.num_rows} rows"
            raise JobFailedError(
                f"output: {found}; the plan has {plan.num_rows} rows in {len(plan.shards)} parts. The output was "
                "changed while the job ran. Run the same command again: it computes what is missing."
            )

    def adapter_outcomes(self, working_s: float | None = None) -> tuple[AdapterOutcome, ...]:
        """Counts of each adapter, in order of the adapters' names. `working_s`: seconds in which all rows were
        answered; None when they are not known, or when rows were done before.
        """
        by_rows = sorted(self.adapters, key=lambda name: (-self.adapters[name].num_rows, name or ""))
        with_examples = set(by_rows[:_MOST_WITH_EXAMPLES])
        scores = score_outcomes({name: tally.scores for name, tally in self.adapters.items()})
        return tuple(
            AdapterOutcome(
                adapter=name or "",
                num_rows=tally.num_rows,
                num_errors=tally.num_errors,
                completion_tokens=tally.completion_tokens,
                prompt_tokens=tally.prompt_tokens,
                finish_reasons=dict(sorted(tally.reasons.items())),
                answer_tokens=tally.lengths(),
                num_cut=tally.cut.total(),
                cut_at=(min(tally.cut), max(tally.cut)) if tally.cut else None,
                errors=dict(sorted(tally.kinds.items())),
                examples=tuple(example for *_, example in tally.examples) if name in with_examples else (),
                engine_s=round(tally.engine_s, 6) if self.has_numbers else None,
                rows_per_s=tally.num_rows / working_s if working_s else None,
                prompt_tokens_per_s=tally.prompt_tokens / working_s if working_s else None,
                score=scores.get(name),
            )
            for name, tally in sorted(self.adapters.items(), key=lambda one: one[0] or "")
        )

    def answer_lengths(self) -> dict[tuple[str | None, int], AnswerLengths]:
        """Lengths of the answers of each adapter and task that have answered a row, by the adapter's name."""
        groups: defaultdict[tuple[str | None, int], list[tuple[float, float, bool]]] = defaultdict(list)
        for name, tally in self.adapters.items():
            for (task, number, is_cut), num_rows in tally.answers.items():
                groups[name, task].append((num_rows, tally.answer_tokens[task, number, is_cut], is_cut))
        return {key: AnswerLengths.of(of_key) for key, of_key in groups.items()}

    def error_kinds(self, planned: Sequence[KindOfError]) -> tuple[KindOfError, ...]:
        """Error rows by kind. `planned`: kinds that the plan has found, with the first row of each in the input; rows
        of an adapter that was repaired since are no errors any more.
        """
        counted: Counter[str] = Counter()
        for tally in self.adapters.values():
            counted.update(tally.kinds)
        known = {kind.kind: kind for kind in planned}
        if not self.has_numbers:
            counted = Counter({kind.kind: kind.num_rows for kind in planned} | {ENGINE_ERROR: counted[ENGINE_ERROR]})
        names = [name for name in dict.fromkeys((*known, *sorted(counted))) if counted[name]]
        return tuple(
            known[name]
            if name in known and self._holds(known[name], counted[name])
            else KindOfError(name, counted[name], *self.first_errors[name])
            for name in names
        )

    def _holds(self, kind: KindOfError, num_rows: int) -> bool:
        """Whether a kind that the plan has found is as it was: no adapter was repaired, exchanged or lost since."""
        found = self.sentences.get(kind.kind, set())
        is_there = not self.has_numbers or kind.sentence in found or len(found) >= _MOST_SENTENCES
        return kind.num_rows == num_rows and is_there


def account_parts(
    shard_ids: Iterable[int],
    store: JobStore,
    record: JobRecord,
    run_id: str,
    reopens: bool = False,
    settings: RunSettings | None = None,
    spec: JobSpec | None = None,
) -> Account:
    """Compare these parts with the plan and count the rows of those that are right. `run_id`: id of the run that
    counts. `reopens`: parts of earlier runs with curable errors are not counted but returned in `Account.curable`.
    `settings`: of the run, by whose costs rows are priced; None to leave seconds out. `spec`: the job with its secrets,
    to read the ends of prompts with; None to leave examples out.

    Raises `StorageError` when storage fails.
    """
    total = Account()
    with closing(ShardReader(store, record)) as shards:
        ends = prompt_ends(record, spec) if spec is not None and spec.examples else None
        counting = _Counting(store, record, run_id, shards, settings, ends)
        for shard_id in shard_ids:
            total.add(counting.part(shard_id, reopens, total.adapters))
    return total


@dataclass(frozen=True, slots=True)
class _Counting:
    """Counts the parts of one job; the fields are the arguments of `account_parts`."""

    #: Store of the job.
    store: JobStore
    #: The job as it is recorded.
    record: JobRecord
    #: Id of the run that counts.
    run_id: str
    #: Reads the shards of the job.
    shards: ShardReader
    #: Settings by whose costs rows are priced; None to leave seconds out.
    settings: RunSettings | None
    #: Gives the end of a prompt (`prompt_ends`); None to leave examples out.
    prompt_end: Callable[[str | None, Sequence[int]], str | None] | None

    def part(self, shard_id: int, reopens: bool, before: Mapping[str | None, _Tally]) -> Account:
        """The account of one part. `before`: adapters that have been counted, which may have their examples."""
        store, record = self.store, self.record
        expected, columns = self.shards.contents(shard_id), counted_columns(record)
        lists = [name for name in _LISTS if name in columns]
        beside = {"is_endless": record.input.roles.get("ignore_eos"), "right": right_column(record)}
        try:
            with store.open_part(shard_id) as part:
                num_bytes = part.seek(0, os.SEEK_END)
                mark = mark_in(part)
                problem = mark if isinstance(mark, str) else mark.problem(shard_id, record, expected)
                if isinstance(mark, str) or problem:
                    return Account(unusable={shard_id: problem})
                if reopens and mark.run_id != self.run_id and (clause := curable(mark)):
                    return Account(curable={shard_id: clause})
                names = dict.fromkeys(filter(None, (*columns.values(), *beside.values())))
                table = pq.read_table(part, columns=list(names), page_checksum_verification=True)
        except MissingFileError:
            return Account(unusable={shard_id: "is gone"})
        except Exception as error:
            return Account(unusable={shard_id: damage_of(error)})
        values = {name: readable_values(table.column(column)) for name, column in columns.items()}
        if answers_hash(values) != mark.answers:
            return Account(unusable={shard_id: "has other answers than were written"})
        if record.spec.stages is not None:
            return self._staged(shard_id, num_bytes, mark, values)
        account = Account(
            num_parts=1, num_reused=mark.reused_by(self.run_id), parts={shard_id: (num_bytes, mark.contents)}
        )
        values |= {
            name: readable_values(table.column(column)) if column else [None] * table.num_rows
            for name, column in beside.items()
        }
        rows: list[dict[str, Any]] = []
        for of_row in zip(*values.values(), strict=True):
            row = dict(zip(values, of_row, strict=True))
            rows += completions(row, lists) if record.has_lists else [row]
        self._count(account, shard_id, rows)
        if beside["right"]:
            self._add_scores(account, rows)
        self._add_examples(account, shard_id, rows, before)
        return account

    def _staged(self, shard_id: int, num_bytes: int, mark: PartMark, values: Mapping[str, Sequence[Any]]) -> Account:
        """The account of a part with stages: rows and their errors as the part has them, all else by its requests."""
        account = Account(parts={shard_id: (num_bytes, mark.contents)}, num_reused=mark.reused_by(self.run_id))
        rows = [
            {ROW_ID: None, ROW_ADAPTER: one["adapter"], "is_endless": None, **one}
            for one in counted_requests(mark.requests)
        ]
        self._count(account, shard_id, rows)
        for stage in stages_of(self.record.spec.stages):
            of_stage = [row for row in rows if row["stage"] == stage.name]
            account.stages |= {stage.name: _stage_counts(of_stage)} if stage.asks else {}
        account.num_parts, account.num_rows = 1, len(values[ROW_ID])
        account.num_errors = sum(error is not None for error in values["error"])
        id_column = counted_columns(self.record)[ROW_ID]
        for row_id, error in zip(values[ROW_ID], values["error"], strict=True):
            for kind, sentences in account.sentences.items():
                if error in sentences:
                    account.first_errors[kind] = (f"{id_column}={row_id!r}", error)
        return account

    def _count(self, account: Account, shard_id: int, rows: Sequence[Mapping[str, Any]]) -> None:
        numbers = None if self.record.spec.stages is not None else self._numbers(shard_id, len(rows))
        account.has_numbers = numbers is not None
        engine_s = self._engine_seconds(rows, numbers)
        id_column = counted_columns(self.record)[ROW_ID]
        for place, row in enumerate(rows):
            tokens, error = row["completion_tokens"], row["error"]
            tally = account.adapters.setdefault(_adapter_of(row), _Tally())
            tally.num_rows += 1
            tally.prompt_tokens += row["prompt_tokens"]
            tally.completion_tokens += tokens
            tally.engine_s += float(engine_s[place])
            tally.reasons[row["finish_reason"]] += 1
            account.num_rows += 1
            account.prompt_tokens += row["prompt_tokens"]
            account.completion_tokens += tokens
            if error is not None:
                kind = _kind_of(row, 0 if numbers is None else int(numbers["error_kind"][place]))
                tally.kinds[kind] += 1
                tally.num_errors += 1
                account.num_errors += 1
                account._add_sentences(kind, (error,))
                account.first_errors.setdefault(kind, (f"{id_column}={row[ROW_ID]!r}", error))
                continue
            is_cut = row["finish_reason"] == "length"
            key = (0 if numbers is None else int(numbers["task"][place]), length_class(tokens), is_cut)
            tally.answers[key] += 1
            tally.answer_tokens[key] += tokens
            least, most = tally.bounds or (tokens, tokens)
            tally.bounds = (min(least, tokens), max(most, tokens))
            is_asked = self._has_asked_length(row, 0 if numbers is None else int(numbers["fixed_tokens"][place]))
            if is_cut and not is_asked:
                tally.cut[tokens] += 1

    def _add_scores(self, account: Account, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the scores of answers to the accounts of their adapters."""
        scored: defaultdict[str | None, list[tuple[Any, float, Any, str]]] = defaultdict(list)
        for row in rows:
            if (score := row[RIGHT_SCORE_FIELD.name]) is not None:
                scored[_adapter_of(row)].append((row[ROW_ID], score, row["right"], row["completion"] or ""))
        for name, answers in scored.items():
            account.adapters[name].scores.add_rows(answers, self.record.num_asked)

    def _has_asked_length(self, row: Mapping[str, Any], fixed_tokens: int) -> bool:
        """Whether a row's options ask for an answer of this length, so that none is cut off."""
        own = row["is_endless"]
        return fixed_tokens > 0 or bool(self.record.spec.sampling.ignore_eos if own is None else own)

    def _numbers(self, shard_id: int, num_rows: int) -> dict[str, NDArray[Any]] | None:
        """The index's numbers of a shard's rows; None when they cannot be read."""
        try:
            numbers = self.shards.numbers(shard_id, _NUMBERS)
        except (MissingFileError, DamagedRecordError):
            return None
        return numbers if len(numbers["task"]) == num_rows else None

    def _engine_seconds(
        self, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, NDArray[Any]] | None
    ) -> NDArray[np.float64]:
        """Seconds of one engine for each row by the run's costs, as the plan reckons them: with the length that each
        answer had.
        """
        settings = self.settings
        if numbers is None or settings is None or not rows:
            return np.zeros(len(rows))
        serving = serving_adapters(self.record)
        number = {adapter.adapter_id: i for i, adapter in enumerate(serving)}
        ids = {adapter.name: adapter.sha256 for adapter in self.record.adapters if not adapter.is_refused}
        index = [number.get(ids.get(_adapter_of(row) or "", ""), BASE_MODEL) for row in rows]
        has_engine = np.array([row["mode"] is not None for row in rows])
        fixed = numbers["fixed_tokens"]
        generated = np.array([row["completion_tokens"] for row in rows], np.int32)
        # of a given completion that is computed as a prompt, all tokens but the last
        given = np.where(fixed == 1, np.maximum(generated - 1, 0), 0)
        workload = Workload(
            adapters=serving,
            adapter_index=np.array(index, np.int32),
            prompt_tokens=np.array([row["prompt_tokens"] for row in rows], np.int32) + given.astype(np.int32),
            max_tokens=np.where(has_engine, np.maximum(numbers["max_tokens"], 1), 0).astype(np.int32),
            prefix_hash=np.zeros(len(rows), np.uint64),
            shared_tokens=np.where(numbers["is_scored"], 0, numbers["shared_tokens"]).astype(np.int32),
            is_drawn=numbers["is_drawn"],
            is_scored=numbers["is_scored"],
        )
        output = np.where(fixed > 0, fixed, generated).astype(np.float64)
        reused = prediction.with_reuse(settings, workload)
        return row_seconds(reused, output, settings.step_prices, settings.limits.batch_rows)

    def _add_examples(
        self,
        account: Account,
        shard_id: int,
        rows: Sequence[Mapping[str, Any]],
        before: Mapping[str | None, _Tally],
    ) -> None:
        """Add the first answers of adapters that have fewer than `NUM_EXAMPLES` examples yet."""
        if self.prompt_end is None:
            return
        left = {
            name: NUM_EXAMPLES - len(before[name].examples) if name in before else NUM_EXAMPLES
            for name in account.adapters
        }
        chosen = []
        for place, row in enumerate(rows):
            if left[_adapter_of(row)] > 0 and row["error"] is None:
                left[_adapter_of(row)] -= 1
                chosen.append(place)
        if not chosen:
            return
        prompts: Sequence[Sequence[int] | None]
        try:
            prompts = self.shards.tokens(shard_id, chosen)
        except (MissingFileError, DamagedRecordError):
            prompts = [None] * len(chosen)
        for place, tokens in zip(chosen, prompts, strict=True):
            row, name = rows[place], _adapter_of(rows[place])
            row_id, answer = row[ROW_ID], row["completion"] or ""
            example = {
                "id": row_id if isinstance(row_id, int | str) else str(row_id),
                "prompt_end": None if tokens is None else self.prompt_end(name, tokens),
                "answer": shortened(answer, EXAMPLE_CHARACTERS),
                "finish_reason": row["finish_reason"],
            }
            account.adapters[name].examples.append((shard_id, place, example))


def _adapter_of(row: Mapping[str, Any]) -> str | None:
    """Name of a row's adapter; the input may have an empty name, which is the base model too."""
    return row.get(ROW_ADAPTER) or None


def _stage_counts(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(
        requests=len(rows),
        errors=sum(row["error"] is not None for row in rows),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        completion_tokens=sum(row["completion_tokens"] for row in rows),
    )


def _kind_of(row: Mapping[str, Any], index_kind: int) -> str:
    """Kind of an error row. `index_kind`: the `ErrorKind` that the index has found."""
    if row["mode"] is not None:
        return ENGINE_ERROR
    return ErrorKind(index_kind).name.lower() if index_kind else ADAPTER_ERROR
