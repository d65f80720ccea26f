"""What of a conversation does not reach its prompt is found, and nothing else is taken for that."""

from __future__ import annotations

from typing import Any

import pytest

from lorabatch.engine.errors import TokenizerError
from lorabatch.engine.text.chat.chat_template import ChatTemplate
from lorabatch.engine.text.chat.conversation import Conversation, RenderOptions, peculiarities
from lorabatch.engine.text.tokenizers.template_probe import template_traits

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
BY_ROLE = (
    "{% for m in messages %}{% if m.role == 'system' %}<<{{ m.content | trim }}>>{% elif m.role == 'user' %}"
    "[{{ m.content }}]{% elif m.role == 'assistant' %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endif %}{% endfor %}"
)
ELSE_ASSISTANT = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
REFUSALS = "{% for m in messages %}{{ m.content }}{{ m.refusal }}{{ (m.function_call or {}).name }}\n{% endfor %}"
LOUD = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
TOOL_NAMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEXTS
TOOL_FLAG = "{% if tools %}You have tools.{% endif %}" + TEXTS
FIRST_TOOL = "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + TEXTS


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "description": "d"}} for name in names]


ASKS = said("user", "q")
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("source", "messages", "given", "problem"),
    [
        (BY_ROLE, [said("system", "s"), ASKS, said("assistant", "<think>t</think>a"), ASKS], None, None),
        (BY_ROLE, [ASKS, said("tool", "out"), ASKS], None, "the text of messages[1] (role 'tool')"),
        (BY_ROLE, [ASKS, said("assistant", "words", tool_calls=[CALL])], None, "the text of messages[1]"),
        (BY_ROLE, [ASKS, said("assistant", "", tool_calls=[CALL])], None, None),
        (BY_ROLE, [ASKS, said("assistant", None, tool_calls=[CALL, CALL])], None, "tool_calls[1] of messages[1]"),
        (BY_ROLE, [ASKS, said("human", "  ")], None, "does not know the role 'human'"),
        (ELSE_ASSISTANT, [said("critic", "bad"), ASKS], None, "does not know the role 'critic'"),
        (ELSE_ASSISTANT, [said("system", "s"), ASKS, said("assistant", "a")], None, "not know the role 'system'"),
        (ELSE_ASSISTANT, [ASKS, said("assistant", "a"), ASKS], None, None),
        (TEXTS, [said("system", "s"), ASKS], None, None),
        (LOUD, [ASKS, said("assistant", "a")], None, None),
        ("{{ messages[-1].content }}", [said("user", "q"), said("user", "q")], None, "the text of messages[0]"),
        ("{{ messages[0].content[:2] }}", [said("user", "long text")], None, None),
        (TOOL_NAMES, [said("user", "the weather")], tools("weather", "e"), None),
        (TEXTS, [said("user", "How is the weather?")], tools("weather"), "the tool 'weather'"),
        (TOOL_FLAG, [ASKS], tools("have"), "the tool 'have'"),
        (FIRST_TOOL, [ASKS], tools("a", "b"), "the tool 'b'"),
        (TEXTS, [ASKS, said("assistant", "a", tool_calls=[CALL])], None, "tool_calls[0] of messages[1]"),
        (TEXTS, [said("assistant", "a", function_call=CALL["function"])], None, "function_call of messages[0]"),
        (TEXTS, [ASKS, said("assistant", "a", refusal="I will not.")], None, "refusal of messages[1]"),
        (TEXTS, [ASKS, said("assistant", "a", audio={"id": "x"})], None, "audio of messages[1]"),
        (TEXTS, [ASKS, said("assistant", "a", function_call=None, refusal=None, audio=None)], None, None),
        (REFUSALS, [ASKS, said("assistant", "a", refusal="no", function_call=CALL["function"])], None, None),
        (
            "{% for p in messages[0].content %}{% if loop.first %}{{ p.text }}{% endif %}{% endfor %}",
            [said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
            None,
            "part 1 of messages[0]",
        ),
    ],
)
def test_what_no_change_of_alters_the_prompt_is_left_out(
    source: str, messages: list[dict[str, Any]], given: Any, problem: str | None
) -> None:
    rows = [Conversation(messages, RenderOptions(given))]
    template = ChatTemplate(source, SPECIAL)
    (found,) = template.render_all(rows, must_be_whole=True)
    assert isinstance(template.render_all(rows)[0], str)
    if problem is None:
        assert found == template.render_all(rows)[0]
    else:
        assert isinstance(found, TokenizerError)
        assert problem in str(found)


def test_a_message_that_is_continued_is_whole_too() -> None:
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is "}]
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    rows = [Conversation([said("user", parts[:1]), said("assistant", parts)], options)]
    assert ChatTemplate(source, SPECIAL).render_all(rows, must_be_whole=True) == ["It </s>It is "]
    assert rows[0].open_text == "is "


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "<|im_start|>assistant\n"
ASKED = "{% if add_generation_prompt %}"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + ASKED
    + HEADER
    + "{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "variables", "missing"),
    [
        (CHATML + ASKED + HEADER + "{% endif %}", {}, ""),
        (CHATML, {}, HEADER),
        (CHATML + ASKED + "### Response:\n{% endif %}", {}, HEADER),
        (CHATML + HEADER, {}, ""),
        (BY_ROLE, {}, ""),
        (
            "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
            "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
            + ASKED
            + "<|Assistant|><think>\n{% endif %}",
            {},
            "",
        ),
        (
            "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
            "<|message|>{{ m.content }}<|end|>{% endfor %}" + ASKED + "<|start|>assistant{% endif %}",
            {},
            "",
        ),
        (QWEN, {}, ""),
        (QWEN, {"enable_thinking": False}, ""),
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + ASKED + "<|assistant|>\n"
            "{% else %}{{ eos_token }}{% endif %}",
            {},
            "",
        ),
        ("{{ raise_exception('no') }}", {}, ""),
    ],
    ids=[
        "header",
        "ignored",
        "another",
        "always",
        "none needed",
        "R1",
        "channels",
        "thinking",
        "no thinking",
        "Phi-3",
        "fails",
    ],
)
def test_a_prompt_ends_with_what_stands_before_answers(source: str, variables: Any, missing: str) -> None:
    assert template_traits(ChatTemplate(source, SPECIAL), variables)[0] == missing


def test_what_a_template_drops_by_design_is_found() -> None:
    assert template_traits(ChatTemplate(BY_ROLE, SPECIAL))[1] == ("reasoning of earlier turns", "names of speakers")
    trimmed = (
        CHATML.replace("m.content", "m.content | trim") + "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    )
    trimmed += "{% for m in messages %}{{ m.name }}{% endfor %}"
    assert template_traits(ChatTemplate(trimmed, SPECIAL))[1] == ("blanks at the ends of messages",)


def test_names_of_speakers_are_found_and_names_of_functions_are_not_theirs() -> None:
    named = said("user", "q", name="Ada")
    for messages, expected in (
        ([named], ["names of speakers"]),
        ([said("assistant", "a", name="Bob"), ASKS], ["names of speakers"]),
        ([said("tool", "out", name="f"), ASKS], []),
        ([said("user", "q", name=None)], []),
    ):
        assert peculiarities(messages, RenderOptions()) == expected
