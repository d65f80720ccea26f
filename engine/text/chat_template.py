"""Renders chat templates: messages in, one prompt out, in jinja2's sandbox.

Templates are part of model and adapter folders, hence untrusted code: they see plain JSON values only and cannot reach
Python objects, files or the machine. The environment offers what Hugging Face documents for chat templates
(`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop controls), and a test compares the outcome with
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ChatTemplateError, ModelFilesError
from ..untrusted import STOPS, shown_name

# Names under which a model's thoughts travel in a message; the first is what templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


MAX_TEMPLATE_CHARACTERS = 256 << 10  # the longest of real models have 30,000


class _Unfolded(CodeGenerator):
    """Compiles without computing constants: `{{ 9**(9**9) }}` would take the compiler for good.

    What a template costs when it is rendered is another matter.
    """

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


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Unfolded


class ChatTemplate:
    """One compiled template. `now` is what `strftime_now` formats, so that a resumed job renders the same.

    Raises `ModelFilesError` when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelFilesError(
                f"chat template: {len(source)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}. Repair it."
            )
        try:
            self._template = environment.from_string(source)
        except STOPS:
            raise
        except Exception as error:
            # Beside its own errors those of Python's compiler: too many nested blocks, recursion.
            raise ModelFilesError(
                f"chat template: not a valid jinja2 template ({shown_name(str(error))}). Repair it, or give prompts "
                "as text."
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt. Keys whose value is None are dropped, as if they were not there.

        Raises `ChatTemplateError` when the template refuses these messages or fails on them.
        """
        try:
            return self._template.render(
                messages=[_prepared(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:
            # A template can fail in as many ways as any program; none of them is ours.
            raise ChatTemplateError(f"the chat template refuses them ({error})") from None


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = next((given[key] for key in _REASONING_KEYS if key in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape `<`, `>`, `&` and quotes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
