"""`Stage`: one step of a job with several, as the option `stages` gives it. A stage reads columns of its own row and
results of earlier stages of that row; no stage sees another row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...engine.request import SAMPLING_OPTIONS
from ...engine.structured_output import FORMS
from ...engine.text.chat.conversation import read_line_breaks, read_message_templates
from ...system.untrusted import parse_json, shown, shown_name
from .expression import Expression
from .problems import with_suggestion

#: Options of a job that a stage may have with a value of its own.
STAGE_OPTIONS = (*SAMPLING_OPTIONS, *FORMS, "system_prompt", "chat_template_kwargs")
_KEYS = ("adapter", "messages", "prompt", "for_each", "pick", "by", "when", "continues")
_UNTIL_KEYS = ("stage", "is", "rounds", "from")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MOST_STAGES, _MOST_ROUNDS = 32, 16
# Names that templates and expressions have already, and columns that each output has.
_TAKEN = {"row", "loop", "not", "and", "or", "in", "is", "None", "True", "False", "true", "false", "none", "len", "any"}
_TAKEN |= {"all", "error", "attempts"}
_EXAMPLE = '{"draft": {"messages": "{{ question }}"}, "judge": {"messages": "{{ draft.completion }}", "choice": […]}}'


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a job: a request to a model, or the pick of one result among several of an earlier stage."""

    #: Name of the stage, and of its column in the output.
    name: str
    #: Role and template of each message; empty for a stage with `prompt` or `pick`.
    messages: tuple[tuple[str, str], ...] = ()
    #: Template of a prompt that no chat template renders; None for a stage with messages or `pick`.
    prompt: str | None = None
    #: Name of the adapter that answers; None for the base model, or where `adapter_column` names it.
    adapter: str | None = None
    #: Column with the name of each row's adapter; None for none.
    adapter_column: str | None = None
    #: Whether the stage says which adapter answers; else the job's rule holds.
    has_adapter: bool = False
    #: Stage with several results, each of which is asked about; None for one request a row.
    for_each: str | None = None
    #: Stage with several results, of which this one takes the best; None for a stage that asks.
    pick: str | None = None
    #: Expression with a number for each result of `pick`.
    by: str | None = None
    #: Expression without which a row skips the stage; None for a stage of all rows.
    when: str | None = None
    #: Stage whose conversation the messages continue; None for a conversation of its own.
    continues: str | None = None
    #: Options of the job for this stage alone, `STAGE_OPTIONS` to value.
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def asks(self) -> bool:
        """Whether the stage has requests; a pick has none."""
        return self.pick is None

    @property
    def templates(self) -> tuple[str, ...]:
        """Templates of the stage, as jinja2 reads them."""
        return tuple(text for _, text in self.messages) if self.prompt is None else (self.prompt,)

    @property
    def num_samples(self) -> int:
        """Completions of each request."""
        return int(dict(self.options).get("n") or 1)

    @property
    def is_list(self) -> bool:
        """Whether the stage has a list of results for each row."""
        return self.for_each is not None or (self.asks and self.num_samples > 1)

    def names(self) -> Iterator[str]:
        """Stages and columns that the stage names outside of its templates."""
        yield from (name for name in (self.for_each, self.pick, self.continues, self.adapter_column) if name)
        for text in (self.by, self.when):
            yield from expression(text).names if text else ()


@dataclass(frozen=True, slots=True)
class Until:
    """Stages that run again until a condition holds."""

    #: Last stage of a round, after which the condition is looked at.
    stage: str
    #: Expression that ends the rounds when it is true.
    condition: str
    #: Most rounds.
    rounds: int
    #: First stage of a round; "" for the first that `stage` depends on.
    first: str = ""


@lru_cache(maxsize=1024)
def expression(text: str) -> Expression:
    """The expression with this text, parsed once. Raises ValueError."""
    return Expression(text)


def read_stages(value: Any) -> Any:
    """Checks the form of the option `stages`: a mapping of stages by name, or its JSON. Returns the mapping.

    Raises ValueError with every problem, as sentences.
    """
    given = _parsed("stages", value, _EXAMPLE)
    if not isinstance(given, Mapping) or not given or not all(isinstance(one, Mapping) for one in given.values()):
        raise ValueError(f"stages={shown(given)}: expected a mapping of stages by name, such as {_EXAMPLE}.")
    if len(given) > _MOST_STAGES:
        raise ValueError(f"stages: {len(given)} of them, expected at most {_MOST_STAGES}.")
    problems = [problem for name, stage in given.items() for problem in _form_problems(str(name), stage)]
    if not problems:
        problems = list(_order_problems(_stages_of(given)))
    if problems:
        raise ValueError(" ".join(problems))
    return given


def read_until(value: Any) -> Any:
    """Checks the form of the option `until`: a mapping of stage, is and rounds, or its JSON. Raises ValueError."""
    example = '{"stage": "judge", "is": "judge.choice == \'good\'", "rounds": 3}'
    given = _parsed("until", value, example)
    if not isinstance(given, Mapping) or not {"stage", "is", "rounds"} <= given.keys() <= {*_UNTIL_KEYS}:
        raise ValueError(f"until={shown(given)}: expected stage, is and rounds, and perhaps from, such as {example}.")
    rounds = given["rounds"]
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 2 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"until.rounds={shown(rounds)}: expected a whole number from 2 to {_MOST_ROUNDS}.")
    if not isinstance(given["is"], str):
        raise ValueError(f"until.is={shown(given['is'])}: expected an expression, as text.")
    try:
        expression(given["is"])
    except ValueError as error:
        raise ValueError(f"until.is: {error}.") from None
    return given


def read_allowed(value: Any) -> Any:
    """Checks the form of the option `allowed_adapters`: one column, with adapters by its value. Raises ValueError."""
    example = '{"tenant": {"acme": ["acme-*", "shared"], "*": "shared"}}'
    given = _parsed("allowed_adapters", value, example)
    rules = next(iter(given.values())) if isinstance(given, Mapping) and len(given) == 1 else None
    if not isinstance(rules, Mapping) or not rules:
        raise ValueError(f"allowed_adapters={shown(given)}: expected one column with adapters by value: {example}.")
    for key, names in rules.items():
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, list | tuple) or not all(isinstance(name, str) and name for name in listed):
            raise ValueError(f"allowed_adapters: {shown(key)} has {shown(names)}, expected names or globs of adapters.")
    return given


def stages_of(text: str | None) -> tuple[Stage, ...]:
    """The stages of a job, in order. `text`: its option `stages`, which `read_stages` has checked."""
    return () if text is None else _read(text)


def until_of(text: str | None) -> Until | None:
    """The rounds of a job; None without. `text`: its option `until`, which `read_until` has checked."""
    if text is None:
        return None
    given = json.loads(text)
    return Until(given["stage"], given["is"], given["rounds"], given.get("from") or "")


@lru_cache(maxsize=64)
def _read(text: str) -> tuple[Stage, ...]:
    return tuple(_stages_of(json.loads(text)))


def _stages_of(given: Mapping[str, Mapping[str, Any]]) -> list[Stage]:
    return [_stage_of(name, values) for name, values in given.items()]


def _stage_of(name: str, values: Mapping[str, Any]) -> Stage:
    adapter, messages = values.get("adapter"), values.get("messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return Stage(
        name=name,
        messages=tuple((one["role"], read_line_breaks(one["content"])) for one in messages or ()),
        prompt=None if values.get("prompt") is None else read_line_breaks(values["prompt"]),
        adapter=adapter if isinstance(adapter, str) else None,
        adapter_column=adapter["column"] if isinstance(adapter, Mapping) else None,
        has_adapter="adapter" in values,
        **{key: values.get(key) for key in ("for_each", "pick", "by", "when", "continues")},
        options=tuple((key, values[key]) for key in STAGE_OPTIONS if values.get(key) is not None),
    )


def _form_problems(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Problems of one stage by itself, as sentences."""
    place = f"stages.{name}"
    if not _NAME.fullmatch(name) or name in _TAKEN or name.startswith("__"):
        yield f"{shown_name(place)}: expected a name of letters, digits and underscores that is not {shown_name(name)}."
    for key in values.keys() - {*_KEYS, *STAGE_OPTIONS}:
        problem = f"{place}.{shown_name(key)}: a stage has no such option"
        text = with_suggestion(problem, key, (*_KEYS, *STAGE_OPTIONS))
        yield text if text.endswith("?") else f"{text}."
    ways = [key for key in ("messages", "prompt", "pick") if values.get(key) is not None]
    if len(ways) != 1:
        yield f"{place}: expected one of messages, prompt and pick, found {', '.join(ways) or 'none'}."
    for key in ("prompt", "for_each", "pick", "by", "when", "continues"):
        if values.get(key) is not None and (not isinstance(values[key], str) or not values[key]):
            yield f"{place}.{key}={shown(values[key])}: expected text."
            return
    yield from _message_problems(place, values.get("messages"))
    yield from _adapter_problems(place, values.get("adapter"))
    for key in ("by", "when"):
        if values.get(key) is not None:
            try:
                expression(values[key])
            except ValueError as error:
                yield f"{place}.{key}: {error}."
    if ("pick" in ways) != (values.get("by") is not None):
        yield f"{place}: expected pick and by together: the stage of which one result is taken, and by what."
    if "pick" in ways and (others := sorted(values.keys() - {"pick", "by", "when"})):
        yield f"{place}: a pick asks no model, and {', '.join(others)} belongs to a request."
    if values.get("continues") is not None and "messages" not in ways:
        yield f"{place}.continues: expected messages beside it, the next turn of the conversation."
    if values.get("continues") is not None and values.get("for_each") is not None:
        yield f"{place}: expected continues or for_each, not both."
    if values.get("for_each") is not None and values.get("n") not in (None, 1):
        yield f"{place}.n={shown(values['n'])}: expected one completion for each result of {values['for_each']}."


def _message_problems(place: str, messages: Any) -> Iterator[str]:
    if messages is None or (isinstance(messages, str) and messages):
        return
    try:
        read_message_templates(messages)
    except ValueError as error:
        yield f"{place}.{str(error).removeprefix('messages_template').removeprefix('=').lstrip('.')}"


def _adapter_problems(place: str, adapter: Any) -> Iterator[str]:
    is_column = isinstance(adapter, Mapping) and adapter.keys() == {"column"} and isinstance(adapter["column"], str)
    if adapter is not None and not is_column and not (isinstance(adapter, str) and adapter):
        yield f'{place}.adapter={shown(adapter)}: expected a name, {{"column": NAME}}, or null for the base model.'


def _order_problems(stages: Sequence[Stage]) -> Iterator[str]:
    """Stages that name themselves, later ones, or ones of the wrong shape, as sentences."""
    before: dict[str, Stage] = {}
    later = {stage.name for stage in stages}
    for stage in stages:
        later.discard(stage.name)
        for name in dict.fromkeys(stage.names()):
            if name in later or name == stage.name:
                which = "itself" if name == stage.name else f"{name!r}, which comes after it"
                yield f"stages.{stage.name}: reads {which}. Write stages in the order in which they run."
        for key in ("for_each", "pick", "continues"):
            source = getattr(stage, key)
            if source is None or source == stage.name or source in later:
                continue
            if source not in before:
                yield f"stages.{stage.name}.{key}: there is no stage {shown_name(source)!r} before it."
            elif key != "continues" and not before[source].is_list:
                wanted = "expected a stage with n or for_each"
                yield f"stages.{stage.name}.{key}: {source!r} has one result a row, {wanted}."
        if stage.continues and (turn := before.get(stage.continues)):
            yield from _continues_problems(stage, turn, before)
        before[stage.name] = stage
    first = next((stage for stage in stages if stage.asks), None)
    if first is None or first is not stages[0]:
        yield f"stages.{stages[0].name}: a pick comes after the stage that it picks from."
    elif first.when is not None or first.for_each is not None:
        yield f"stages.{first.name}: the first stage asks every row. Put the condition on a later stage."


def _continues_problems(stage: Stage, turn: Stage, before: Mapping[str, Stage]) -> Iterator[str]:
    source = before.get(turn.pick or "", turn)
    if source.is_list and turn.asks:
        yield (
            f"stages.{stage.name}.continues: {turn.name!r} has several results for a row. Pick one in a stage between, "
            "and continue that."
        )
    if source.prompt is not None:
        yield f"stages.{stage.name}.continues: {source.name!r} has a prompt and no messages, so no turn can follow."
    if stage.has_adapter:
        yield f"stages.{stage.name}.adapter: a conversation goes on with the adapter of {turn.name!r}. Leave it out."


def _parsed(option: str, value: Any, example: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{option}={shown(value)}: not JSON ({error}). Write {example}.") from None
