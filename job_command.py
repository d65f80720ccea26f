"""A command that takes a job: the job file, and every option of a job beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .jobs.options import JOB_OPTIONS


def job_command(
    call: Callable[[Path | None, dict[str, Any]], None], *, more: Mapping[str, tuple[Any, str]] | None = None
) -> Callable[..., None]:
    """Give a command the job file argument, all job options and `more`; it gets those that were given."""

    def command(job_file: Path | None = None, **options: Any) -> None:
        call(job_file, {name: value for name, value in options.items() if value not in (None, [])})

    keyword = inspect.Parameter.KEYWORD_ONLY
    argument = Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="Job file; options take precedence.")]
    parameters = [inspect.Parameter("job_file", keyword, default=None, annotation=argument)]
    for name, (kind, text) in (JOB_OPTIONS | dict(more or {})).items():
        shown = text.replace("[", r"\[")  # square brackets are markup to the printer of helps
        annotation = Annotated[kind | None, typer.Option(help=shown, show_default=False)]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__name__, command.__doc__ = call.__name__, call.__doc__
    return command
