"""Renders a job's own templates: the columns of a row in, one or more texts out, in the sandbox of `sandbox.py`.

A template is strict. It names columns that the input has, and what it prints is text or a number: a null, a list or a
struct that is printed as it is makes an error, because Python's words for them (`None`, `['a']`) belong into no prompt.
`run` is the task of the confined process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes

from ....system.confinement import ConfinedError, confined
from ....system.untrusted import printable, shown_name
from ...errors import ModelFilesError, TokenizerError
from .sandbox import (
    BATCH_CHARACTERS,
    BATCH_S,
    CPU_S,
    MAX_TEMPLATE_CHARACTERS,
    MEMORY_BYTES,
    ConfinedTemplate,
    Sandbox,
    generated,
    to_json,
)

#: Name under which a template has all columns of its row: `row['Question text']`.
ROW = "row"
_TASK = "engine.text.chat.prompt_template"
_NAMED = ("the prompt template", "this row")


class PromptTemplate(ConfinedTemplate):
    """Templates that are rendered with the columns of a row, each to a text. `sources`: their texts. `now`: the time
    that `strftime_now` formats, by default the clock's.
    """

    def __init__(self, sources: Sequence[str], now: datetime | None = None) -> None:
        super().__init__(_TASK, *_NAMED)
        self._given = (list(sources), None if now is None else now.replace(tzinfo=None).isoformat())

    def render_all(self, rows: Sequence[Mapping[str, Any]]) -> list[list[str] | TokenizerError]:
        """The texts of each row, one for each source, or why there are none. `rows`: values of columns, of JSON's
        types. Raises `NoProcessError`.
        """
        return self._answers(rows, lambda batch: ["render", *self._given, list(map(dict, batch))])


def columns_read(source: str, there: Sequence[str]) -> tuple[list[str], list[str]]:
    """The columns that a template reads, of those that are `there`, and the names in it that stand for none. Raises
    what `names_in` raises.
    """
    names, of_row = names_in(source)
    read = [name for name in names if name in there]
    unknown = [name for name in names if name not in there and name not in _GIVEN]
    if ROW not in there:
        read += [name for name in of_row if name in there]
        unknown += [name for name in of_row if name not in there]
    return sorted(set(read)), list(dict.fromkeys(unknown))


@lru_cache(maxsize=64)
def names_in(source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The variables that a template reads and does not set itself, and the columns that it reads as `row['…']`.

    Raises `ModelFilesError`, with the line, for a text that is no template or reads others, and `NoProcessError`.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ModelFilesError(f"{len(source)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}")
    try:
        problem, names, of_row = confined().run(_TASK, ["names", source], CPU_S, MEMORY_BYTES)
    except ConfinedError as error:
        raise ModelFilesError(f"not a valid jinja2 template ({error})") from None
    if problem:
        raise ModelFilesError(problem)
    return tuple(names), tuple(of_row)


def run(payload: Any) -> Any:
    """The task of the confined process. `["names", source]`: what is wrong with a template (""), its names, and its
    columns by `row`. `["render", sources, time, rows]`: see `ConfinedTemplate`.
    """
    operation, *given = payload
    return _names(*given) if operation == "names" else _rendered(*given)


def _names(source: str) -> tuple[str, list[str], list[str]]:
    # jinja2 leaves out the names of globals, which columns may have.
    environment = _RowSandbox(None)
    try:
        tree = environment.parse(source)
        environment.from_string(source)
        environment.globals.clear()
        names = meta.find_undeclared_variables(tree)
    except jinja2.TemplateSyntaxError as error:
        return f"not a valid jinja2 template, line {error.lineno}: {printable(error.message or '')}", [], []
    except MemoryError:
        raise
    except Exception as error:
        # Errors of Python's compiler: too many nested blocks, recursion.
        return f"not a valid jinja2 template ({shown_name(str(error))})", [], []
    if other := next(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)), None):
        return f"line {other.lineno} reads another template; a job has one. Write its text in its place", [], []
    if ROW not in names:
        return "", sorted(names), []
    of_row, line = _columns_of_row(tree)
    if line:
        return f"line {line}: {ROW} stands for all columns, expected one of them, as in {ROW}['question']", [], []
    return "", sorted(names), of_row


def _columns_of_row(tree: nodes.Template) -> tuple[list[str], int]:
    """Columns that are read as `row['…']` or `row.…`, and the line in which `row` is used otherwise, else 0."""
    found: dict[int, str] = {}
    for field in tree.find_all(nodes.Getattr):
        found[id(field.node)] = field.attr
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            found[id(item.node)] = item.arg.value
    used = [node for node in tree.find_all(nodes.Name) if node.name == ROW and node.ctx == "load"]
    columns = sorted({found[id(node)] for node in used if id(node) in found})
    return columns, next((node.lineno for node in used if id(node) not in found), 0)


def _rendered(
    sources: Sequence[str], now: str | None, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[bool, Any]], float]:
    start_s, num_characters = time.process_time(), 0
    compiled = [_compiled(source, now) for source in sources]
    answers: list[tuple[bool, Any]] = []
    for row in rows:
        try:
            held = {name: _held(value, name) for name, value in row.items()}
            texts = [generated(template, {ROW: _Struct(held), **held}, *_NAMED) for template in compiled]
            answers.append((False, texts))
            num_characters += sum(map(len, texts))
        except TokenizerError as error:
            answers.append((True, str(error)))
        if time.process_time() - start_s > BATCH_S or num_characters > BATCH_CHARACTERS:
            break
    return answers, time.process_time() - start_s


@lru_cache(maxsize=64)
def _compiled(source: str, now: str | None) -> jinja2.Template:
    return _RowSandbox(None if now is None else datetime.fromisoformat(now)).from_string(source)


class _RowSandbox(Sandbox):
    """The sandbox for the values of a row. Line breaks stay as they are written, also behind blocks and at the end."""

    def __init__(self, now: datetime | None) -> None:
        kept = {"trim_blocks": False, "lstrip_blocks": False, "keep_trailing_newline": True}
        super().__init__(now, undefined=jinja2.StrictUndefined, finalize=_printed, **kept)
        self.filters["tojson"] = lambda value, **options: to_json(_without_nulls(value), **options)
        self.tests["none"] = lambda value: value is None or isinstance(value, _Null)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a struct, also one with the name of a method, such as `items`; else what jinja2 finds."""
        return obj[attribute] if isinstance(obj, _Struct) and attribute in obj else super().getattr(obj, attribute)


# jinja2 and Python name the type of a value in errors.
class _Null:
    """A null of a row: None to tests and comparisons, and an error where it would be printed. `place`: its column, and
    the way to it in a list or struct.
    """

    __module__, __qualname__ = "builtins", "null"

    def __init__(self, place: str) -> None:
        self._place = place

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __str__(self) -> str:
        raise jinja2.TemplateError(
            f"{self._place} is null; say what stands for it, as in {{{{ {self._place} or '' }}}}, or fill it in"
        )

    __repr__ = __str__


class _List(list[Any]):
    """A list of a row, which is no text."""

    __module__ = "builtins"

    def __str__(self) -> str:
        raise _not_text("list")

    __repr__ = __str__


class _Struct(dict[str, Any]):
    """A struct or a map of a row, which is no text."""

    __module__ = "builtins"

    def __str__(self) -> str:
        raise _not_text("struct")

    __repr__ = __str__


_Null.__name__, _List.__name__, _Struct.__name__ = "null", "list", "struct"


def _held(value: Any, place: str) -> Any:
    """A value of a row as templates get it."""
    if value is None:
        return _Null(place)
    if isinstance(value, list):
        return _List(_held(item, f"{place}[{number}]") for number, item in enumerate(value))
    if isinstance(value, dict):
        return _Struct({key: _held(item, f"{place}.{key}") for key, item in value.items()})
    return value


def _without_nulls(value: Any) -> Any:
    """A value with None for each null, for JSON."""
    if isinstance(value, _Null):
        return None
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items()}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _printed(value: Any) -> Any:
    """The value that `{{ … }}` prints. Raises `TemplateError` for one that is no text or number."""
    if isinstance(value, str | int | float | _Null | _List | _Struct | jinja2.Undefined):
        return value
    raise _not_text("null" if value is None else type(value).__name__)


def _not_text(kind: str) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"prints a {kind} as it is; make text of it, as with join or tojson")


_GIVEN = frozenset({ROW, *_RowSandbox(None).globals})
