"""Renders public chat templates with 40 conversations, as an index does, and compares them with transformers.

The folder holds templates as files, in any depth: `*.jinja`, as in the source packages of llama-cpp-python
(`models/templates`) and vLLM (`examples`) and in the public repositories huggingface/trl and
chujiezheng/chat_templates; and `*.js` and `*.ts` files with templates as strings, as in huggingface/huggingface.js
(`packages/jinja/test/e2e.test.js`, `packages/ollama-utils/src/chat-template-automap.ts`).

    python tests/suites/chat_templates.py FOLDER [MODEL]

MODEL is a model folder whose tokenizer renders on both sides; without it, the demo's. An error row is checked: what its
reason says that the template leaves out must have no effect on transformers' prompt, however it is changed. Of prompts
that are equal, each text must be in them. Exits with 1 if anything is silently wrong, crashes, hangs or is unbounded.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from conversations import CONVERSATIONS
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.text.chat.conversation import Conversation
from lorabatch.engine.text.tokenizers.template_probe import template_traits
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.pipeline.dataset.row_checks import read_messages, read_rendering

_IN_SCRIPTS = re.compile(r"""(?:chat_template|gguf):\s*(`(?:[^`\\]|\\.)*`|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.S)
_PLACE = re.compile(r"leaves out (?:(the text|part (\d+)|tool_calls\[(\d+)\]) of messages\[(\d+)\]|the tool '(.*)':)")
_ROLE = re.compile(r"does not know the role '(.*)' and")
# Templates whose prompts end where answers begin: a piece of a file's name, and variables.
CONTROLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DeepSeek-R1", {}),
    ("gpt-oss", {}),
    ("Qwen3-0.6B", {}),
    ("Qwen3-0.6B", {"enable_thinking": False}),
    ("Qwen3-0.6B", {"enable_thinking": True}),
)
_MOST_S = 30.0
_SHOWN, _SHOWN_CHARACTERS = 12, 900
_WRONG = (
    "other text",
    "a text is left out",
    "a reason is not true",
    "crash",
    "hang",
    "refused, and transformers is not",
)


class _Noon(datetime):
    """A clock that stands still, for templates that write the time."""

    @classmethod
    def now(cls, tz: Any = None) -> _Noon:
        return cls(2026, 2, 3, 12)


def templates_in(folder: Path) -> dict[str, str]:
    """Text of each template -> where it is from; each once."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".jinja":
            found.setdefault(path.read_text("utf-8"), []).append(str(path.relative_to(folder)))
        elif path.suffix in (".js", ".ts"):
            for number, literal in enumerate(_IN_SCRIPTS.findall(path.read_text("utf-8"))):
                found.setdefault(_unquoted(literal), []).append(f"{path.name} {number}")
    return {source: ", ".join(names) for source, names in found.items()}


def _unquoted(literal: str) -> str:
    """The text of a JavaScript string, whose escapes are Python's."""
    quote = '"""' if literal[0] == "`" else literal[0]
    body = literal[1:-1].replace("\\`", "`").replace("\\$", "$").replace("\\/", "/")
    if quote == '"""':
        body = body.replace('"', '\\"')
    return str(ast.literal_eval(f"{quote}{body}{quote}"))


class Oracle:
    """transformers' prompts of one template."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source

    def __call__(self, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str | None:
        """The prompt; None where the template refuses."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self._source,
                    add_generation_prompt=True,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception:
            return None


def joined(messages: Any) -> Any:
    """Messages whose parts are one text, as templates that take no parts get them."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def expected_prompt(oracle: Oracle, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str | None:
    """transformers' prompt; of content in parts that a template fails on or writes as Python, that of their texts."""
    found = oracle(messages, tools, variables)
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if has_parts and (found is None or "{'type': 'text'" in found or "{'text': " in found):
        return oracle(joined(messages), tools, variables)
    return found


def is_true(reason: str, oracle: Oracle, messages: Any, tools: Any, variables: Mapping[str, Any]) -> bool:
    """Whether what a reason names changes nothing in transformers' prompt: it is replaced, and it is lengthened."""
    place = _PLACE.search(reason)
    if place is None:
        return False
    before = expected_prompt(oracle, messages, tools, variables)
    for word in ("zqj", "ZQJ 7"):
        asks, given = json.loads(json.dumps([messages, tools]))
        if place[5] is not None:
            for tool in given:
                if tool["function"]["name"] == place[5]:
                    tool["function"] |= {"name": word, "description": word, "parameters": {}}
        elif place[3] is not None:
            call = asks[int(place[4])]["tool_calls"][int(place[3])]
            call.get("function", call).update({"name": word, "arguments": {word: word}})
        elif place[2] is not None:
            asks[int(place[4])]["content"][int(place[2])]["text"] = word
        else:
            asks[int(place[4])]["content"] = word
        if expected_prompt(oracle, asks, given, variables) not in (before, None):
            return False
    return True


def texts_of(messages: Any) -> Iterator[str]:
    """Words of messages that a prompt must have: the middles of texts, since ends may be trimmed."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        for part in parts:
            yield from re.findall(r"needle\d+[a-z]+", part["text"])


def is_vain(text: str, oracle: Oracle, given: Conversation, expected: str) -> bool:
    """Whether transformers' prompt is the same without a text; some templates write a text letter by letter."""
    others = json.loads(json.dumps(given.messages, ensure_ascii=False).replace(text, "zqj"))
    return expected_prompt(oracle, others, given.options.tools, given.options.variables) == expected


def read(given: Mapping[str, Any]) -> Conversation | str:
    """A conversation as an index reads it from a row, or why it does not."""
    messages = read_messages(json.dumps(given["messages"]), None)
    beside = {name: json.dumps(given[name]) for name in ("tools", "chat_template_kwargs") if given[name]}
    options = read_rendering({}, beside)
    for found in (messages, options):
        if isinstance(found, str):
            return found
    return Conversation(messages, options)  # type: ignore[arg-type]


def rendered(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> list[str | EngineError]:
    """The prompts of conversations, with the texts of special tokens that stand for themselves."""
    return [
        one if isinstance(one, EngineError) else "".join(one.stand_ins.get(sign, sign) for sign in one.text)
        for one in tokenizer.render_messages(conversations)
    ]


def verdict(oracle: Oracle, given: Conversation, found: str | EngineError) -> tuple[str, str]:
    """What became of one conversation with one template, and more about it."""
    messages, tools, variables = given.messages, given.options.tools, given.options.variables
    expected = expected_prompt(oracle, messages, tools, variables)
    if isinstance(found, EngineError):
        reason = str(found)
        if "has no variable" in reason:
            return "error: the template lacks a variable", reason
        if "leaves out" in reason:
            is_right = is_true(reason, oracle, messages, tools, variables)
            return "error: left out" if is_right else "a reason is not true", reason
        if (role := _ROLE.search(reason)) is not None:
            others = [message | {"role": "zqj"} if message["role"] == role[1] else message for message in messages]
            is_right = expected_prompt(oracle, others, tools, variables) == expected
            return "error: an unknown role" if is_right else "a reason is not true", reason
        return "both refuse" if expected is None else "refused, and transformers is not", reason
    if found != expected:
        return "other text", f"{expected!r}\n      {found!r}"
    lacking = [text for text in texts_of(messages) if text not in found and is_vain(text, oracle, given, expected)]
    return ("a text is left out", f"{lacking} not in {found!r}") if lacking else ("same", "")


def verdicts(model: Path, oracle: Oracle, source: str) -> Iterator[tuple[str, str, str]]:
    """Title, kind and details of each conversation with one template. Raises `ModelFilesError` for no template."""
    tokenizer = Tokenizer.from_folder(model, chat_template=source, now=_Noon.now())
    conversations = {title: read(given) for title, given in CONVERSATIONS.items()}
    good = {title: one for title, one in conversations.items() if isinstance(one, Conversation)}
    started = time.monotonic()
    try:
        found = rendered(tokenizer, list(good.values()))
    except Exception as error:
        yield "", "crash", f"{type(error).__name__}: {error}"
        return
    if (seconds := time.monotonic() - started) > _MOST_S:
        yield "", "hang", f"{seconds:.0f} s"
    for (title, given), prompt in zip(good.items(), found, strict=True):
        yield title, *verdict(oracle, given, prompt)
    for title, problem in conversations.items():
        if isinstance(problem, str):
            yield title, "refused by its form", problem


def failed_controls(model: Path, templates: Mapping[str, str]) -> list[str]:
    """Controls whose prompts are said to end elsewhere than answers begin, and those that the folder lacks."""
    failed = []
    for place, variables in CONTROLS:
        sources = [source for source, name in templates.items() if place in name]
        for source in sources:
            template = Tokenizer.from_folder(model, chat_template=source).chat_template
            missing_header, _ = template_traits(template, variables)
            if missing_header:
                failed.append(f"{place} {variables or ''}: without {missing_header!r}")
        if not sources:
            failed.append(f"{place}: not in the folder")
    return failed


def main(folder: Path, model: Path) -> int:
    chat_template_utils.datetime = _Noon
    templates, in_transformers = templates_in(folder), AutoTokenizer.from_pretrained(model)
    counts: Counter[str] = Counter()
    details: dict[str, list[str]] = {}
    for source, name in templates.items():
        try:
            found = list(verdicts(model, Oracle(in_transformers, source), source))
        except ModelFilesError as error:
            found = [("", "a template that is none", str(error))]
        for title, kind, more in found:
            counts[kind] += 1
            details.setdefault(kind, []).append(f"{name[:90]}, {title}: {more[:_SHOWN_CHARACTERS]}")
    print(f"{len(templates)} templates x {len(CONVERSATIONS)} conversations")
    for kind, number in counts.most_common():
        print(f"{number:7} {kind}")
    for kind in (*_WRONG, "refused by its form", "a template that is none"):
        for line in dict.fromkeys(details.get(kind, [])[:_SHOWN]):
            print(f"  {kind}: {line}")
    failed = failed_controls(model, templates)
    print(f"{len(failed)} of {len(CONTROLS)} controls fail", *failed, sep="\n  ")
    return int(bool(failed) or any(counts[kind] for kind in _WRONG))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else base_model_folder()))
