"""Renders chat templates: messages and tools in, one prompt out, in the sandbox of `sandbox.py`.

Templates are part of model and adapter folders, hence untrusted code. `run` is the task of the confined process in
which they are rendered. A test compares the outcome with transformers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes

from ....system.untrusted import STOPS, shown_name
from ...errors import ModelFilesError, TokenizerError
from .conversation import AS_USUAL, Conversation, RenderOptions, content_text
from .left_out import Messages, left_out
from .sandbox import BATCH_CHARACTERS, BATCH_S, MAX_TEMPLATE_CHARACTERS, ConfinedTemplate, Sandbox, generated

_TASK = "engine.text.chat.chat_template"
_NAMED = ("the chat template", "them")
# Names under which a model's thoughts travel in a message; the first is what templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Marks the end of a message that is left open: a code point for private use, and a blank that templates may trim.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
# Names that the renderer gives to a template, beside the template's own variables.
_RENDERED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")


class ChatTemplate(ConfinedTemplate):
    """One template. `now` is what `strftime_now` formats, so that a resumed job renders the same: a time of day, whose
    zone templates do not see.

    Raises `ModelFilesError` when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        super().__init__(_TASK, *_NAMED)
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelFilesError(
                f"chat template: {len(source)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}. Repair it."
            )
        # Templates see no zone, as in transformers: `%Z` and `%z` are empty. Times of two zones may be one instant,
        # and are not one time of day.
        now = None if now is None else now.replace(tzinfo=None)
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
        #: Source, special tokens and time, as tasks of confined processes get them.
        self.given = (source, dict(special_tokens), None if now is None else now.isoformat())

    def render(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions = AS_USUAL) -> str:
        """The prompt. Keys of messages whose value is None are dropped, as if they were not there.

        Raises `TokenizerError` when the template refuses these messages, fails on them or takes too long; also when
        it does not have one of the variables.
        """
        prompt = self.render_all([Conversation(messages, options)])[0]
        if isinstance(prompt, TokenizerError):
            raise prompt
        return prompt

    def render_all(
        self, conversations: Sequence[Conversation], *, must_be_whole: bool = False
    ) -> list[str | TokenizerError]:
        """The prompt of each conversation, or what `render` raises. `must_be_whole`: an error, too, for a conversation
        of which a text, a part, a tool or a call does not reach the prompt (see `left_out`). Raises `NoProcessError`.
        """
        return self._answers(conversations, partial(self._payload, must_be_whole=must_be_whole))

    def _payload(self, conversations: Sequence[Conversation], must_be_whole: bool) -> list[Any]:
        """The input of the task. Options that conversations share are in it once."""
        numbers: dict[RenderOptions, int] = {}
        prepared = [
            ([_prepared(message) for message in one.messages], numbers.setdefault(one.options, len(numbers)))
            for one in conversations
        ]
        options = [(o.tools, o.variables, o.add_generation_prompt, o.continue_final_message) for o in numbers]
        return [*self.given, prepared, options, must_be_whole]


def run(payload: Any) -> tuple[list[tuple[bool, str]], float]:
    """The task of the confined process: source, special tokens, time, conversations, options, and whether prompts
    must be whole. A conversation is its messages and the number of its options, which are the values of
    `RenderOptions`.

    Prompts of the first of them, as many as fit into an answer, or with True why there is none; and seconds.
    """
    source, special_tokens, now, conversations, options, must_be_whole = payload
    start_s, num_characters = time.process_time(), 0
    template = _compiled(source, None if now is None else datetime.fromisoformat(now))
    given = [RenderOptions(*values) for values in options]
    answers: list[tuple[bool, str]] = []
    for messages, number in conversations:
        try:
            _check_variables(source, given[number].variables)
            render = partial(_render_one, template, special_tokens)
            prompt = render(messages, given[number])
            problem = left_out(render, messages, given[number], prompt) if must_be_whole else None
            answers.append((False, prompt) if problem is None else (True, problem))
        except TokenizerError as error:
            answers.append((True, str(error)))
        num_characters += len(answers[-1][1])
        if time.process_time() - start_s > BATCH_S or num_characters > BATCH_CHARACTERS:
            break
    return answers, time.process_time() - start_s


def render_here(given: Sequence[Any], messages: Messages, options: RenderOptions) -> str:
    """The prompt, rendered in this process, which is confined. `given`: source, special tokens and time of the
    template. Raises `TokenizerError`.
    """
    source, special_tokens, now = given
    template = _compiled(source, None if now is None else datetime.fromisoformat(now))
    # Variables of a job that this template does not have are named elsewhere.
    return _render_one(template, special_tokens, list(map(_prepared, messages)), options)


class _Parts(list[Any]):
    """A content in parts. A template that writes it as it is takes no parts, and would write Python."""

    def __str__(self) -> str:
        raise jinja2.TemplateError("content in parts, written as it is")


class _Part(dict[str, Any]):
    __str__ = _Parts.__str__


def _render_one(
    template: jinja2.Template, special_tokens: Mapping[str, str], messages: Messages, options: RenderOptions
) -> str:
    """The prompt. Content in parts is given as parts; a template that does not take them gets their texts, one per
    line.
    """
    values = {"documents": None, **special_tokens, **options.variables}
    if any(isinstance(message.get("content"), list) for message in messages):
        with suppress(TokenizerError):
            return _rendered_to_its_end(template, values, _in_parts(messages), options)
        messages = [
            {**message, "content": content_text(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
    return _rendered_to_its_end(template, values, messages, options)


def _in_parts(messages: Messages) -> Messages:
    return [
        {**message, "content": _Parts(_Part(part) if isinstance(part, dict) else part for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _rendered_to_its_end(
    template: jinja2.Template, values: Mapping[str, Any], messages: Messages, options: RenderOptions
) -> str:
    rendered = {"tools": options.tools, "add_generation_prompt": options.add_generation_prompt}
    if not options.continue_final_message:
        return generated(template, {**values, **rendered, "messages": messages}, *_NAMED)
    mark = _mark_for(messages, options)
    opened, last = _left_open(messages, mark)
    return _ended_at(mark, generated(template, {**values, **rendered, "messages": opened}, *_NAMED), last)


def _check_variables(source: str, variables: Mapping[str, Any]) -> None:
    """Variables that a template does not have would change nothing, unseen."""
    unknown = sorted(variables.keys() - _names(source)) if variables else []
    if unknown:
        raise TokenizerError(f"the chat template has no variable {shown_name(unknown[0])!r} (chat_template_kwargs)")


def _mark_for(messages: Messages, options: RenderOptions) -> str:
    """A mark that is in nothing that is rendered."""
    taken = json.dumps([messages, options.tools, options.variables], ensure_ascii=False)
    return next(chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)


def _left_open(messages: Messages, mark: str) -> tuple[Messages, str]:
    """The messages with the mark at the end of the last one's text, and that text. Of parts it is the last one's."""
    content: Any = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return [*messages[:-1], {**messages[-1], "content": f"{content}{mark} "}], content
    places = [place for place, part in enumerate(content or ()) if isinstance(part, dict) and "text" in part]
    if not places:
        raise TokenizerError("continue_final_message: the last message has no text to continue")
    parts, last = type(content)(content), content[places[-1]]
    parts[places[-1]] = type(last)({**last, "text": f"{last['text']}{mark} "})
    return [*messages[:-1], {**messages[-1], "content": parts}], last["text"]


def _ended_at(mark: str, prompt: str, last: str) -> str:
    """The prompt up to the mark, as transformers ends it: where the template trims the last message, blanks before the
    end are dropped. `last`: the text that is left open.
    """
    place = prompt.rfind(mark)
    if place < 0 or last.strip() not in prompt:
        raise TokenizerError("continue_final_message: the chat template leaves out text of the last message")
    if mark in prompt[:place]:
        raise TokenizerError("continue_final_message: the chat template writes the last message more than once")
    is_trimmed = not prompt.startswith(f"{mark} ", place)
    return prompt[:place].rstrip() if is_trimmed else prompt[:place]


@lru_cache(maxsize=16)
def _names(source: str) -> frozenset[str]:
    """Names that a template reads, its own variables too."""
    found = Sandbox(None).parse(source).find_all(nodes.Name)
    return frozenset(node.name for node in found if node.ctx == "load").difference(_RENDERED)


@lru_cache(maxsize=16)
def _compiled(source: str, now: datetime | None) -> jinja2.Template:
    """Raises whatever jinja2 and Python's compiler raise."""
    return Sandbox(now).from_string(source)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = next((given[key] for key in _REASONING_KEYS if key in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}
