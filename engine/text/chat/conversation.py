"""The input of a chat template: messages, and the options beside them (tools, variables, how to end).

`read_tools` and `read_variables` check what a row or a job gives. Plain data: no jinja2, no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....system.untrusted import parse_json, shown, shown_name

#: Options of a job, and columns of its rows, that say how messages are rendered.
RENDERING_OPTIONS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
# Names that templates get from the renderer, and where to give them instead.
_OWN_NAMES = {
    "messages": "the messages column",
    "tools": "the option or column tools",
    "add_generation_prompt": "the option or column add_generation_prompt",
    "continue_final_message": "the option or column continue_final_message",
    "chat_template": "the option chat_template",
    "raise_exception": "a name that templates do not call",
    "strftime_now": "a name that templates do not call",
}
_TOOL_FORM = '{"type": "function", "function": {"name": …, "parameters": {…}}}'


@dataclass(frozen=True, slots=True, eq=False)
class RenderOptions:
    """Input of a template beside messages. `tools`: in OpenAI form; None for none. `variables`: by their names.

    `add_generation_prompt`: the prompt ends where an answer begins. `continue_final_message`: it ends where the text of
    the last message does, so that the answer continues it; not both.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


#: Options that ask for a new answer to the messages, without tools.
AS_USUAL = RenderOptions()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and how to render them. Rows with the same options share them."""

    messages: Sequence[Mapping[str, Any]]
    options: RenderOptions = AS_USUAL

    @property
    def open_text(self) -> str:
        """The text of the last message, where it is left open; of parts, that of the last one."""
        if not self.options.continue_final_message:
            return ""
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else str(content[-1]["text"])


def content_text(content: Any) -> str:
    """The text of a message's content: of parts their texts, one per line."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


#: Why a conversation cannot be rendered.
SPLIT_AND_CONTINUED = (
    "split_answer=True, continue_final_message=True: a last message is taken out of the prompt, or it is continued. "
    "Set one to false."
)
#: Peculiarities of conversations, some of which templates drop by design. The values are words of notes.
FINAL_ANSWER, REASONING, BLANKS = "final answers", "reasoning of earlier turns", "blanks at the ends of messages"
NAMES = "names of speakers"
#: Peculiarity of a plain prompt on a model with a chat template: it has none of the template's special tokens.
PLAIN = "plain prompts"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def peculiarities(messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> list[str]:
    """The peculiarities of a conversation that users should know of."""
    found = []
    if messages[-1].get("role") == "assistant" and not options.continue_final_message:
        found.append(FINAL_ANSWER)
    texts = [content_text(message.get("content")) for message in messages]
    if any(message.get(key) for message in messages for key in _REASONING_KEYS) or any("</think>" in t for t in texts):
        found.append(REASONING)
    if any(text != text.strip() for text in texts):
        found.append(BLANKS)
    if any(message.get("name") and message.get("role") not in ("tool", "function") for message in messages):
        found.append(NAMES)
    return found


def header_note(missing_header: str) -> str:
    """A note, as a clause, on a template whose prompts end without the text that stands before answers."""
    return (
        f"the chat template ends prompts without '{shown_name(missing_header)}', which stands before answers: rows are "
        "asked otherwise than conversations are written. Give a template that ends prompts so (--chat-template)"
    )


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Tools in OpenAI form: a list, or its JSON.

    Raises ValueError with what is wrong, as a sentence.
    """
    tools = _parsed("tools", value, f"a list of objects {_TOOL_FORM}")
    if not isinstance(tools, list):
        raise ValueError(f"tools={shown(tools)}: expected a list of objects {_TOOL_FORM}.")
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"tools[{place}]={shown(tool)}: expected an object {_TOOL_FORM}.")
        if tool.get("type") != "function":
            raise ValueError(f"tools[{place}].type={shown(tool.get('type'))}: expected 'function', as in {_TOOL_FORM}.")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise ValueError(f"tools[{place}].function={shown(function)}: expected an object with name and parameters.")
        if not isinstance(function.get("name"), str) or not function["name"]:
            name = shown(function.get("name"))
            raise ValueError(f"tools[{place}].function.name={name}: expected text such as 'get_weather'.")
        if function.get("strict"):
            raise ValueError(
                f"tools[{place}].function.strict={shown(function['strict'])}: arguments are not held to their schema. "
                "Leave strict out, or ask for an object with json_schema."
            )
    return tools


def read_variables(value: Any) -> dict[str, Any]:
    """Variables of a template (`chat_template_kwargs`): an object, or its JSON.

    Raises ValueError with what is wrong, as a sentence: also for names that the renderer sets.
    """
    example = '{"enable_thinking": false}'
    variables = _parsed("chat_template_kwargs", value, f"an object such as {example}")
    if not isinstance(variables, dict):
        raise ValueError(f"chat_template_kwargs={shown(variables)}: expected an object such as {example}.")
    for name in variables:
        if name in _OWN_NAMES:
            raise ValueError(f"chat_template_kwargs.{name}: set by the renderer. Use {_OWN_NAMES[name]}.")
        if name.endswith("_token"):
            raise ValueError(f"chat_template_kwargs.{name}: the tokenizer says what it is. Leave it out.")
    return variables


def read_message_templates(value: Any) -> list[dict[str, str]]:
    """Templates of messages (`messages_template`): a list of objects with role and content, or its JSON.

    Raises ValueError with what is wrong, as a sentence.
    """
    form = '{"role": "user", "content": "{{ question }}"}'
    messages = _parsed("messages_template", value, f"a list of objects {form}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages_template={shown(messages)}: expected a list of objects {form}.")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"messages_template[{place}]={shown(message)}: expected role and content, as in {form}.")
        for key in ("role", "content"):
            if not isinstance(message[key], str) or not message[key]:
                raise ValueError(f"messages_template[{place}].{key}={shown(message[key])}: expected text.")
    return messages


def read_line_breaks(text: str) -> str:
    r"""The template that an option's text means: `\n` is a line break in it, and `\\n` is the two characters."""
    return re.sub(r"\\(\\n|n)", lambda found: "\n" if found[1] == "n" else found[1], text)


def write_line_breaks(template: str) -> str:
    """The text of which `read_line_breaks` makes this template."""
    return template.replace("\\n", "\\\\n")


def is_template_text(value: str) -> bool:
    """Whether a chat template is given as its text, not as the place of a file."""
    return any(sign in value for sign in ("{{", "{%", "\n"))


def written(given: Any, found: Any) -> str:
    """JSON of what a reader has found in a value; text stays as it is. Raises ValueError for what JSON cannot hold."""
    try:
        return given if isinstance(given, str) else json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected values that JSON has ({error})") from None


def _parsed(name: str, value: Any, expected: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: not JSON ({error}). Write {expected}.") from None
