"""What templates are given beside messages: as transformers gives it, checked before, and never passed over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama4 import processing_llama4
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from lorabatch.engine.errors import TokenizerError
from lorabatch.engine.text.chat.chat_template import ChatTemplate
from lorabatch.engine.text.chat.conversation import Conversation, RenderOptions, read_tools, read_variables

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}
# Models differ in where tools stand, in how their JSON is spelled, and in how calls and results are shown.
STYLES = {
    "llama 4": processing_llama4.chat_template,
    "tools in tags": (
        "{%- if tools %}\n"
        "    {{- '<|im_start|>system\\n' }}\n"
        "    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}\n"
        '    {{- "# Tools\\n<tools>" }}\n'
        "    {%- for tool in tools %}\n        {{- '\\n' ~ (tool | tojson) }}\n    {%- endfor %}\n"
        "    {{- '\\n</tools><|im_end|>\\n' }}\n"
        "{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.tool_calls %}\n"
        "        {%- for call in message.tool_calls %}\n"
        "            {%- if call.function %}{% set call = call.function %}{% endif %}\n"
        '            {{- \'<tool_call>\\n{"name": "\' ~ call.name ~ \'", "arguments": \' }}\n'
        "            {{- call.arguments if call.arguments is string else call.arguments | tojson }}\n"
        "            {{- '}\\n</tool_call>' }}\n"
        "        {%- endfor %}\n"
        "    {%- elif message.role != 'system' or not tools %}\n"
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endif %}"
    ),
    "tools before the last question": (
        "{{ bos_token }}{% set asks = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}"
        "{% if tools is not none and m == asks[-1] %}[AVAILABLE_TOOLS] [{% for t in tools %}"
        '{"type": "function", "function": {{ t.function.items() | list | tojson }}}'
        "{{ ', ' if not loop.last else '' }}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ m.content }} [/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "tools as text": (
        "{% if tools is not none %}{% for tool in tools %}{{ tool.function.name }}("
        "{% for name, kind in tool.function.parameters.properties.items() %}{{ name }}: {{ kind.type }} {% endfor %})\n"
        "{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content if m.content else m.tool_calls | tojson }}\n{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    ),
}


def get_weather(city: str, days: int = 1) -> str:
    """The weather <to come>.

    Args:
        city: Its name, e.g. "Zürich" & others.
        days: How many.
    """
    return f"{city} {days}"


TOOLS: list[dict[str, Any]] = [
    get_json_schema(get_weather),
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": "Will it rain?"}],
    "with a system message": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}],
    "after a call": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": false}'},
        {"role": "user", "content": "And snow?"},
    ],
}


def oracle(source: str, messages: list[dict[str, Any]], options: RenderOptions) -> str:
    """The prompt by transformers."""
    ((prompt,), _) = render_jinja_template(
        [messages],
        tools=options.tools,
        chat_template=source,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **options.variables,
        **SPECIAL,
    )
    return prompt


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_tools_are_rendered_as_transformers_renders_them(style: str, chat: str, tools: Any) -> None:
    for options in (RenderOptions(tools), RenderOptions(tools, add_generation_prompt=False)):
        expected = oracle(STYLES[style], CHATS[chat], options)
        assert ChatTemplate(STYLES[style], SPECIAL).render(CHATS[chat], options) == expected
        assert not tools or "get_weather" in expected


@pytest.mark.parametrize(
    ("style", "variables"),
    [
        ("tools in tags", {"enable_thinking": False}),
        ("tools in tags", {"enable_thinking": True}),
        ("llama 4", {"tools_in_user_message": False, "date_string": "1 May 2025"}),
    ],
)
def test_variables_are_those_of_the_template(style: str, variables: dict[str, Any]) -> None:
    chat, options = CHATS["with a system message"], RenderOptions(TOOLS, variables)
    assert ChatTemplate(STYLES[style], SPECIAL).render(chat, options) == oracle(STYLES[style], chat, options)


def test_a_variable_that_the_template_does_not_have_is_refused_and_documents_are_always_there() -> None:
    template = ChatTemplate(STYLES["tools in tags"], SPECIAL)
    with pytest.raises(TokenizerError, match=r"no variable 'enable_thinkin' \(chat_template_kwargs\)"):
        template.render(CHATS["a question"], RenderOptions(variables={"enable_thinkin": False}))
    documents = RenderOptions(variables={"documents": [{"title": "a"}]})
    source = "{{ messages[0].content }}{{ documents[0].title }}"
    assert ChatTemplate(source, SPECIAL).render(CHATS["a question"], documents) == "Will it rain?a"


def test_a_template_that_leaves_out_tools_is_refused_for_rows_that_have_some() -> None:
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL)
    asks = CHATS["a question"]
    rows = [Conversation(asks), Conversation(asks, RenderOptions(TOOLS)), Conversation(asks)]
    found = template.render_all(rows, must_be_whole=True)
    assert [found[0], found[2]] == ["Will it rain?"] * 2
    assert str(found[1]) == "the chat template leaves out the tool 'get_weather': give one that has it"


OPEN = RenderOptions(add_generation_prompt=False, continue_final_message=True)
CONTINUED = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}",
    "trimmed with a blank": "{% for m in messages %}{{ m.role }} {{ m.content.strip() + ' ' }}</s>{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}|{{ m.content }}</s>{% endfor %}",
    "first words": "{% for m in messages %}{{ m.content.split() | first }}</s>{% endfor %}",
    "without it": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}content",
}


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CONTINUED)),
    texts=st.lists(st.text(st.sampled_from("ab \n\t</s>é"), max_size=8), min_size=1, max_size=3),
)
def test_a_last_message_that_is_continued_is_left_open_as_by_transformers(name: str, texts: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    (ours,) = ChatTemplate(CONTINUED[name], SPECIAL).render_all([Conversation(messages, OPEN)])
    try:
        expected = oracle(CONTINUED[name], messages, OPEN)
    except Exception:
        assert isinstance(ours, TokenizerError)
        return
    if "CONTINUE_FINAL_MESSAGE_TAG" in expected:  # transformers leaves its mark in a message that is written twice
        assert "more than once" in str(ours)
        return
    assert ours == expected


@pytest.mark.parametrize("style", ["tools in tags", "tools as text", "llama 4"])
def test_answers_with_tools_may_be_continued_too(style: str) -> None:
    messages = [*CHATS["after a call"][:3], {"role": "assistant", "content": "It will  "}]
    options = RenderOptions(TOOLS, {}, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(STYLES[style], SPECIAL).render(messages, options) == oracle(STYLES[style], messages, options)


def test_a_message_without_text_and_a_template_that_drops_it_cannot_be_continued() -> None:
    with pytest.raises(TokenizerError, match="the last message has no text to continue"):
        ChatTemplate(STYLES["tools in tags"], SPECIAL).render([{"role": "assistant", "tool_calls": [CALL]}], OPEN)
    with pytest.raises(TokenizerError, match="leaves out text of the last message"):
        ChatTemplate(CONTINUED["without it"], SPECIAL).render(CHATS["a question"], OPEN)


def test_marks_of_an_open_end_that_a_message_has_itself_do_not_end_it() -> None:
    messages = [{"role": "user", "content": "\U00100000a"}, {"role": "assistant", "content": "b\U00100001 \U00100000"}]
    prompt = ChatTemplate(CONTINUED["as it is"], SPECIAL).render(messages, OPEN)
    assert prompt == "<user>\U00100000a</s>\n<assistant>b\U00100001 \U00100000"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[", "tools='[': not JSON ("),
        ({}, "tools={}: expected a list of objects {"),
        ([7], "tools[0]=7: expected an object {"),
        ([{"name": "f"}], "tools[0].type=None: expected 'function', as in {"),
        ([TOOLS[0], {"type": "function"}], "tools[1].function=None: expected an object with name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name='': expected text such as"),
        ("[" * 100_000, "nests too deeply"),
    ],
)
def test_tools_that_are_none_are_named(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match="tools") as raised:
        read_tools(value)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x", "chat_template_kwargs='x': not JSON ("),
        ([], "chat_template_kwargs=[]: expected an object such as {"),
        ({"messages": []}, "chat_template_kwargs.messages: set by the renderer. Use the messages column."),
        ({"tools": []}, "chat_template_kwargs.tools: set by the renderer. Use the option or column tools."),
        ({"eos_token": "x"}, "chat_template_kwargs.eos_token: the tokenizer says what it is. Leave it out."),
    ],
)
def test_variables_that_are_none_are_named(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs") as raised:
        read_variables(value)
    assert str(raised.value).startswith(problem)
