"""Finds out what a chat template does with every conversation: whether its prompts end where answers begin, and what it
drops by design. `run` is the task of a confined process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....system.confinement import ConfinedError, ConfinedProcess, confined
from ....system.untrusted import read_regular
from ...errors import TokenizerError
from ...tokenizer_files import ADDED, SETTINGS, SPECIAL_MAP, TEMPLATE, TOOL_TEMPLATE, TokenizerFiles
from ..chat.chat_template import ChatTemplate, render_here
from ..chat.conversation import BLANKS, NAMES, REASONING, RenderOptions
from ..chat.sandbox import CPU_S, MEMORY_BYTES
from .tokenizer import DEFAULT_TEMPLATE, templates_of
from .tokenizer_settings import read_settings

_TASK = "engine.text.tokenizers.template_probe"
_QUESTION, _ANSWER, _THOUGHT, _NAME = "What is q7q?", "It is a7a.", "Think t7t.", "n7n"
# Files that a template needs: none of them is large.
_FILES = (SETTINGS, SPECIAL_MAP, ADDED, TEMPLATE, TOOL_TEMPLATE)
_MAX_FILE_BYTES = 32 << 20


def chat_template_of(folder: Path, base: Path) -> ChatTemplate | None:
    """The chat template of an adapter's folder, or else its base's, read without a tokenizer. Raises `ModelFilesError`
    and `OSError`. For confined processes.
    """
    own, of_base = _small_files(folder), _small_files(base)
    home = own if SETTINGS in own.contents else of_base
    special = read_settings(home.json(SETTINGS), home.json(SPECIAL_MAP), {}, {}).special_tokens
    return templates_of(own, of_base, special).get(DEFAULT_TEMPLATE)


def _small_files(folder: Path) -> TokenizerFiles:
    there = (name for name in _FILES if (folder / name).is_file())
    return TokenizerFiles(folder, {name: read_regular(folder / name, _MAX_FILE_BYTES) for name in there})


def template_traits(
    template: ChatTemplate | None, variables: Mapping[str, Any] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Traits that all prompts of a template with these variables have: the text that stands before an answer in a
    conversation and is missing at the end of prompts, "" where nothing is missing; and parts of conversations that the
    template drops by design, in words. Traits that cannot be found out are not claimed: a template that takes no simple
    conversation has none. Raises `NoProcessError`.
    """
    if template is None:
        return "", ()
    return _found([[*template.given], dict(variables or {})], confined())


def missing_header_of(folder: Path, base: Path, process: ConfinedProcess) -> str:
    """The missing header, as in `template_traits`, of the template of an adapter's folder, or else its base's, read by
    `process`.
    """
    return _found([[str(folder.absolute()), str(base.absolute())], None], process)[0]


def _found(payload: Any, process: ConfinedProcess) -> tuple[str, tuple[str, ...]]:
    try:
        missing_header, drops = process.run(_TASK, payload, CPU_S, MEMORY_BYTES)
    except ConfinedError:
        return "", ()
    return missing_header, tuple(drops)


def run(payload: Any) -> tuple[str, list[str]]:
    """The task of the confined process: source, special tokens and time of a template, and variables; or two folders,
    and None. The result of `template_traits`.
    """
    given, variables = payload
    if variables is None:
        template = chat_template_of(*map(Path, given))
        if template is None:
            return "", []
        given, variables = template.given, {}

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        try:
            return render_here(given, messages, RenderOptions(None, variables, add_generation_prompt))
        except TokenizerError:
            return ""

    asks, answers = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    return _missing_header(render, asks, answers), _drops(render, asks, answers)


def _missing_header(render: Any, asks: dict[str, Any], answers: dict[str, Any]) -> str:
    """The text that stands before an answer and that prompts lack.

    A prompt is the rendering without generation prompt, and more. The addition must share its beginning with what
    stands before an answer: all of it in most templates, the beginning where a model goes on by itself (channels), the
    beginning and more where the template begins reasoning.
    """
    closed, prompt, answered = render([asks]), render([asks], add_generation_prompt=True), render([asks, answers])
    place = answered.rfind(_ANSWER)
    if not prompt or place < 0 or _QUESTION not in prompt:
        return ""
    before = answered[:place]
    if prompt.startswith(before.rstrip()):
        return ""
    num_closed = _num_same(closed, before)
    return "" if _num_same(prompt, before) > num_closed else before[num_closed:]


def _num_same(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _drops(render: Any, asks: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """Parts of conversations that the template drops by design, in words."""
    drops = []
    inline = {**answers, "content": f"<think>{_THOUGHT}</think>{_ANSWER}"}
    beside = {**answers, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    earlier = [found for one in (inline, beside) if _ANSWER in (found := render([asks, one, asks]))]
    if any(_THOUGHT not in found for found in earlier):
        drops.append(REASONING)
    padded = f"  {_QUESTION}  "
    found = render([{**asks, "content": padded}])
    if _QUESTION in found and padded not in found:
        drops.append(BLANKS)
    found = render([{**asks, "name": _NAME}])
    if _QUESTION in found and _NAME not in found:
        drops.append(NAMES)
    return drops
