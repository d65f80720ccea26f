"""Renders chat templates: messages in, one prompt out, in jinja2's sandbox.

Templates are part of model and adapter folders, hence untrusted code: they see plain JSON values only and cannot reach
Python objects, files or the machine, and they are rendered in a confined process, within limits of computing time,
memory and length. `run` is the task of that process. The environment offers what Hugging Face documents for templates
(`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop controls), and a test compares the outcome with
transformers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..confinement import ConfinedError, confined
from ..errors import ChatTemplateError, ModelFilesError
from ..untrusted import STOPS, printable, shortened, shown_name

MAX_TEMPLATE_CHARACTERS = 128 << 10  # the longest of real models have 30,000
MAX_RENDERED_CHARACTERS = 32 << 20  # more than a context of a million tokens takes
CPU_S = 3
MEMORY_BYTES = 1 << 30
_TASK = "engine.text.chat_template"
# Names under which a model's thoughts travel in a message; the first is what templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# One answer of the confined process.
_BATCH_ROWS, _BATCH_S, _BATCH_CHARACTERS = 256, 1.0, 32 << 20
# Seconds that a template may take for its first prompts together, and for each one more; real ones take 0.0001.
_FREE_S, _S_PER_PROMPT = 12.0, 0.1
_MAX_MESSAGE_CHARACTERS = 500


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


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Unfolded


class ChatTemplate:
    """One template. `now` is what `strftime_now` formats, so that a resumed job renders the same.

    Raises `ModelFilesError` when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelFilesError(
                f"chat template: {len(source)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}. Repair it."
            )
        try:
            _compiled(source, now)
        except STOPS:
            raise
        except Exception as error:
            # Beside its own errors those of Python's compiler: too many nested blocks, recursion.
            raise ModelFilesError(
                f"chat template: not a valid jinja2 template ({shown_name(str(error))}). Repair it, or give prompts "
                "as text."
            ) from None
        self._given = (source, dict(special_tokens), None if now is None else now.isoformat())
        self._seconds = 0.0
        self._num_prompts = 0

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt. Keys whose value is None are dropped, as if they were not there.

        Raises `ChatTemplateError` when the template refuses these messages, fails on them or takes too long.
        """
        prompt = self.render_all([messages])[0]
        if isinstance(prompt, ChatTemplateError):
            raise prompt
        return prompt

    def render_all(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | ChatTemplateError]:
        """The prompt of each conversation, or what `render` raises. Raises `NoProcessError`."""
        prompts: list[str | ChatTemplateError] = []
        batch_rows = _BATCH_ROWS
        while len(prompts) < len(conversations):
            if self._seconds > _FREE_S + _S_PER_PROMPT * self._num_prompts:
                given_up = ChatTemplateError("the chat template has taken too long on others and is not tried again")
                return prompts + [given_up] * (len(conversations) - len(prompts))
            batch = conversations[len(prompts) : len(prompts) + batch_rows]
            try:
                prompts += self._rendered(batch)
            except ConfinedError as error:
                self._seconds += CPU_S
                if len(batch) == 1:
                    prompts.append(ChatTemplateError(f"the chat template fails on them: {error}"))
                batch_rows = 1  # it is one of them
        return prompts

    def _rendered(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | ChatTemplateError]:
        """The prompts of one or more of these, from the first on. Raises `ConfinedError`, `NoProcessError`."""
        prepared = [[_prepared(message) for message in messages] for messages in conversations]
        answers, seconds = confined().run(_TASK, [*self._given, prepared], CPU_S, MEMORY_BYTES)
        self._seconds += seconds
        self._num_prompts += len(answers)
        return [ChatTemplateError(text) if is_refusal else text for is_refusal, text in answers]


def run(payload: Any) -> tuple[list[tuple[bool, str]], float]:
    """The task of the confined process: source, special tokens, time, conversations.

    Prompts of the first of them, as many as fit into an answer, or with True why there is none; and seconds.
    """
    source, special_tokens, now, conversations = payload
    start_s, num_characters = time.process_time(), 0
    template = _compiled(source, None if now is None else datetime.fromisoformat(now))
    answers: list[tuple[bool, str]] = []
    for messages in conversations:
        answers.append(_render_one(template, messages, special_tokens))
        num_characters += len(answers[-1][1])
        if time.process_time() - start_s > _BATCH_S or num_characters > _BATCH_CHARACTERS:
            break
    return answers, time.process_time() - start_s


def _render_one(template: jinja2.Template, messages: Any, special_tokens: Mapping[str, str]) -> tuple[bool, str]:
    parts, num_characters = [], 0
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        for part in template.generate(**values, **special_tokens):
            parts.append(part)
            num_characters += len(part)
            if num_characters > MAX_RENDERED_CHARACTERS:
                return True, f"the chat template makes more than {MAX_RENDERED_CHARACTERS} characters of them"
        return False, "".join(parts)
    except MemoryError:
        raise
    except Exception as error:
        # A template can fail in as many ways as any program; none of them is ours.
        return True, f"the chat template refuses them ({shortened(printable(str(error)), _MAX_MESSAGE_CHARACTERS)})"


@lru_cache(maxsize=16)
def _compiled(source: str, now: datetime | None) -> jinja2.Template:
    """Raises whatever jinja2 and Python's compiler raise."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    return environment.from_string(source)


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
