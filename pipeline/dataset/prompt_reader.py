"""Reads the prompts of input rows, batch by batch: `PromptReader`.

It takes the columns of a batch, renders messages by the chat template, tokenises, and notes what is wrong with a row.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from ...engine.errors import TokenizerError
from ...engine.request import SamplingParams
from ...engine.text.answers.choices import steps_of_choice
from ...engine.text.chat.conversation import (
    PLAIN,
    RENDERING_OPTIONS,
    SPLIT_AND_CONTINUED,
    Conversation,
    RenderOptions,
    peculiarities,
)
from ...engine.text.chat.literal import RenderedMessages
from ...engine.text.chat.prompt_template import PromptTemplate
from ...engine.text.tokenizers.boundary import split_at_prompt, texts_behind
from ...engine.text.tokenizers.confined_tokenizer import MissingTokenizer
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...jobs.input.adapter_names import ALLOWED_ROLE, not_allowed
from ...jobs.input.columns import EXPECTED_ROLE, role_values
from ...jobs.options.values import PROMPT_ROLES, SAMPLING_COLUMNS
from .chunk import IndexJob
from .column_values import column_values, row_values, take_undecodable, template_values
from .fingerprints import task_hash
from .row_checks import (
    ErrorKind,
    RowDraft,
    begin_reasoning,
    blank_prompt,
    check_choice,
    check_choice_size,
    check_continuation,
    check_expected,
    check_length,
    check_rendered,
    check_size,
    check_text,
    check_token_ids,
    check_tokens,
    check_unrendered,
    prompt_as_messages,
    read_messages,
    read_rendering,
    read_sampling,
    rejecting,
    set_continuations,
    split_answer,
    system_text,
    take_tokens,
    templated_messages,
    without_padding,
)

# Roles of columns that are no part of what a row asks.
_BESIDE = (EXPECTED_ROLE, ALLOWED_ROLE)
_TOGETHER_CHARACTERS = 4 << 20
# Most different values of `RENDERING_OPTIONS` that are kept as read for later rows.
_MOST_RENDERINGS = 1024
# Tokens at the end of a prompt of tokens in which the start of reasoning is looked for.
_END_TOKENS = 64


class PromptReader:
    """Makes a `RowDraft` of each row. Rows with the same tokenizer are rendered and tokenised together."""

    def __init__(self, job: IndexJob, tokenizer_of: Callable[[str | None], Tokenizer]) -> None:
        self._job = job
        self._tokenizer_of = tokenizer_of
        self._tokenizers: dict[str | None, Tokenizer] = {}
        #: Role of the column that has the prompts; "" where templates make them.
        self._prompt_role = "" if job.templates else next(role for role in PROMPT_ROLES if role in job.roles)
        self._is_text = self._prompt_role != "prompt_token_ids" and not job.renders_messages
        self._samplings: dict[tuple[Any, ...], tuple[SamplingParams, list[str]]] = {}
        self._rendering = lru_cache(_MOST_RENDERINGS)(self._read_rendering)
        #: Rows with a peculiarity that users should know of, by peculiarity (`status.notes.row_notes` writes them up).
        self.counts: Counter[str] = Counter()

    def read(self, batch: pa.RecordBatch, places: Sequence[str]) -> list[RowDraft]:
        """Check and tokenise rows. `places`: `file:row` of each. Returns a draft for each of their completions, in the
        order of the rows; in a sweep the drafts of all rows for one tokenizer, then those for the next.
        """
        columns = {}
        for role, name in self._job.roles.items():
            is_nested = role in ("messages", EXPECTED_ROLE, *RENDERING_OPTIONS)
            values_of = template_values if is_nested else column_values
            columns[role] = values_of(role_values(batch, name))
        given = {name: row_values(batch.column(name)) for name in self._job.template_columns}
        return self.read_columns(columns, given, places)

    def read_columns(
        self, columns: dict[str, list[Any]], given: dict[str, list[Any]], places: Sequence[str]
    ) -> list[RowDraft]:
        """`read` for values that were taken out of their columns, by role. `given`: values for the templates, by name.
        The lists are changed: values that cannot be read become None.
        """
        undecodable = take_undecodable(columns)
        for row, problems in take_undecodable(given).items():
            undecodable.setdefault(row, []).extend(problems)
        named = [name or None for name in columns.get("adapter", [self._job.adapter] * len(places))]
        drafts_of = partial(self._drafts, columns, given, undecodable, places)
        drafts = self._tokenised(drafts_of(named), columns, given)
        if not self._job.groups:
            return drafts
        counts, base = self.counts.copy(), {(draft.row, draft.sample): draft for draft in drafts}
        drafts = drafts if self._job.groups[None] else []
        for adapter in filter(None, self._job.groups):
            own = self._tokenised(drafts_of([adapter] * len(places)), columns, given)
            drafts += [replace(draft, twin=base.get((draft.row, draft.sample))) for draft in own]
        self.counts = counts  # of rows, not of their tokenizers
        return drafts

    def _tokenised(
        self, drafts: list[RowDraft], columns: Mapping[str, list[Any]], given: Mapping[str, list[Any]]
    ) -> list[RowDraft]:
        """A draft for each completion of rows, tokenised and checked. `drafts`: what `_drafts` made of `columns` and
        `given`.
        """
        self._tokenise(drafts)
        self._check_options(drafts)
        for draft in drafts:
            check_length(draft, self._job.max_context_tokens)
            if self._job.id_from_content and not draft.problems:
                asked = {role: values for role, values in columns.items() if role not in _BESIDE}
                draft.row_id = content_id({**asked, **{f"column {name}": of for name, of in given.items()}}, draft.row)
        drafts = [sample for draft in drafts for sample in draft.samples()]
        for draft in drafts:
            draft.fixed_tokens = self._fixed_tokens(draft)
        return drafts

    @property
    def without_tokenizer(self) -> list[str]:
        """Adapters whose rows are errors because their own tokenizer could not be read."""
        return [name for name, found in self._tokenizers.items() if name and isinstance(found, MissingTokenizer)]

    def _drafts(
        self,
        columns: Mapping[str, list[Any]],
        given: Mapping[str, list[Any]],
        undecodable: Mapping[int, list[str]],
        places: Sequence[str],
        adapters: list[str | None],
    ) -> list[RowDraft]:
        """One draft for each row, its text still to be tokenised. `given`: values for the templates, by column.
        `undecodable`: problems of values that cannot be read, by row. `adapters`: of each row.
        """
        own = [name for name in SAMPLING_COLUMNS if name in columns]
        beside = [name for name in RENDERING_OPTIONS if name in columns]
        expected: list[str | None] = [None] * len(places)
        asked = [""] * len(places)
        prompts: list[Any]
        if self._job.renders_messages:
            conversations = self._conversations(columns, given)
            tools = columns.get("tools", asked)
            asked = [_asked(*of_row) for of_row in zip(conversations, tools, strict=True)]
            if self._job.expected_field is not None:
                conversations, expected = self._without_answers(conversations)
            prompts = self._rendered(conversations, adapters, {name: columns[name] for name in beside})
        else:
            prompts = self._written(_rows(given), adapters) if self._job.templates else columns[self._prompt_role]
        drafts = []
        for row, adapter in enumerate(adapters):
            row_id = columns["id"][row] if "id" in columns else places[row]
            sampling, problems = self._sampling({name: columns[name][row] for name in own}, adapter)
            draft = RowDraft(row_id, sampling, row=row, adapter=adapter, expected=expected[row])
            draft.task = task_hash(sampling, sampling.task if sampling.is_pooled else asked[row], self._job.templates)
            drafts.append(draft)
            for problem in undecodable.get(row, ()):
                draft.reject(ErrorKind.PROMPT, problem)
            if draft.problems:
                continue  # other columns of the row may be null only because they could not be decoded
            if row_id is None:
                draft.reject(ErrorKind.ID, "id=null: expected a value of its own for every row. Fill it in.")
            if self._job.allowed and (why := not_allowed(self._job.allowed, columns[ALLOWED_ROLE][row], adapter)):
                draft.reject(ErrorKind.NOT_ALLOWED, why)
            self._check_prompt(draft, prompts[row])
            if "continuation" in columns:
                check_continuation(draft, columns["continuation"][row])
            if self._job.score_by is not None:
                right = columns[EXPECTED_ROLE][row] if EXPECTED_ROLE in columns else expected[row]
                check_expected(draft, right, self._job.score_by)
            if not self._job.renders_messages:
                check_unrendered(draft, {n: columns[n][row] for n in beside}, self._place_of_prompts)
            for problem in problems:
                draft.reject(ErrorKind.SAMPLING, f"{problem}. Correct the row, or leave it null for the job's value.")
        return drafts

    def _vocab_size(self, adapter: str | None) -> int:
        """Size of the vocabulary of an adapter's rows: the adapter's own, else the base model's."""
        apart = None if adapter is None else self._job.prepared_apart.get(adapter)
        return (apart.vocab_size if apart else 0) or self._job.vocab_size

    def _sampling(self, values: Mapping[str, Any], adapter: str | None) -> tuple[SamplingParams, list[str]]:
        """A row's sampling for its task, and what is wrong with it. Kept by value, since rows mostly repeat a few
        combinations.
        """
        vocab_size, named = self._vocab_size(adapter), None if self._job.base is None else adapter
        key = (
            vocab_size,
            named,
            *(
                (type(v), str(v) if isinstance(v, dict) else tuple(v) if isinstance(v, list) else v)
                for v in values.values()
            ),
        )
        if key not in self._samplings:
            sampling, problems = read_sampling(self._job.sampling, values, vocab_size)
            task = sampling.task or self._job.task_of(adapter)
            problems = problems or self._job.task_problem(task, adapter)
            self._samplings[key] = sampling.of_task(task), problems
        return self._samplings[key]

    def _check_prompt(self, draft: RowDraft, value: Any) -> None:
        if self._job.renders_messages or self._job.templates:
            check_rendered(draft, value, self._job.template_option or self._prompt_role)
            if isinstance(value, RenderedMessages):
                begin_reasoning(draft, value.text, value.open_text)
        elif self._is_text:
            check_text(draft, value)
            begin_reasoning(draft, draft.text or "")
            tokenizer = self._tokenizer(draft.adapter)
            if draft.text is not None and tokenizer.has_chat_template and not tokenizer.has_special_text(draft.text):
                self.counts[PLAIN] += 1
        else:
            check_token_ids(draft, value, self._vocab_size(draft.adapter))
            if draft.tokens and draft.sampling.reasoning is not None:
                tokenizer = self._tokenizer(draft.adapter)
                keep = tokenizer.special_tokens_in(draft.sampling.reasoning)
                with rejecting(draft):
                    begin_reasoning(draft, tokenizer.decode(draft.tokens[-_END_TOKENS:], keep))

    @property
    def _place_of_prompts(self) -> str:
        """The place of prompts that no chat template renders, in words."""
        if self._job.templates:
            return f"made by {self._job.template_option}"
        return f"in column {self._job.roles[self._prompt_role]!r}"

    def _conversations(
        self, columns: Mapping[str, list[Any]], given: Mapping[str, list[Any]]
    ) -> list[list[dict[str, Any]] | str]:
        """Each row's messages, or a sentence that says why it has none."""
        system_prompt = self._job.system_prompt
        if self._job.templates:
            roles, sources = zip(*self._job.templates, strict=True)
            found = _prompt_template(sources, self._job.now).render_all(_rows(given))
            return [templated_messages(roles, texts, self._job.template_option, system_prompt) for texts in found]
        read = read_messages if self._prompt_role == "messages" else prompt_as_messages
        return [read(value, system_prompt) for value in columns[self._prompt_role]]

    def _written(self, rows: list[dict[str, Any]], adapters: list[str | None]) -> list[RenderedMessages | str]:
        """The prompt that the template writes of each row, those of one tokenizer at once, or a sentence."""
        ((_, source),) = self._job.templates
        found: list[Any] = [None] * len(rows)
        for tokenizer, places in self._by_tokenizer(range(len(rows)), adapters).items():
            prompts = tokenizer.render_values(
                [rows[place] for place in places],
                self._texts,
                source,
                allow_special_tokens=self._job.allow_special_tokens,
            )
            for place, prompt in zip(places, prompts, strict=True):
                is_blank = isinstance(prompt, RenderedMessages) and not prompt.text.strip()
                found[place] = blank_prompt(self._job.template_option) if is_blank else prompt
                if isinstance(prompt, TokenizerError):
                    found[place] = f"{self._job.template_option}: {prompt}."
        return found

    def _texts(self, source: str, rows: Sequence[Mapping[str, Any]]) -> list[str | TokenizerError]:
        """The text that a template of this source writes of each row, or why there is none."""
        found = _prompt_template((source,), self._job.now).render_all(rows)
        return [texts if isinstance(texts, TokenizerError) else texts[0] for texts in found]

    def _by_tokenizer(self, rows: Iterable[int], adapters: list[str | None]) -> dict[Tokenizer, list[int]]:
        found: dict[Tokenizer, list[int]] = {}
        for row in rows:
            found.setdefault(self._tokenizer(adapters[row]), []).append(row)
        return found

    @staticmethod
    def _without_answers(conversations: list[Any]) -> tuple[list[Any], list[str | None]]:
        """Conversations without their final answers, and the answers; None for a conversation without one."""
        split = [(one, None) if isinstance(one, str) else split_answer(one) for one in conversations]
        return [messages for messages, _ in split], [answer for _, answer in split]

    def _rendered(
        self,
        given: list[list[dict[str, Any]] | str],
        adapters: list[str | None],
        beside: Mapping[str, list[Any]],
    ) -> list[RenderedMessages | str]:
        """Render each row's messages with its chat template, all rows of one tokenizer at once. `beside`: the rows' own
        values of `RENDERING_OPTIONS`, by option.
        """
        found: list[Any] = []
        options = self._rendering(())
        for row, messages in enumerate(given):
            if beside:
                options = self._rendering(tuple((name, _hashable(column[row])) for name, column in beside.items()))
            if isinstance(messages, str) or isinstance(options, str):
                found.append(messages if isinstance(messages, str) else options)
            elif options.continue_final_message and self._job.expected_field is not None:
                found.append(SPLIT_AND_CONTINUED)
            else:
                found.append(Conversation(messages, options))
                self.counts.update(peculiarities(messages, options))
        waiting = [row for row, conversation in enumerate(found) if isinstance(conversation, Conversation)]
        for tokenizer, rows in self._by_tokenizer(waiting, adapters).items():
            conversations = [found[row] for row in rows]
            prompts = tokenizer.render_messages(conversations, allow_special_tokens=self._job.allow_special_tokens)
            for row, prompt in zip(rows, prompts, strict=True):
                found[row] = f"messages: {prompt}." if isinstance(prompt, TokenizerError) else prompt
        return found

    def _read_rendering(self, own: tuple[tuple[str, Any], ...]) -> RenderOptions | str:
        return read_rendering(self._job.rendering, dict(own))

    def _tokenizer(self, adapter: str | None) -> Tokenizer:
        own = adapter if adapter in self._job.prepared_apart else None
        if own not in self._tokenizers:
            self._tokenizers[own] = self._tokenizer_of(own)
        return self._tokenizers[own]

    def _tokenise(self, drafts: list[RowDraft]) -> None:
        """Tokenise the drafts' texts, those of one tokenizer together, and the completions that are to be scored."""
        waiting: dict[Tokenizer, list[RowDraft]] = {}
        for draft in drafts:
            if draft.text is None:
                continue
            tokenizer = self._tokenizer(draft.adapter)
            with rejecting(draft):
                check_size(draft, self._job.max_context_tokens, tokenizer.exceeds)
            if draft.text is not None:
                waiting.setdefault(tokenizer, []).append(draft)
        for tokenizer, texts_of in waiting.items():
            for together in _together(texts_of):
                texts = [draft.text for draft in together]
                for draft, tokens in zip(together, self._encoded(tokenizer, together), strict=True):
                    take_tokens(draft, tokens)
                for draft, text in zip(together, texts, strict=True):
                    with rejecting(draft):
                        self._score(draft, text, tokenizer)
        for draft in drafts:
            if self._prompt_role == "prompt_token_ids":
                with rejecting(draft):
                    self._score(draft, None, self._tokenizer(draft.adapter))
            check_tokens(draft, self._vocab_size(draft.adapter))
            if draft.sampling.task == "classify" and draft.tokens and self._job.base:
                draft.tokens = without_padding(draft.tokens, self._job.base.pad_token_id)

    def _check_options(self, drafts: list[RowDraft]) -> None:
        """Reject rows whose options hold texts that do not fit or cannot be tokenised, before an engine meets them."""
        for draft in drafts:
            sampling = draft.sampling
            if draft.problems or not (sampling.choice or sampling.bad_words):
                continue
            tokenizer = self._tokenizer(draft.adapter)
            with rejecting(draft):
                check_choice_size(draft, tokenizer, self._job.max_context_tokens)
                if draft.problems:
                    continue
                steps_of_choice(tokenizer, sampling, draft.tokens or ())
                if self._prompt_role != "prompt_token_ids":
                    check_choice(draft, tokenizer)
                texts = [blank + word.lstrip() for word in sampling.bad_words for blank in ("", " ")]
                tokenizer.encode_batch(texts, is_rendered=True)

    def _score(self, draft: RowDraft, text: str | None, tokenizer: Tokenizer) -> None:
        """Find the tokens that given completions have behind the prompt. `text`: the prompt's text; None for a prompt
        of tokens.
        """
        if draft.problems or not draft.continuation_texts:
            return
        prompt = draft.tokens or []
        if text is None:
            found = texts_behind(tokenizer, prompt, draft.continuation_texts)
            set_continuations(draft, [(prompt, tokens) for tokens in found])
            return
        num_ends = tokenizer.num_end_tokens if self._is_text else 0
        together = [replace(draft, text=text + behind) for behind in draft.continuation_texts]
        whole = [tokens[: len(tokens) - num_ends] for tokens in _all(self._encoded(tokenizer, together))]
        prompt = prompt[: len(prompt) - num_ends]
        set_continuations(draft, [split_at_prompt(prompt, tokens) for tokens in whole])

    def _encoded(self, tokenizer: Tokenizer, drafts: list[RowDraft]) -> list[list[int] | TokenizerError]:
        if self._is_text and not self._job.templates:
            return tokenizer.encode_each([draft.text or "" for draft in drafts], is_rendered=False)
        rendered = [RenderedMessages(draft.text or "", draft.stand_ins) for draft in drafts]
        encode = tokenizer.encode_values_each if self._is_text else tokenizer.encode_messages_each
        return encode(rendered, allow_special_tokens=self._job.allow_special_tokens)

    def _fixed_tokens(self, draft: RowDraft) -> int:
        """Tokens that will be computed behind a row's prompt; 0 when its options do not fix the number."""
        if draft.problems:
            return 0
        given = len(draft.sampling.continuation_token_ids)
        if draft.sampling.is_pooled or draft.sampling.is_given:
            return 1  # the others of a given completion are computed as a prompt's are
        return given or steps_of_choice(self._tokenizer(draft.adapter), draft.sampling, draft.tokens or ())


def _all(found: list[list[int] | TokenizerError]) -> list[list[int]]:
    """Tokens of all texts. Raises `TokenizerError`."""
    tokens = [one for one in found if not isinstance(one, TokenizerError)]
    if len(tokens) < len(found):
        raise next(one for one in found if isinstance(one, TokenizerError))
    return tokens


def _together(drafts: list[RowDraft]) -> Iterator[list[RowDraft]]:
    """Groups of rows whose texts are tokenised at once: a tokenizer takes many times the memory of its texts."""
    together: list[RowDraft] = []
    characters = 0
    for draft in drafts:
        size = len(draft.text or "")
        if together and characters + size > _TOGETHER_CHARACTERS:
            yield together
            together, characters = [], 0
        together.append(draft)
        characters += size
    if together:
        yield together


@lru_cache(maxsize=8)
def _prompt_template(sources: tuple[str, ...], now: str) -> PromptTemplate:
    return PromptTemplate(sources, datetime.fromisoformat(now) if now else None)


def content_id(columns: Mapping[str, list[Any]], row: int) -> str:
    """Id of a row by the values of all that its answer depends on: 32 hexadecimal digits."""
    asked = {name: values[row] for name, values in sorted(columns.items()) if values[row] is not None}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _rows(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Values of columns, by row and by column."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _asked(messages: list[dict[str, Any]] | str, tools: Any) -> str:
    """System messages and tools of a row, which rows of one task have in common; "" for a row without messages."""
    if isinstance(messages, str):
        return ""
    return system_text(messages) + (f"\0{_hashable(tools)}" if tools else "")


def _hashable(value: Any) -> Any:
    """A hashable stand-in for a column's value: equal for equal values."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
