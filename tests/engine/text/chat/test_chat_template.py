"""Templates render as in transformers, and reach nothing but the messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lorabatch.engine.errors import ModelFilesError, TokenizerError
from lorabatch.engine.text.chat.chat_template import ChatTemplate
from lorabatch.engine.text.chat.conversation import Conversation

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <kind> & 'brief'."},
    {"role": "user", "content": "Hi", "name": None},
    {"role": "assistant", "content": "Hello", "thinking": "greet back"},
    {"role": "user", "content": [{"type": "text", "text": "More é"}]},
]
TEMPLATES = {
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "blocks are trimmed": "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "assignments in generation blocks": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% endgeneration %}{% endfor %}{{ ns.n }}"
    ),
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "tools and documents": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "generation prompt": "{% if add_generation_prompt %}assistant:{% endif %}",
    "missing keys": "{% for m in messages %}{{ 'name' in m }}{{ m.name is defined }}{% endfor %}",
    "slices": "{% set rest = messages[1:] %}{{ rest | length }}{{ rest[-1]['content'][0]['text'].strip() }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(name: str) -> None:
    plain = [{key: value for key, value in message.items() if value is not None} for message in MESSAGES]
    expected, _ = render_jinja_template([plain], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(MESSAGES) == expected[0]


def test_the_time_is_the_jobs_own_so_that_a_resumed_job_asks_the_same() -> None:
    now = datetime(2025, 3, 4, 5, 6, tzinfo=UTC)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", SPECIAL, now)
    assert template.render(MESSAGES) == "04 Mar 2025"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ open('/etc/passwd') }}",
        "{{ '%s' | format(messages.__class__) | attr('__class__') | attr('mro') }}",
    ],
)
def test_templates_cannot_reach_python(attack: str) -> None:
    try:
        text = ChatTemplate(attack, SPECIAL).render(MESSAGES)
    except TokenizerError:
        return
    assert text.strip() == ""


def test_a_refusal_of_the_template_is_reported_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", SPECIAL)
    with pytest.raises(TokenizerError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_that_fails_on_the_messages_is_a_refusal_too() -> None:
    with pytest.raises(TokenizerError, match="refuses them"):
        ChatTemplate("{{ messages[0].content + 1 }}", SPECIAL).render(MESSAGES)


def test_text_that_is_no_template_is_refused_when_it_is_read() -> None:
    with pytest.raises(ModelFilesError, match="not a valid jinja2 template"):
        ChatTemplate("{% for %}", SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9**(9**9) }}",
        "{{ 'a'|center(10**10) }}",
        "{% if 9**(9**9) %}x{% endif %}",
        "{% set x = 'a' * 10**10 %}",
        "{{ [9**(9**9)]|tojson }}",
    ],
)
def test_the_compiler_computes_no_constants(source: str) -> None:
    ChatTemplate(source, SPECIAL)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{% for i in x %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ 1" + "+1" * 5000 + " }}", "recursion"),
        ("{% autoescape 9**(9**9) %}x{% endautoescape %}", "no constant"),
        ("x" * 300_000, "characters, expected at most"),
    ],
)
def test_what_the_compiler_cannot_take_is_no_template(source: str, reason: str) -> None:
    with pytest.raises(ModelFilesError, match=f"chat template: .*{reason}"):
        ChatTemplate(source, SPECIAL)


ENDLESS = "{{ 9**(9**9) }}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(ENDLESS, "it takes more than 3 s of computing", id="a power"),
        pytest.param(
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            "it takes more than 3 s of computing",
            id="loops in loops",
            marks=pytest.mark.long,
        ),
        pytest.param("{{ 'a' * 10**10 }}", "it needs more than 1 GiB of memory", id="repeated text"),
        pytest.param("{{ 'a'.ljust(10**10) }}", "it needs more than 1 GiB of memory", id="padded text"),
        pytest.param("{{ '%09999999999d' % 1 }}", "the chat template", id="formatted number"),
        pytest.param("{{ [messages] * 10**9 }}", "it needs more than 1 GiB of memory", id="repeated list"),
        pytest.param(
            "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "it needs more than 1 GiB of memory",
            id="doubled text",
        ),
        pytest.param("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "makes more than 33554432", id="output"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth", id="recursion"),
        pytest.param("{{ raise_exception('\x1b[2J' ~ 'a' * 10000) }}", r"refuses them \(\\x1b\[2Ja+…\)", id="message"),
    ],
)
def test_what_a_template_may_take_has_limits(source: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason) as raised:
        ChatTemplate(source, SPECIAL).render(MESSAGES)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 600


def test_a_prompt_on_which_the_template_breaks_a_limit_costs_no_other_prompt() -> None:
    source = "{% if messages[0].content == 'bad' %}{{ 'a' * 10**10 }}{% endif %}<{{ messages[0].content }}>"
    texts = [*map(str, range(700)), "bad", *map(str, range(700, 1000))]
    prompts = ChatTemplate(source, SPECIAL).render_all(
        [Conversation([{"role": "user", "content": text}]) for text in texts]
    )
    assert [prompt for prompt in prompts if isinstance(prompt, str)] == [f"<{number}>" for number in range(1000)]
    assert isinstance(prompts[700], TokenizerError)


def test_a_template_that_always_takes_too_long_is_given_up() -> None:
    template = ChatTemplate("{{ 'a' * 10**10 }}", SPECIAL)
    reasons = list(map(str, template.render_all([Conversation(MESSAGES)] * 1000)))
    num_tried = sum("1 GiB" in reason for reason in reasons)
    assert 1 <= num_tried < 10
    assert reasons[num_tried:] == ["the chat template has taken too long on others and is not tried again"] * (
        1000 - num_tried
    )
    with pytest.raises(TokenizerError, match="not tried again"):
        template.render(MESSAGES)


def test_long_prompts_come_in_several_answers() -> None:
    text = "a" * (1 << 20)
    prompts = ChatTemplate("{{ messages[0].content }}", SPECIAL).render_all([Conversation([{"content": text}])] * 40)
    assert prompts == [text] * 40
