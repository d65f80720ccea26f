"""Writes the type of a job's options for type checkers, `jobs/options/types.py`, from the fields of `JobSpec`.

    python -m lorabatch.console.option_types

writes the file anew after a change of an option; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from ..jobs.options.stages import STAGE_OPTIONS
from ..jobs.options.values import TLS_FIELDS
from ..jobs.spec import JobSpec

_FILE = Path(__file__).parents[1] / "jobs" / "options" / "types.py"
_COLUMNS, _COMMENT = 120, "    #: "
_PATH = "str | PathLike[str]"
_OBJECT = "str | Mapping[str, Any]"
# Values that a program may give beside those of the field's own type: what the validators of `JobSpec` read.
_ACCEPTED = {
    **dict.fromkeys(("model", "output"), _PATH),
    **dict.fromkeys(("chat_template", "scheduler_file", "cost_model"), f"{_PATH} | None"),
    **dict.fromkeys(TLS_FIELDS, f"{_PATH} | None"),
    "input": f"{_PATH} | Sequence[{_PATH}]",
    "adapters": f"{_PATH} | Mapping[str, {_PATH}] | Sequence[str] | None",
    "columns": "Mapping[str, str] | Sequence[str]",
    "max_errors": "str | int",
    **dict.fromkeys(("max_cost", "gpu_hour_price"), "str | float | None"),
    **dict.fromkeys(("storage_options", "cluster_options"), f"{_OBJECT} | None"),
    **dict.fromkeys(("response_format", "structured_outputs"), f"{_OBJECT} | None"),
    "tools": "str | Sequence[Mapping[str, Any]] | None",
    "stages": "str | Mapping[str, Stage] | None",
    "until": f"{_OBJECT} | None",
    "allowed_adapters": "str | Mapping[str, Mapping[str, str | Sequence[str]]] | None",
    "chat_template_kwargs": f"{_OBJECT} | None",
    "logit_bias": "str | Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]",
    # a class of pydantic has a schema too
    "json_schema": f"{_OBJECT} | type[Any]",
    "reasoning_markers": "str | Sequence[str] | Mapping[str, str]",
    "choice": "str | float | Sequence[str | float]",
}
_HEAD = '''"""`JobOptions`: the options of a job as keyword arguments, for type checkers. `Stage`: those of a stage.

Made from the fields of `JobSpec` by `python -m lorabatch.console.option_types`; not to be edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class JobOptions(TypedDict, total=False):
    """The options of a job by name. `JobSpec` says which are required, and their limits."""

'''
_STAGE = '''

class Stage(TypedDict, total=False):
    """One stage of the option `stages`. The options behind `continues` are those of the job, for this stage alone."""

    #: Name of the adapter that answers, `{"column": NAME}` for a column that names it, None for the base model. The
    #: job's rule holds for a stage without.
    adapter: str | Mapping[str, str] | None
    #: Template of one message of the user, or messages with templates, made of columns and of earlier stages.
    messages: str | Sequence[Mapping[str, str]]
    #: Template of a prompt that no chat template renders.
    prompt: str
    #: Stage with several results, each of which is asked about.
    for_each: str
    #: Stage with several results, of which the best is taken; such a stage asks no model.
    pick: str
    #: Expression with a number for each result of `pick`.
    by: str
    #: Expression without which a row skips the stage.
    when: str
    #: Stage whose conversation the messages continue.
    continues: str
'''


def source() -> str:
    """The content of `jobs/options/types.py` that fits the fields of `JobSpec`."""
    of_stage = [name for name in JobSpec.model_fields if name in STAGE_OPTIONS]
    return _HEAD + _declared(JobSpec.model_fields) + _STAGE + _declared(of_stage)


def _declared(names: Iterable[str]) -> str:
    lines = []
    for name in names:
        field = JobSpec.model_fields[name]
        lines += wrap(field.description or "", _COLUMNS, initial_indent=_COMMENT, subsequent_indent=_COMMENT)
        lines.append(f"    {name}: {_ACCEPTED.get(name) or _accepted(field.annotation)}")
    return "\n".join(lines) + "\n"


def _accepted(annotation: Any) -> str:
    """The type of values for a field: its own, and for a list one item or any sequence."""
    if isinstance(annotation, UnionType):
        return " | ".join(_accepted(kind) for kind in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(repr(value).replace(chr(39), chr(34)) for value in get_args(annotation))}]"
    if get_origin(annotation) is tuple:
        item = _accepted(get_args(annotation)[0])
        return f"{item} | Sequence[{item}]"
    if annotation is type(None):
        return "None"
    return str(annotation.__name__)


if __name__ == "__main__":
    _FILE.write_text(source(), encoding="utf-8")
