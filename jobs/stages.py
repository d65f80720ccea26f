"""A stage as a job of its own: the options and the record with which its prompts are made and its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..engine.text.chat.conversation import write_line_breaks
from ..engine.text.chat.prompt_template import columns_read
from ..system.untrusted import shown, shown_name
from .errors import JobRequestError
from .options.stages import Stage, Until, expression, stages_of, until_of
from .record import JobRecord
from .spec import JobSpec

_PLACES = {"model": "-", "input": "-", "output": "-"}
# Options whose values a stage takes from the stage that its conversation goes on from.
_OF_CONVERSATION = ("system_prompt", "chat_template_kwargs")


def first_stage(spec: JobSpec) -> Stage:
    """The stage that every row begins with. The job must have stages."""
    return stages_of(spec.stages)[0]


def origin_of(stage: Stage, stages: Sequence[Stage]) -> Stage:
    """The stage in which a stage's conversation begins; itself without `continues`."""
    by_name = {one.name: one for one in stages}
    while stage.continues or stage.pick:
        stage = by_name[stage.continues or stage.pick or ""]
    return stage


def stage_spec(spec: JobSpec, stage: Stage) -> JobSpec:
    """The options of a job that has this stage alone."""
    own = dict(stage.options)
    if stage.continues:
        begun = dict(origin_of(stage, stages_of(spec.stages)).options)
        own = {name: begun[name] for name in _OF_CONVERSATION if name in begun} | own
    messages = [{"role": role, "content": write_line_breaks(text)} for role, text in stage.messages]
    made = {
        "messages_template": json.dumps(messages, ensure_ascii=False) if messages else None,
        "prompt_template": None if stage.prompt is None else write_line_breaks(stage.prompt),
        "chat": None if stage.messages else False,
    }
    values = spec.model_dump(exclude={"storage_options", "cluster_options", "stages", "until", "output_columns"})
    found, problems, _ = JobSpec.as_far_as_valid(values | own | made)
    if problems:
        raise JobRequestError(*(f"stages.{stage.name}: {problem}" for problem in problems))
    return found


def stage_record(record: JobRecord, stage: Stage) -> JobRecord:
    """The record of a job that has this stage alone."""
    spec = stage_spec(record.spec, stage)
    return record.model_copy(update={"spec": spec, "with_logprobs": spec.sampling.wants_logprobs})


def refuse_stages(record: JobRecord, shown: str) -> None:
    """Raise `JobRequestError` for a job with stages, whose rows have no one completion. `shown`: URL of its output."""
    names = [stage.name for stage in stages_of(record.spec.stages)]
    if names:
        raise JobRequestError(
            f"output={shown!r}: the rows of this job have stages ({', '.join(names)}) and no completion of their own. "
            f"Read the columns of the stages, as in `SELECT id, {names[0]}.completion FROM 'part-*.parquet'` in DuckDB."
        )


def needs_adapter_of_rows(spec: JobSpec) -> bool:
    """Whether the job's rule says which adapter answers a row: a job without stages, or with one that names none."""
    stages = stages_of(spec.stages)
    return not stages or any(stage.asks and not stage.has_adapter and not stage.continues for stage in stages)


def named_stages(
    spec: JobSpec, columns: Sequence[str], adapters: Mapping[str, str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Columns that the stages of a job read, and every problem: names that nothing has, adapters that are not there,
    options of stages that exclude each other. `columns`: of the input. `adapters`: those of the job by name; None when
    they are not known.
    """
    stages = stages_of(spec.stages)
    read: dict[str, None] = {}
    taken = [stage.name for stage in stages if stage.name in columns]
    problems = [f"stages.{name}: the input has a column of this name. Name the stage otherwise." for name in taken]
    before: list[str] = []
    for stage in stages:
        names = [*columns, *(name for name in before if name not in columns)]
        problems += _stage_problems(spec, stage, names, adapters)
        read |= dict.fromkeys(name for name in names_read(stage, names) if name in columns)
        before.append(stage.name)
    problems += _until_problems(until_of(spec.until), stages, columns)
    problems += [
        f"output_columns={shown(name)}: there is no such stage. Name some of {', '.join(before)}."
        for name in spec.output_columns
        if name not in before
    ]
    return tuple(read), problems


def names_read(stage: Stage, there: Sequence[str]) -> list[str]:
    """Columns and stages, of those that are `there`, that a stage reads. Raises what `columns_read` raises."""
    found = [name for name in stage.names() if name in there]
    for template in stage.templates if stage.asks else ():
        found += columns_read(template, there)[0]
    return list(dict.fromkeys(found))


def _stage_problems(
    spec: JobSpec, stage: Stage, names: Sequence[str], adapters: Mapping[str, str] | None
) -> Iterator[str]:
    place = f"stages.{stage.name}"
    unknown = [name for name in stage.names() if name not in names]
    for template in stage.templates if stage.asks else ():
        unknown += columns_read(template, names)[1]
    for name in dict.fromkeys(unknown):
        yield (
            f"{place}: names {shown_name(name)!r}, which is no column and no stage before it. The names are "
            f"{', '.join(map(shown_name, names)) or 'none'}."
        )
    if stage.adapter is not None and adapters is not None and stage.adapter not in adapters:
        there = ", ".join(map(shown_name, sorted(adapters)[:20])) or "none are given"
        yield f"{place}.adapter={shown(stage.adapter)}: there is no such adapter. The adapters are: {there}."
    if stage.asks:
        try:
            stage_spec(spec, stage)
        except JobRequestError as error:
            yield from error.problems


def _until_problems(until: Until | None, stages: Sequence[Stage], columns: Sequence[str]) -> Iterator[str]:
    if until is None:
        return
    names = [stage.name for stage in stages]
    for key, name in (("stage", until.stage), ("from", until.first)):
        if name and name not in names:
            yield f"until.{key}={shown(name)}: there is no such stage. Name one of {', '.join(names)}."
            return
    if until.first and names.index(until.first) > names.index(until.stage):
        yield f"until.from={shown(until.first)}: comes after {until.stage!r}. Name a stage before it."
    there = {*columns, *names[: names.index(until.stage) + 1]}
    for name in expression(until.condition).names:
        if name not in there:
            yield f"until.is: names {shown_name(name)!r}, which is no column and no stage up to {until.stage!r}."


def repeated_stages(until: Until | None, stages: Sequence[Stage], columns: Sequence[str]) -> frozenset[str]:
    """Names of the stages that run again in each round: those from `until.first` on that `until.stage` depends on."""
    if until is None:
        return frozenset()
    depends = dependencies(stages, columns)
    needed = {until.stage, *depends[until.stage]}
    if until.first:
        needed &= {name for name in needed if name == until.first or until.first in depends[name]}
    return frozenset(needed)


def dependencies(stages: Sequence[Stage], columns: Sequence[str]) -> dict[str, frozenset[str]]:
    """Name of each stage -> the stages whose results it depends on."""
    found: dict[str, frozenset[str]] = {}
    for stage in stages:
        direct = [name for name in names_read(stage, [*columns, *found]) if name in found]
        if stage.pick and stage.by:
            direct += [name for name in expression(stage.by).names if name in found]
        found[stage.name] = frozenset(direct).union(*(found[name] for name in direct))
    return found


@dataclass(frozen=True, slots=True)
class StageRequests:
    """The requests that one row has of a stage."""

    #: The stage.
    stage: Stage
    #: Fewest requests of a row without errors.
    least: int
    #: Most requests of a row.
    most: int

    @property
    def expected(self) -> float:
        """Requests of a row where nothing is known of its conditions: the mean of the fewest and the most."""
        return (self.least + self.most) / 2

    def to_text(self) -> str:
        """The requests in words."""
        span = str(self.most) if self.least == self.most else f"{self.least} to {self.most}"
        return f"{self.stage.name} {span}"


def requests_of_stages(spec: JobSpec, columns: Sequence[str]) -> tuple[StageRequests, ...]:
    """The requests that each stage has of one row. `columns`: of the input that stages read."""
    stages, until = stages_of(spec.stages), until_of(spec.until)
    repeated = repeated_stages(until, stages, columns)
    sizes: dict[str, int] = {}
    skipped: set[str] = set()
    found = []
    for stage in stages:
        size = sizes[stage.for_each] if stage.for_each else stage.num_samples
        sizes[stage.name] = size
        # A stage that goes on from a skipped one is skipped too; one that only reads it is not.
        may_skip = stage.when is not None or not skipped.isdisjoint((stage.continues, stage.for_each, stage.pick))
        skipped |= {stage.name} if may_skip else set()
        rounds = until.rounds if until and stage.name in repeated else 1
        if stage.asks:
            found.append(StageRequests(stage, 0 if may_skip else size, size * rounds))
    return tuple(found)
