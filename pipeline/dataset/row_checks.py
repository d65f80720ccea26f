"""Checks one input row: its prompt, to be tokenised, and its sampling. Bad rows get sentences instead of exceptions.

`sampling_overrides` and `row_sampling` carry a row's own sampling options from index to engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from ...engine.errors import TokenizerError
from ...engine.request import SAMPLING_OPTIONS, SamplingParams
from ...engine.structured_output import CONSTRAINTS, FORMS, constraint_of
from ...engine.text.answers.choices import MOST_TOKENS
from ...engine.text.answers.reasoning import is_begun_by, is_open_in
from ...engine.text.answers.sampling_check import problems_with_model
from ...engine.text.chat.conversation import RenderOptions, content_text, read_tools, read_variables
from ...engine.text.chat.literal import RenderedMessages
from ...engine.text.tokenizers.boundary import first_merged, texts_behind
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...jobs.input.known_tables import turns_as_messages
from ...jobs.input.scores import problem_of_right, right_answers
from ...jobs.spec import ScoreBy
from ...system.untrusted import parse_json

_SHOWN_CHARS = 60
# Roles of system messages; "developer" is OpenAI's newer name.
_SYSTEM_ROLES = ("system", "developer")


class ErrorKind(IntEnum):
    """Kinds of row errors that the index can see, as summaries count them."""

    NONE = 0
    ID = 1
    PROMPT = 2
    TOO_LONG = 3
    SAMPLING = 4
    EXPECTED = 5
    NOT_ALLOWED = 6


@dataclass(slots=True)
class RowDraft:
    """One row while it is checked and tokenised: from the values of its columns to a request or an error."""

    #: Id of the row; None if its column is null.
    row_id: str | int | None
    #: Sampling of the row.
    sampling: SamplingParams
    #: Text of the prompt that is still to be tokenised; None when there is none.
    text: str | None = None
    #: Character in `text` -> the text that it stands for (`RenderedMessages`).
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    #: Tokens of the prompt; None until they are known.
    tokens: list[int] | None = None
    #: Kind of the first problem.
    kind: ErrorKind = ErrorKind.NONE
    #: All that is wrong with the row, a sentence each; empty for a row that engines can answer.
    problems: list[str] = field(default_factory=list)
    #: Number of the row in its batch.
    row: int = 0
    #: Adapter that the row asks for; None for the base model.
    adapter: str | None = None
    #: Number of the row's completion that the draft is for.
    sample: int = 0
    #: Text of the assistant's last message, if it was taken out of the prompt.
    expected: str | None = None
    #: Given completions, to be scored.
    continuation_texts: tuple[str, ...] = ()
    #: Tokens of the prompt and of the completion, for each of `continuation_texts`.
    continuations: tuple[tuple[list[int], tuple[int, ...]], ...] = ()
    #: Tokens that will be computed behind the prompt; 0 when the row's options do not fix the number.
    fixed_tokens: int = 0
    #: The row's task (`fingerprints.task_hash`).
    task: int = 0
    #: Draft of the same completion for the base's tokenizer, whose random numbers this one draws; None for its own.
    twin: RowDraft | None = None

    def samples(self) -> list[RowDraft]:
        """A draft for each of the row's completions; one for a row that is wrong."""
        if self.problems or not (self.continuations or self.sampling.n > 1):
            return [self]
        of_each = [(prompt, self.sampling.scoring(tokens)) for prompt, tokens in self.continuations]
        of_each = of_each or [(self.tokens or [], replace(self.sampling, n=1))] * self.sampling.n
        return [
            replace(self, tokens=prompt, sampling=sampling, sample=sample)
            for sample, (prompt, sampling) in enumerate(of_each)
        ]

    def reject(self, kind: ErrorKind, problem: str) -> None:
        """Note a problem; the first one gives the row its kind. A problem may quote half of a surrogate pair, which is
        escaped.
        """
        self.kind = self.kind or kind
        self.problems.append(problem.encode("utf-8", "backslashreplace").decode())


def system_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Texts of a conversation's system messages, which say what is asked of every row of a task; "" for none."""
    texts = (message.get("content") for message in messages if message.get("role") in _SYSTEM_ROLES)
    return "\n".join(text if isinstance(text, str) else json.dumps(text, default=str) for text in texts)


def check_text(draft: RowDraft, value: Any) -> None:
    """Take a `prompt`, or reject the row: it must be text that is not empty."""
    if not isinstance(value, str) or not value:
        draft.reject(ErrorKind.PROMPT, _no_prompt(value))
        return
    _set_text(draft, "prompt", value)


def _no_prompt(value: Any) -> str:
    return f"prompt={_shown(value)}: expected text that is not empty. Fill it or drop the row."


def prompt_as_messages(value: Any, system_prompt: str | None) -> list[dict[str, Any]] | str:
    """Convert a `prompt` to a message of the user, behind the `system_prompt`. Returns a sentence if it is no text."""
    if not isinstance(value, str) or not value:
        return _no_prompt(value)
    return read_messages([{"role": "user", "content": value}], system_prompt)


def templated_messages(
    roles: Sequence[str], texts: Sequence[str] | TokenizerError, option: str, system_prompt: str | None
) -> list[dict[str, Any]] | str:
    """Convert the texts that a row's templates have made to messages of these roles. `option`: the one that has the
    templates. Returns a sentence if the templates have failed, or all texts are blank.
    """
    if isinstance(texts, TokenizerError):
        return f"{option}: {texts}."
    if not any(text.strip() for text in texts):
        return blank_prompt(option)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return read_messages(messages, system_prompt)


def blank_prompt(option: str) -> str:
    """The problem of a row for which a template writes nothing, as a sentence."""
    return f"{option}: writes no text for this row, expected some. Fill in its columns, or drop the row."


def read_messages(value: Any, system_prompt: str | None) -> list[dict[str, Any]] | str:
    """Convert `messages`, a list of objects with role and content or its JSON, to the form that chat templates read;
    objects with from and value are ShareGPT's. `system_prompt`: put before messages without a system message. Returns a
    sentence if the value is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"messages={_shown(value)}: not JSON ({error}). Write a list of objects with role and content."
    value = turns_as_messages(value)
    problem = _messages_problem(value)
    if problem is not None:
        return problem
    messages = [_as_templates_read(message) for message in value]
    if system_prompt is not None and not any(message["role"] in _SYSTEM_ROLES for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def split_answer(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]] | str, str | None]:
    """Split off a last message of the assistant. Returns the other messages, and its text, or the JSON of its tool
    calls if it has no text; None if the last message is not the assistant's. A sentence takes the place of the other
    messages if none of them asks.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, None
    text = content_text(last.get("content"))
    expected = text or (json.dumps(last["tool_calls"], ensure_ascii=False) if last.get("tool_calls") else "")
    if all(message["role"] in _SYSTEM_ROLES for message in messages[:-1]):
        problem = "messages: an answer alone, expected a message before it. Give one (split_answer)."
        return problem, expected
    return messages[:-1], expected


def read_rendering(job: Mapping[str, Any], row: Mapping[str, Any]) -> RenderOptions | str:
    """Options for rendering a row's messages: the row's own values, which may be JSON, or the job's where they are
    null. A row's variables extend the job's; the row's win. An empty list of tools counts as none. Returns a sentence
    if a value is wrong.
    """
    own = {name: value for name, value in row.items() if value is not None}
    given = {**job, **own}
    try:
        tools = None if given.get("tools") is None else read_tools(given["tools"])
        variables = {
            name: value
            for values in (job, own)
            if values.get("chat_template_kwargs") is not None
            for name, value in read_variables(values["chat_template_kwargs"]).items()
        }
    except ValueError as error:
        return str(error)
    is_continued = bool(given.get("continue_final_message"))
    asks = given.get("add_generation_prompt")
    if asks and is_continued:
        return (
            "add_generation_prompt=True, continue_final_message=True: a prompt ends with one of the two. Set one to "
            "false."
        )
    return RenderOptions(tools or None, variables, not is_continued if asks is None else bool(asks), is_continued)


def check_unrendered(draft: RowDraft, values: Mapping[str, Any], place: str) -> None:
    """Reject a row that has rendering options but no messages: no chat template renders its prompt, which is at
    `place`.
    """
    for name, value in values.items():
        if value is not None:
            draft.reject(
                ErrorKind.PROMPT,
                f"{name}: this row's prompt is {place}, which no chat template renders. Leave it null, or give "
                "messages.",
            )


def begin_reasoning(draft: RowDraft, prompt: str, open_text: str = "") -> None:
    """Note in the row's sampling that its answer begins inside of reasoning, if the prompt, or the message that it
    leaves open, has begun it.
    """
    markers = draft.sampling.reasoning
    if markers is not None and (is_begun_by(prompt, markers[0]) or is_open_in(open_text, markers)):
        draft.sampling = replace(draft.sampling, reasoning_markers=f",{markers[1]}")


def check_rendered(draft: RowDraft, prompt: RenderedMessages | str, source: str = "messages") -> None:
    """Take the prompt that a template has made of `source`; a sentence rejects the row."""
    if isinstance(prompt, str):
        draft.reject(ErrorKind.PROMPT, prompt)
    else:
        _set_text(draft, source, prompt.text)
        draft.stand_ins = prompt.stand_ins


def without_padding(tokens: list[int], pad_token_id: int | None) -> list[int]:
    """A prompt without the padding at its end, at least its first token: as in transformers, a classifier reads the
    last token that is none.
    """
    end = len(tokens)
    while end > 1 and tokens[end - 1] == pad_token_id:
        end -= 1
    return tokens if end == len(tokens) else tokens[:end]


def check_token_ids(draft: RowDraft, value: Any, vocab_size: int) -> None:
    """Take `prompt_token_ids`, or reject the row: they must be a list, not empty, of tokens that the model has."""
    if not isinstance(value, list) or not value:
        draft.reject(ErrorKind.PROMPT, f"prompt_token_ids={_shown(value)}: expected a list with at least one token.")
        return
    for position, token in enumerate(value):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            draft.reject(
                ErrorKind.PROMPT,
                f"prompt_token_ids[{position}]={token}: expected a token from 0 to {vocab_size - 1}. "
                "Tokenise for this model.",
            )
            return
    draft.tokens = value


@contextmanager
def rejecting(draft: RowDraft) -> Iterator[None]:
    """Reject the row if the tokenizer fails in the block."""
    try:
        yield
    except TokenizerError as error:
        _reject_text(draft, error)


def take_tokens(draft: RowDraft, found: list[int] | TokenizerError) -> None:
    """Take the tokens of a draft's text, or reject the row if the tokenizer failed."""
    if isinstance(found, TokenizerError):
        _reject_text(draft, found)
    else:
        draft.tokens, draft.text = found, None


def _reject_text(draft: RowDraft, error: TokenizerError) -> None:
    draft.text = None
    draft.reject(ErrorKind.PROMPT, f"prompt: {error}. Correct the row, or the tokenizer that makes its tokens.")


def check_tokens(draft: RowDraft, vocab_size: int) -> None:
    """Reject a row with tokens that the model lacks. Tokenizers may have more: a token for filling up batches, say."""
    beyond = max(draft.tokens, default=0) if draft.tokens and not draft.problems else 0
    if beyond >= vocab_size:
        draft.reject(
            ErrorKind.PROMPT,
            f"prompt: holds token {beyond} of the tokenizer, expected tokens up to {vocab_size - 1}, which the model "
            "has. Leave the text of that token out.",
        )


def check_continuation(draft: RowDraft, value: Any) -> None:
    """Take a `continuation`, or reject the row: it must be text that is not empty, or a list of such texts, or null."""
    if value is None:
        return
    if draft.sampling.is_pooled:
        draft.reject(
            ErrorKind.PROMPT,
            f"continuation={_shown(value)}: this row's task is {draft.sampling.task}, which scores no text. Leave it "
            "null, or give task generate.",
        )
        return
    texts = [value] if isinstance(value, str) else value
    if not texts or not all(isinstance(text, str) and text for text in texts):
        draft.reject(ErrorKind.PROMPT, _continuation_problem(value))
        return
    draft.continuation_texts = tuple(texts)


def check_expected(draft: RowDraft, value: Any, score_by: ScoreBy) -> None:
    """Reject a row with a right answer that no completion can be compared with. `value`: of the column of them."""
    if score_by == "choice" and draft.sampling.task == "classify":
        score_by = "exact"  # the labels of a head are its adapter's, and rows of a sweep have several
    for answer in right_answers(value, score_by):
        if (problem := problem_of_right(answer, score_by, draft.sampling.choice)) is not None:
            draft.reject(ErrorKind.EXPECTED, problem)


def set_continuations(draft: RowDraft, of_each: Sequence[tuple[list[int], tuple[int, ...]]]) -> None:
    """Take the tokens of prompt and completion for each of `continuation_texts`; reject the row if some are empty."""
    if not all(prompt and tokens for prompt, tokens in of_each):
        draft.reject(ErrorKind.PROMPT, _continuation_problem(draft.continuation_texts))
        return
    draft.continuations = tuple(of_each)
    draft.sampling = draft.sampling.scoring(max((tokens for _, tokens in of_each), key=len))


def _continuation_problem(value: Any) -> str:
    shown = _shown(value)
    return f"continuation={shown}: expected text that is not empty, or a list of such. Fill it or leave it null."


def check_choice(draft: RowDraft, tokenizer: Tokenizer) -> None:
    """Reject a row if a token holds the end of its prompt and the beginning of a text of its choice."""
    choice = draft.sampling.choice
    if draft.problems or not draft.tokens or not choice or draft.sampling.reasoning is not None:
        return
    merged = first_merged(tokenizer, draft.tokens, choice)
    if merged is not None:
        draft.reject(
            ErrorKind.SAMPLING,
            f"choice={_shown(choice[merged])}: its beginning and the end of the prompt are one token, so that the text "
            "has no probability of its own. End the prompt without a blank and begin each text with it, or end the "
            "prompt with a line break.",
        )


def check_choice_size(draft: RowDraft, tokenizer: Tokenizer, max_context_tokens: int) -> None:
    """Reject a row unless the texts of its choice fit into the context behind the prompt, and into a tree of
    `MOST_TOKENS` tokens.
    """
    choice, prompt = draft.sampling.choice, draft.tokens or []
    longest = max(choice, key=len, default="")
    if tokenizer.exceeds(longest, max_context_tokens):
        draft.reject(
            ErrorKind.SAMPLING,
            f"choice={_shown(longest)}: {len(longest)} characters are more tokens than the context of "
            f"{max_context_tokens} tokens. Shorten the text.",
        )
        return
    lengths = list(map(len, texts_behind(tokenizer, prompt, choice))) if choice else [0]
    if len(prompt) + max(lengths) > max_context_tokens:
        draft.reject(
            ErrorKind.SAMPLING,
            f"prompt of {len(prompt)} tokens and a text of choice of {max(lengths)}: together more than the context of "
            f"{max_context_tokens} tokens. Shorten the text or the prompt.",
        )
    elif sum(lengths) > MOST_TOKENS:
        draft.reject(
            ErrorKind.SAMPLING,
            f"choice: its {len(choice)} texts have {sum(lengths)} tokens, expected at most {MOST_TOKENS}. Give fewer "
            "or shorter ones.",
        )


def check_length(draft: RowDraft, max_context_tokens: int) -> None:
    """Reject a row without tokens, or whose prompt and `max_tokens` together exceed the model's context."""
    if not draft.tokens:
        if not draft.problems:
            draft.reject(ErrorKind.PROMPT, "prompt: gives no tokens; expected at least one. Fill it or drop the row.")
        return
    max_tokens = max(draft.sampling.max_tokens, 0)
    if len(draft.tokens) + max_tokens > max_context_tokens:
        draft.reject(
            ErrorKind.TOO_LONG,
            f"prompt of {len(draft.tokens)} tokens and max_tokens={max_tokens}: together more than the context of "
            f"{max_context_tokens} tokens. Shorten the prompt or lower max_tokens.",
        )


def check_size(draft: RowDraft, max_context_tokens: int, exceeds: Callable[[str, int], bool]) -> None:
    """Reject a row whose text is certainly too long, before it is tokenised. `exceeds(text, max_tokens)`: whether the
    text certainly has more tokens.
    """
    if draft.text is not None and exceeds(draft.text, max_context_tokens):
        draft.reject(
            ErrorKind.TOO_LONG,
            f"prompt of {len(draft.text)} characters: more tokens than the context of {max_context_tokens} tokens. "
            "Shorten the prompt.",
        )
        draft.text = None


def read_sampling(job: SamplingParams, values: Mapping[str, Any], vocab_size: int) -> tuple[SamplingParams, list[str]]:
    """The job's sampling with a row's own values (null keeps the job's), and the problems of the result, if any."""
    given: dict[str, Any] = {}
    problems = []
    constraints = [name for name in (*CONSTRAINTS, *FORMS) if values.get(name) is not None]
    if constraints:
        # the row's own takes the place of the job's
        given = {name: SAMPLING_OPTIONS[name].default for name in CONSTRAINTS}
    for name, value in values.items():
        if value is None:
            continue
        try:
            given |= constraint_of(name, value) if name in FORMS else {name: SAMPLING_OPTIONS[name].read(value)}
        except ValueError as error:
            problems.append(str(error) if name in FORMS else f"{name}: {error}")
    if len(constraints) > 1:
        problems.append(f"{', '.join(constraints)}: expected at most one of them")
    sampling = replace(job, **given)
    return sampling, problems or sampling.problems() or problems_with_model(sampling, vocab_size)


def _set_text(draft: RowDraft, role: str, text: str) -> None:
    """Take a text, or reject the row if it is not valid Unicode: JSON may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        draft.reject(ErrorKind.PROMPT, f"{role}: not valid Unicode text at character {error.start}.")
        return
    draft.text = text


def _messages_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"messages={_shown(value)}: expected a list with at least one message."
    for position, message in enumerate(value):
        if not isinstance(message, dict):
            return f"messages[{position}]={_shown(message)}: expected an object with role and content."
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f"messages[{position}].role={_shown(message.get('role'))}: expected text such as 'user'."
        problem = _content_problem(message.get("content"), bool(message.get("tool_calls")))
        if problem is not None:
            return f"messages[{position}].content{problem}"
    return None


def _content_problem(content: Any, may_be_empty: bool) -> str | None:
    """The problem of a message's content, in words that continue the content's place; None if it is right."""
    if isinstance(content, str) or (may_be_empty and not content):
        return None
    if not isinstance(content, list) or not content:
        return f"={_shown(content)}: expected text."
    for position, part in enumerate(content):
        if not isinstance(part, dict):
            return f"[{position}]={_shown(part)}: expected an object with type and text."
        if part.get("type") != "text":
            kind = str(part.get("type") or "null")[:_SHOWN_CHARS]
            return f"[{position}]: content part of type {kind}: only text is supported. Leave the part out."
        if not isinstance(part.get("text"), str):
            return f"[{position}].text={_shown(part.get('text'))}: expected text."
    return None


def _as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: arguments of tool calls are objects. OpenAI's format has their JSON, which
    templates would write as a string. All else is as the row has it, as transformers gives it to templates.
    """
    calls = message.get("tool_calls")
    return message | {"tool_calls": list(map(_with_arguments, calls))} if isinstance(calls, list) else message


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"])
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def row_sampling(job: SamplingParams, overrides: str | None) -> SamplingParams:
    """The job's sampling with one row's own options (a JSON object as `sampling_overrides` wrote it, or None)."""
    if overrides is None:
        return job
    values: dict[str, Any] = json.loads(overrides)
    return SamplingParams.from_plain(asdict(job) | values)


def sampling_overrides(job: SamplingParams, row: SamplingParams) -> str | None:
    """The options in which `row` differs from `job`, as a JSON object for `row_sampling`; None if there are none."""
    if row == job:
        return None
    return json.dumps(
        {name: getattr(row, name) for name in SAMPLING_OPTIONS if getattr(row, name) != getattr(job, name)}
    )
