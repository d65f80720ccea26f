"""The options of a job as command-line parameters, made from the fields of `JobSpec`.

`Commands` is a group of commands: its `job_command` gives a command the job file argument and every option of a job.
`shared_option` declares an option of a job for a command that takes no job. A `StrictCommand` refuses an option that is
given twice. `JobSpec` is imported only when the options of a job are needed: importing it takes longer than listing the
commands.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from ..jobs.storage.redaction import scrubbed
from .help import print_help
from .patterns import with_expanded_patterns
from .terminal import echo

_Function = TypeVar("_Function", bound=Callable[..., Any])
_JobCall = TypeVar("_JobCall", bound=Callable[..., None])
# Field of `JobSpec` -> name on the command line, where the two differ: repeatable options are named in the singular.
_NAMES = {"columns": "column"}
_NUMBERS = (int, float)
# Letters of options that commands without a job share, which are listed without `JobSpec`; a test compares them.
_SHORT = {"model": "m", "cluster": "c", "workers": "w", "max_errors": "e"}
_HELP_FLAGS = {"help_option_names": ["--help", "-h"]}
# Placeholder for the help of a shared option; `StrictCommand.format_help` puts the option's own help in its place.
_SHARED = "As for `lorabatch run`."


@dataclass(frozen=True, slots=True)
class JobOption:
    """One option of a job, as the command line has it."""

    #: Name on the command line, without dashes.
    name: str
    #: Field of `JobSpec` and key of the job file.
    key: str
    #: Type of the value: `bool`, `int`, `float`, `list[str]` or `str`. The command line parses switches and lists. It
    #: passes numbers on as text, so that `JobSpec` reads them and reports all problems at once.
    kind: Any
    #: Default in the help; "" for none.
    default: str
    #: Text of the help.
    help: str
    #: Whether it is a switch that is off by default.
    is_off: bool
    #: Whether a job must have the option.
    is_required: bool
    #: Part of the help that shows it.
    panel: str
    #: Its letter, for the commonest options; "" for none.
    short: str
    #: Whether short help shows it.
    is_common: bool
    #: Its values, if it has a fixed set of them.
    choices: tuple[str, ...]

    def parameter(self) -> Any:
        """The option as an annotation that typer reads."""
        text = f"{self.help}  [default: {self.default}]" if self.default else self.help
        if self.kind is bool and not self.is_off:
            text += f"  --no{_flag(self.name)[1:]} turns it off."
        return Annotated[(str if self.kind in _NUMBERS else self.kind) | None, self.declaration(text)]

    def declaration(self, text: str) -> Any:
        """The option for typer. `text`: its help."""
        flag = _flag(self.name)
        flags = [f"{flag}/--no{flag[1:]}" if self.kind is bool else flag, *([f"-{self.short}"] if self.short else [])]
        metavar = None if self.kind is bool else f"<{self.kind.__name__ if self.kind in _NUMBERS else 'str'}>"
        return typer.Option(
            *flags,
            help=_unmarked(text),
            metavar=metavar,
            show_default=False,
            rich_help_panel=self.panel.capitalize(),
            autocompletion=self.completions if self.choices else None,
        )

    def completions(self, incomplete: str) -> list[str]:
        """Values that begin as what is typed, for the shell."""
        return [choice for choice in self.choices if choice.startswith(incomplete)]


# The error of a command line that cannot be read; typer does not export it.
_UsageError: Any = typer.BadParameter.__bases__[0]


@contextmanager
def _usage_in_one_line(ctx: Any) -> Iterator[None]:
    """Prints what is wrong with a command line in the form of all messages, and ends the command with exit code 2."""
    try:
        yield
    except _UsageError as error:
        said = " ".join(error.format_message().removesuffix(".").split())
        if not said or type(error).__name__ == "NoArgsIsHelpError":
            raise
        end = "" if said.endswith("?") else "."
        echo(f"lorabatch: {said[0].lower()}{said[1:]}{end} See `{ctx.command_path} --help`.", err=True)
        raise typer.Exit(2) from None


class StrictCommand(TyperCommand):
    """A command that refuses an option given twice, unless it is repeatable: a second value would replace the first.

    A value that is not of its option's kind is reported in the same form as a wrong value of a job.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Ends the command with exit code 2 when an option is given twice or cannot be read."""
        if ctx.resilient_parsing:  # the shell asks for completions of an unfinished command
            return super().parse_args(ctx, args)
        with _usage_in_one_line(ctx):
            return self._parsed(ctx, args)

    def _parsed(self, ctx: Any, args: list[str]) -> list[str]:
        given = self._given(ctx, args)
        repeated = {flag: values for flag, values in given.items() if len(values) > 1}
        for flag, values in repeated.items():
            shown = scrubbed(", " + " and ".join(values) if all(values) else "", {})
            echo(f"lorabatch: {flag}: given {len(values)} times{shown}; keep one.", err=True)
        if repeated:
            ctx.exit(2)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            flag = error.param.opts[0] if error.param else ""
            if flag not in given:
                raise
            from ..jobs.options.problems import in_our_words

            said = in_our_words(error.message.removesuffix("."))
            echo(f"lorabatch: {flag}={given[flag][0]}: {said}. See `lorabatch {_name(ctx)} --help`.", err=True)
            raise typer.Exit(2) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the help of shared options in place of `_SHARED`."""
        for option in self.params:
            if getattr(option, "help", None) == _SHARED and option.name:
                option.help = _unmarked(job_options()[option.name].help)  # type: ignore[attr-defined]
        print_help(self, ctx, self.is_shown, self.closing(ctx))

    def is_shown(self, parameter: Any) -> bool:
        """Whether the help shows a parameter."""
        return True

    def closing(self, ctx: Any) -> str:
        """The last line of the help; "" for none."""
        return ""

    def _given(self, ctx: Any, args: list[str]) -> dict[str, list[str]]:
        """Option -> its values, for given options that are not repeatable."""
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        once: dict[Any, Any] = {p.name: p for p in options if not (p.multiple or p.is_eager)}
        parser: Any = type(self.make_parser(ctx))(ctx)
        for parameter in self.get_params(ctx):
            # A copy of the option collects its values, as repeatable options do.
            collecting: Any = copy.copy(parameter)
            collecting.multiple = parameter.name in once or getattr(parameter, "multiple", False)
            collecting.add_to_parser(parser, ctx)
        given, _, _ = parser.parse_args(args=list(args))
        return {
            once[name].opts[0]: [_as_given(once[name], value) for value in values]
            for name, values in given.items()
            if name in once and values
        }


class _Group(TyperGroup):
    """A group whose help and messages look as those of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own arguments. Ends the command with exit code 2 when they cannot be read."""
        with nullcontext() if ctx.resilient_parsing else _usage_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Ends with exit code 2 when there is none of this name."""
        with nullcontext() if ctx.resilient_parsing else _usage_in_one_line(ctx):
            return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: options, and commands with the first sentence about each."""
        print_help(self, ctx, lambda parameter: True, f"`{ctx.command_path} COMMAND --help` shows the options of one.")


class Commands(typer.Typer):
    """A group of commands, each of them a `StrictCommand`. `-h` shows help too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, context_settings=_HELP_FLAGS, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = StrictCommand, **settings: Any
    ) -> Callable[[_Function], _Function]:
        """Register a command as `typer.Typer.command` does, by default as a `StrictCommand`."""
        return super().command(name, cls=cls, context_settings=_HELP_FLAGS, **settings)

    def job_command(self, name: str) -> Callable[[_JobCall], _JobCall]:
        """Register a command that takes a job: the job file argument and all job options, beside its own parameters.

        The command calls the function with `(job_file, options, **own)`: `options` has the given job options.
        """

        def register(call: _JobCall) -> _JobCall:
            def listed() -> None: ...

            listed.__doc__ = call.__doc__
            made_when_called: Any = partial(_JobCommand, call)
            self.command(name, cls=made_when_called)(listed)
            return call

        return register


class _JobCommand(StrictCommand):
    """A command that takes a job, in the form that lists of commands need. Its options are made when it is called."""

    def __init__(self, call: _JobCall, **settings: Any) -> None:
        super().__init__(**settings)
        self._call = call

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the job options, and a context whose command has them."""
        app = Commands(add_completion=False)
        app.command(self.name, cls=_CommandOfJob)(_with_job_options(self._call))
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


class _CommandOfJob(StrictCommand):
    """A command with every option of a job. Its help shows the commonest ones, unless it is asked for all."""

    #: Whether the help shows every option.
    shows_all = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Files that a shell has put in place of a pattern behind `--input` are all inputs."""
        try:
            args = args if ctx.resilient_parsing else with_expanded_patterns(args)
        except ValueError as error:
            echo(f"lorabatch: {error}", err=True)
            raise typer.Exit(2) from None
        return super().parse_args(ctx, args)

    def is_shown(self, parameter: Any) -> bool:
        """Whether the help shows a parameter: the commonest options of a job, and what is of this command alone."""
        option = job_options().get(parameter.name)
        return self.shows_all or option is None or option.is_common

    def closing(self, ctx: Any) -> str:
        """The last line of the help."""
        if self.shows_all:
            return ""
        return f"The commonest options of {len(job_options())}: `lorabatch {_name(ctx)} {_HELP_ALL}` shows all."


def _show_all(ctx: typer.Context, is_asked: bool) -> None:
    """Print the whole help, and end the command."""
    if is_asked and not ctx.resilient_parsing:
        assert isinstance(ctx.command, _CommandOfJob), f"{ctx.command!r} has no long help"
        ctx.command.shows_all = True
        ctx.get_help()
        raise typer.Exit


_HELP_ALL = "--help-all"
_HELP_ALL_OPTION = Annotated[
    bool, typer.Option(_HELP_ALL, is_eager=True, callback=_show_all, help="Show every option and exit.")
]


def _name(ctx: Any) -> str:
    """The words of a command after `lorabatch`."""
    return f"{_name(ctx.parent)} {ctx.info_name}".strip() if ctx.parent else ""


def _as_given(option: Any, value: Any) -> str:
    """A value of an option for messages: a switch is the flag by which it was given, `storage_options` is ""."""
    if option.name == "storage_options":
        return ""
    if not option.is_flag:
        return repr(value)
    return str(option.opts[0] if value or not option.secondary_opts else option.secondary_opts[0])


def _with_job_options(call: _JobCall) -> Callable[..., None]:
    """A function for typer with a parameter for each option, which calls `call`."""
    own = list(inspect.signature(call, eval_str=True).parameters.values())[2:]

    def command(job_file: Path | None = None, **values: Any) -> None:
        extra = {parameter.name: values.pop(parameter.name) for parameter in own}
        values.pop("help_all")
        call(job_file, {name: value for name, value in values.items() if value not in (None, [])}, **extra)

    keyword = inspect.Parameter.KEYWORD_ONLY
    argument = Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="Job file; options take precedence.")]
    parameters = [
        inspect.Parameter("job_file", keyword, default=None, annotation=argument),
        *(inspect.Parameter(o.key, keyword, default=None, annotation=o.parameter()) for o in job_options().values()),
        *(parameter.replace(kind=keyword) for parameter in own),
        inspect.Parameter("help_all", keyword, default=False, annotation=_HELP_ALL_OPTION),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__name__, command.__doc__ = call.__name__, call.__doc__
    return command


def shared_option(key: str, metavar: str | None = None) -> Any:
    """An option of a job for a command that takes no job. Its help shows no default, since the job's does not apply."""
    letters = [f"-{_SHORT[key]}"] if key in _SHORT else []
    return typer.Option(_flag(key), *letters, help=_SHARED, metavar=metavar, show_default=False)


@cache
def job_options() -> Mapping[str, JobOption]:
    """Field of `JobSpec` -> its option, in the order of the help's panels and of the fields."""
    from ..jobs.spec import JobSpec, Panel

    order = get_args(Panel)
    return {
        key: JobOption(
            name=_NAMES.get(key, key),
            key=key,
            kind=_kind(field.annotation),
            default=_shown_default(field.default),
            help=" ".join(filter(None, (field.description, _choices(field.annotation)))),
            is_off=field.default is False,
            is_required=field.is_required(),
            choices=get_args(field.annotation) if get_origin(field.annotation) is Literal else (),
            **_shown_with(field),
        )
        for key, field in sorted(
            JobSpec.model_fields.items(), key=lambda item: order.index(_shown_with(item[1])["panel"])
        )
    }


def _shown_with(field: Any) -> dict[str, Any]:
    """Panel, letter and commonness of an option, as its field declares them."""
    return {name: field.json_schema_extra[name] for name in ("panel", "short", "is_common")}


def _kind(annotation: Any) -> Any:
    """The type of a field's value on the command line: a number, a switch, a list by repetition, else text."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind in kinds:
        if kind in (bool, *_NUMBERS):
            return kind
        if kind in (tuple[str, ...], dict[str, str]):
            return list[str]
    return str


def _choices(annotation: Any) -> str:
    """A sentence with the values of a field that has a fixed set of them; "" for other fields."""
    return f"One of {', '.join(get_args(annotation))}." if get_origin(annotation) is Literal else ""


def _shown_default(default: Any) -> str:
    """A default as text; "" for none, and for defaults that the help describes itself."""
    if isinstance(default, bool):
        return "on" if default else ""
    if isinstance(default, int | float):
        return f"{default:g}"
    return default if isinstance(default, str) else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unmarked(text: str) -> str:
    """A help text with its square brackets escaped, which typer would read as markup."""
    return text.replace("[", r"\[")
