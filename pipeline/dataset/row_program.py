"""`RowProgram`: the stages of one row, from the values of its columns to the results of all stages.

Pure: no engine, no storage, no clock. `asks` says what is to be asked next, `answer` takes what came of it. The same
answers give the same asks and the same results, in whatever order they come, so that a program is replayed from the
answers that an earlier attempt has left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.request import Request
from ...jobs.options.stages import Stage, Until, expression
from ...jobs.stages import names_read, repeated_stages
from .answers import RowAnswer, probabilities
from .task_columns import Head, classified

#: Stands for a result that is not there yet.
_PENDING: Any = object()
#: Value of a stage that is not asked because one that it reads has failed.
_NOT_ASKED: Any = {"completion": None, "error": "a stage that it reads has failed"}
_Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of one stage that is to be made of the row's values."""

    #: Stage of the request.
    stage: Stage
    #: Number of the round, from 0.
    round: int
    #: Number of the result of `for_each` that it is about; 0 without.
    item: int
    #: Value of each column and earlier stage, by name.
    scope: Mapping[str, Any]
    #: Messages before those of the stage, of the conversation that it continues.
    before: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class _Cell:
    """One request of a row: asked, and perhaps answered."""

    #: The answer; None while it is missing.
    answer: RowAnswer | None = None
    #: The request that engines were asked; None for an error without one.
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class Picked:
    """The result of a pick."""

    #: The result that was taken.
    answer: RowAnswer
    #: Request of that result; None for one that no engine was asked.
    request: Request | None
    #: Number by which it was taken.
    by: float
    #: Its place among the results.
    index: int


#: Result of a stage: an answer with its request, a pick, several answers, or None for a stage that was skipped.
StageResult = tuple[RowAnswer, Request | None] | Picked | list[tuple[RowAnswer, Request | None] | None] | None


@dataclass(frozen=True, slots=True)
class Flow:
    """The stages of a job, with what each reads."""

    #: The stages, in order.
    stages: tuple[Stage, ...]
    #: Rounds of the job; None without.
    until: Until | None
    #: Name of each stage -> columns and stages that it reads.
    reads: Mapping[str, tuple[str, ...]]
    #: Names of the stages that run again in each round.
    repeated: frozenset[str]
    #: Labels and kind of each adapter's head, by content; None: of the base's (`task_columns.heads_of`).
    heads: Mapping[str | None, Head]

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        until: Until | None,
        columns: Sequence[str],
        heads: Mapping[str | None, Head] | None = None,
    ) -> Flow:
        """The flow of a job with these stages. `columns`: of the input, as far as stages read them."""
        there, reads = list(columns), {}
        for stage in stages:
            reads[stage.name] = tuple(names_read(stage, there))
            there.append(stage.name)
        return cls(tuple(stages), until, reads, repeated_stages(until, stages, columns), heads or {})

    @property
    def order(self) -> tuple[tuple[Stage, ...], tuple[Stage, ...], tuple[Stage, ...]]:
        """Stages before the rounds, those of the rounds, and those behind them."""
        before: list[Stage] = []
        behind: list[Stage] = []
        follows = set(self.repeated)
        for stage in self.stages:
            if stage.name in self.repeated:
                continue
            is_behind = not follows.isdisjoint(self.reads[stage.name])
            follows |= {stage.name} if is_behind else set()
            (behind if is_behind else before).append(stage)
        return tuple(before), tuple(stage for stage in self.stages if stage.name in self.repeated), tuple(behind)


@dataclass(slots=True)
class RowProgram:
    """The stages of one row: the answers so far, and what follows from them."""

    #: The stages of the job.
    flow: Flow
    #: Values of the columns that the stages read.
    columns: Mapping[str, Any]
    # Each request by stage, round and number.
    _cells: dict[_Place, _Cell] = field(default_factory=dict)
    # Conversation of each request, by its first place: the messages that were rendered.
    _conversations: dict[_Place, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    # New requests of the evaluation that runs.
    _asks: list[Ask] = field(default_factory=list)
    #: Results by stage, once no answer is missing.
    results: dict[str, StageResult] = field(default_factory=dict)
    #: Whether all stages have their results.
    is_done: bool = False

    def asks(self) -> list[Ask]:
        """The requests that follow from the answers so far and were not asked before. Empty while answers are missing,
        and at the end.
        """
        self._asks = []
        values: dict[str, Any] = {}
        before, repeated, behind = self.flow.order
        self._run(before, 0, values)
        until = self.flow.until
        for number in range(until.rounds if until else 0):
            self._run(repeated, number, values)
            is_open = any(_is_open(values[stage.name]) for stage in repeated)
            if is_open or (until and expression(until.condition).is_true({**self.columns, **values})):
                break
        self._run(behind, 0, values)
        self.is_done = not self._asks and not any(map(_is_open, values.values()))
        return self._asks

    def answer(self, ask: Ask, sample: int, answer: RowAnswer, request: Request | None) -> None:
        """Take an answer to an ask. `sample`: number of the completion. `request`: None when no engine was asked."""
        cell = self._cells[ask.stage.name, ask.round, ask.item + sample]
        cell.answer, cell.request = answer, request

    def answers(self) -> Iterator[tuple[str, RowAnswer]]:
        """Every answer with the name of its stage, those of all rounds."""
        for (name, _, _), cell in self._cells.items():
            if cell.answer is not None:
                yield name, cell.answer

    def keep_conversation(self, ask: Ask, messages: Sequence[dict[str, Any]]) -> None:
        """Keep the messages of an ask, for a stage that continues it."""
        self._conversations[ask.stage.name, ask.round, ask.item] = tuple(messages)

    def _run(self, stages: Sequence[Stage], number: int, values: dict[str, Any]) -> None:
        for stage in stages:
            value, result = self._value(stage, number, values)
            values[stage.name] = value
            self.results[stage.name] = result

    def _value(self, stage: Stage, number: int, values: Mapping[str, Any]) -> tuple[Any, StageResult]:
        """Value of a stage for templates and expressions, and its result for the output."""
        scope = {**self.columns, **values}
        read = {name: values[name] for name in self.flow.reads[stage.name] if name in values}
        is_open = {name for name, value in read.items() if _is_open(value)}
        if is_open - {stage.for_each}:
            return _PENDING, None
        if stage.when and not expression(stage.when).is_true(scope):
            return None, None
        in_condition = set(expression(stage.when).names) if stage.when else set()
        if any(_has_failed(value) for name, value in read.items() if name not in in_condition):
            return _NOT_ASKED, None
        if stage.pick:
            return self._pick(stage, number, scope)
        if stage.for_each:
            return self._for_each(stage, number, scope)
        cells = [self._cell(Ask(stage, number, 0, scope), sample) for sample in range(stage.num_samples)]
        if None in cells:
            return None, None
        found = [(_value_of(cell, self.flow.heads), _result_of(cell)) for cell in cells if cell is not None]
        if not stage.is_list:
            return found[0]
        return [value for value, _ in found], [result for _, result in found]

    def _for_each(self, stage: Stage, number: int, scope: dict[str, Any]) -> tuple[Any, StageResult]:
        items = scope[stage.for_each or ""]
        if items is None or items is _PENDING:
            return items, None
        found: list[tuple[Any, Any]] = []
        for place, item in enumerate(items):
            if item is None or item is _PENDING or _has_failed(item):
                found.append((item if item is _PENDING or item is None else _NOT_ASKED, None))
                continue
            cell = self._cell(Ask(stage, number, place, scope | {stage.for_each or "": item}), 0)
            found.append((None, None) if cell is None else (_value_of(cell, self.flow.heads), _result_of(cell)))
        return [value for value, _ in found], [result for _, result in found]

    def _cell(self, ask: Ask, sample: int) -> _Cell | None:
        """The cell of a request, which is asked if it is new; None where the conversation to continue is not there."""
        place = ask.stage.name, ask.round, ask.item + sample
        if place not in self._cells:
            before = self._before(ask)
            if before is None:
                return None
            self._cells[place] = _Cell()
            if not sample:
                self._asks.append(Ask(ask.stage, ask.round, ask.item, ask.scope, before))
        return self._cells[place]

    def _before(self, ask: Ask) -> tuple[dict[str, Any], ...] | None:
        """Messages of the conversation that a stage continues, with the answer; () for a stage that begins one."""
        if ask.stage.continues is None:
            return ()
        result = self.results.get(ask.stage.continues)
        turn = next(stage for stage in self.flow.stages if stage.name == ask.stage.continues)
        item = 0
        if isinstance(result, Picked):
            item = result.index
            turn = next(stage for stage in self.flow.stages if stage.name == turn.pick)
            text = result.answer.completion
        elif isinstance(result, tuple):
            text = result[0].completion
        else:
            return None
        # Samples of one request share its messages.
        places = [place for place in self._conversations if place[0] == turn.name]
        latest = max((place[1] for place in places), default=0)
        first = item if turn.for_each else 0
        messages = self._conversations.get((turn.name, latest, first), ())
        return (*messages, {"role": "assistant", "content": text or ""})

    def _pick(self, stage: Stage, number: int, scope: Mapping[str, Any]) -> tuple[Any, StageResult]:
        values, numbers = scope[stage.pick or ""], expression(stage.by or "").value(scope)
        results = self.results[stage.pick or ""]
        if not isinstance(values, list) or not isinstance(numbers, list) or not isinstance(results, list):
            return None, None
        best: tuple[float, int] | None = None
        for place, (value, by) in enumerate(zip(values, numbers, strict=False)):
            if value is None or _has_failed(value) or not isinstance(by, int | float) or math.isnan(by):
                continue
            if best is None or by > best[0]:
                best = float(by), place
        if best is None:
            return None, None
        by, place = best
        answer, request = results[place] or (None, None)
        assert answer is not None, f"{stage.pick} has a value and no result at {place}"
        return {**values[place], "by": by, "index": place}, Picked(answer, request, by, place)


def _is_open(value: Any) -> bool:
    """Whether a stage's value, or an item of it, is still missing."""
    return value is _PENDING or (isinstance(value, list) and any(item is _PENDING for item in value))


def _has_failed(value: Any) -> bool:
    """Whether a stage has no answer but an error; of several results, whether all are errors."""
    if isinstance(value, list):
        return bool(value) and all(item is not None and _has_failed(item) for item in value)
    return isinstance(value, Mapping) and value.get("error") is not None


def _result_of(cell: _Cell) -> tuple[RowAnswer, Request | None] | None:
    return None if cell.answer is None else (cell.answer, cell.request)


def _value_of(cell: _Cell, heads: Mapping[str | None, Head]) -> Any:
    """The answer as templates and expressions see it."""
    answer, request = cell.answer, cell.request
    if answer is None:
        return _PENDING
    value: dict[str, Any] = {
        "completion": answer.completion,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "reasoning": answer.reasoning,
        "error": answer.error,
    }
    sampling = None if request is None else request.sampling
    if sampling is not None and sampling.choice:
        value["choice"] = answer.completion if answer.finish_reason == "stop" else None
        shares = probabilities(answer.choice_logprobs)
        value["probability"] = shares and dict(zip(sampling.choice, shares, strict=True))
    if sampling is not None and sampling.json_schema:
        value["answer"] = _parsed(answer.completion)
    if sampling is not None and sampling.task == "classify" and answer.pooled is not None:
        value |= classified(answer, heads)
    return value


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None
