"""The sandbox of jinja2 in which templates are rendered, and the loop that renders many inputs in confined processes.

Templates are part of model and adapter folders or of jobs, hence untrusted code: they see plain JSON values only and
cannot reach Python objects, files or the machine, and they are rendered within limits of computing time, memory and
length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....system.confinement import ConfinedError, confined
from ....system.untrusted import printable, shortened
from ...errors import TokenizerError

MAX_TEMPLATE_CHARACTERS = 128 << 10  # the longest of real models have 30,000
MAX_RENDERED_CHARACTERS = 32 << 20  # more than a context of a million tokens takes
CPU_S = 3
MEMORY_BYTES = 1 << 30
# Limits of one answer of the confined process: rows, seconds, characters.
_BATCH_ROWS, BATCH_S, BATCH_CHARACTERS = 256, 1.0, 32 << 20
# Seconds that a template may take for its first prompts together, and for each one more; real ones take 0.0001.
_FREE_S, _S_PER_PROMPT = 12.0, 0.1
_MAX_MESSAGE_CHARACTERS = 500
_Item = TypeVar("_Item")


class _Unfolded(CodeGenerator):
    """Compiles without computing constants: `{{ 9**(9**9) }}` would take the compiler for good."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:  # noqa: N802
        """Options such as `{% autoescape … %}` are evaluated by the compiler, whatever their expression is."""
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            raise jinja2.TemplateSyntaxError("an option that is no constant", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's environment with what Hugging Face documents for templates. `now`: the time that `strftime_now` formats;
    None for the clock's. `options`: further options of jinja2's environment.
    """

    code_generator_class = _Unfolded

    def __init__(self, now: datetime | None, **options: Any) -> None:
        blocks = {"trim_blocks": True, "lstrip_blocks": True}
        super().__init__(extensions=[_GenerationBlock, loopcontrols], **blocks | options)
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: plain JSON. jinja2's own filter would escape `<`, `>`, `&` and quotes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ConfinedTemplate:
    """A template that a task of the confined process renders. It is given up once it has taken too long.

    `task`: module of the task. Its answer is a list, of one pair for each of the first inputs (whether it is an error,
    and what was rendered or why nothing was), and the seconds that the task took. `name`, `whom`: the template and one
    of its inputs, in errors.
    """

    def __init__(self, task: str, name: str, whom: str) -> None:
        self._task = task
        self._name, self._whom = name, whom
        self._seconds = 0.0
        self._num_prompts = 0

    def _answers(self, items: Sequence[_Item], payload: Callable[[Sequence[_Item]], Any]) -> list[Any | TokenizerError]:
        """The outcome of the task for each item, or why there is none. `payload`: makes the task's input of some
        items. Raises `NoProcessError`.
        """
        found: list[Any | TokenizerError] = []
        batch_rows = _BATCH_ROWS
        while len(found) < len(items):
            if self._seconds > _FREE_S + _S_PER_PROMPT * self._num_prompts:
                given_up = TokenizerError(f"{self._name} has taken too long on others and is not tried again")
                return found + [given_up] * (len(items) - len(found))
            batch = items[len(found) : len(found) + batch_rows]
            try:
                answers, seconds = confined().run(self._task, payload(batch), CPU_S, MEMORY_BYTES)
            except ConfinedError as error:
                self._seconds += CPU_S
                if len(batch) == 1:
                    found.append(TokenizerError(f"{self._name} fails on {self._whom}: {error}"))
                batch_rows = 1  # it is one of them
                continue
            self._seconds += seconds
            self._num_prompts += len(answers)
            found += [TokenizerError(value) if is_error else value for is_error, value in answers]
        return found


def generated(template: jinja2.Template, values: Mapping[str, Any], name: str, whom: str) -> str:
    """The text that a template makes of values. Raises `TokenizerError`, which calls the template `name` and the values
    `whom`.
    """
    parts, num_characters = [], 0
    try:
        for part in template.generate(values):
            parts.append(part)
            num_characters += len(part)
            if num_characters > MAX_RENDERED_CHARACTERS:
                break
    except MemoryError:
        raise
    except Exception as error:
        # A template can fail in as many ways as any program; none of them is ours.
        said = shortened(printable(str(error)), _MAX_MESSAGE_CHARACTERS)
        raise TokenizerError(f"{name} refuses {whom} ({said})") from None
    if num_characters > MAX_RENDERED_CHARACTERS:
        raise TokenizerError(f"{name} makes more than {MAX_RENDERED_CHARACTERS} characters of {whom}")
    return "".join(parts)
