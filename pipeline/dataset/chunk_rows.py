"""Checks and tokenises the rows of one chunk, and orders and indexes them: `ChunkRows`.

Shapes: rows `[num_rows]` in input order; after `order()`, in the order of the chunk file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...engine.errors import ChatTemplateError, TokenizerError
from ...engine.request import SamplingParams
from ...engine.text.boundary import split_at_prompt, texts_behind
from ...engine.text.choices import steps_of_choice
from ...engine.text.confined_tokenizer import MissingTokenizer
from ...engine.text.conversation import (
    RENDERING_OPTIONS,
    SPLIT_AND_CONTINUED,
    Conversation,
    RenderOptions,
    peculiarities,
)
from ...engine.text.literal import RenderedMessages
from ...engine.text.tokenizer import Tokenizer
from ...jobs.input.columns import DEFAULT_ID_COLUMN, role_values
from ...jobs.spec import PROMPT_ROLES, SAMPLING_COLUMNS
from . import schema as prepared
from .chunk import IndexJob
from .fingerprints import id_hash, prefix_hash, row_fingerprint, shared_tokens
from .nested_values import without_filling
from .row_checks import (
    ErrorKind,
    PromptProblem,
    RowDraft,
    begin_reasoning,
    check_choice,
    check_choice_size,
    check_continuation,
    check_length,
    check_rendered,
    check_size,
    check_text,
    check_token_ids,
    check_tokens,
    check_unrendered,
    read_messages,
    read_rendering,
    read_sampling,
    rejecting,
    sampling_overrides,
    set_continuations,
    split_answer,
    take_tokens,
)

_TOGETHER_CHARACTERS = 4 << 20
# Most different values of `RENDERING_OPTIONS` that are kept as read for later rows.
_MOST_RENDERINGS = 1024
# Tokens at the end of a prompt of tokens in which the start of reasoning is looked for.
_END_TOKENS = 64


class ChunkRows:
    """Collects checked rows. Holds one chunk in memory, as Arrow columns."""

    def __init__(self, chunk_id: int, job: IndexJob, tokenizer_of: Callable[[str | None], Tokenizer]) -> None:
        self._chunk_id = chunk_id
        self._job = job
        self._tokenizer_of = tokenizer_of
        self._tokenizers: dict[str | None, Tokenizer] = {}
        self._prompt_role = next(role for role in PROMPT_ROLES if role in job.roles)
        self._samplings: dict[tuple[Any, ...], tuple[SamplingParams, list[str]]] = {}
        self._rendering = lru_cache(_MOST_RENDERINGS)(self._read_rendering)
        self._batches: list[pa.RecordBatch] = []
        self._numbers: list[pa.RecordBatch] = []
        #: Rows with a peculiarity that users should know of, by peculiarity (`status.notes.row_notes` writes them up).
        self.counts: Counter[str] = Counter()
        self._num_prepared = 0

    def add(self, batch: pa.RecordBatch, places: Sequence[str]) -> None:
        """Check and tokenise the next rows of the chunk. `places`: `file:row` of each."""
        columns = {role: _values_of(role, role_values(batch, name)) for role, name in self._job.roles.items()}
        undecodable = _take_undecodable(columns)
        adapters = [name or None for name in columns.get("adapter", [None] * batch.num_rows)]
        drafts = self._drafts(columns, adapters, undecodable, places)
        self._tokenise(drafts, adapters)
        self._check_options(drafts, adapters)
        for draft in drafts:
            check_length(draft, self._job.max_context_tokens)
        rows = [row for row, draft in enumerate(drafts) for _ in draft.samples()]
        if len(rows) > len(drafts):
            drafts = [sample for draft in drafts for sample in draft.samples()]
            adapters = [adapters[row] for row in rows]
            batch = batch.take(pa.array(rows))
        self._append(batch, drafts, adapters, [places[row] for row in rows])

    @property
    def without_tokenizer(self) -> list[str]:
        """Adapters whose rows are errors because their own tokenizer could not be read."""
        return [name for name, found in self._tokenizers.items() if name and isinstance(found, MissingTokenizer)]

    def order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows sorted by adapter, the base model first, otherwise as in the input; and the beginnings of record
        batches: `[num_batches + 1]` offsets into the order.
        """
        names = pa.chunked_array([batch.column("adapter") for batch in self._numbers])
        codes = names.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
        rank = np.argsort(np.argsort(codes.dictionary.to_numpy(zero_copy_only=False)))
        adapter = rank[codes.indices.to_numpy(zero_copy_only=False)]
        order = np.argsort(adapter, kind="stable")
        starts = np.flatnonzero(np.diff(adapter[order], prepend=-1))
        ends = np.append(starts[1:], len(order))
        cuts = [np.arange(start, end, prepared.BATCH_ROWS) for start, end in zip(starts, ends, strict=True)]
        return order, np.append(np.concatenate(cuts), len(order))

    def prepared_batches(self, order: NDArray[np.int64], offsets: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """The rows in `order`, as the record batches of the chunk file."""
        table = pa.Table.from_batches(self._batches).unify_dictionaries().combine_chunks()
        for start, end in pairwise(offsets.tolist()):
            yield table.take(pa.array(order[start:end])).combine_chunks().to_batches()[0]

    def index(self, order: NDArray[np.int64], offsets: NDArray[np.int64]) -> pa.Table:
        """The rows' numbers for the planner, in `order`, each with record batch and row in it (`INDEX_SCHEMA`)."""
        sizes = np.diff(offsets)
        batch = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(len(order)) - offsets[:-1][batch]
        numbers = pa.Table.from_batches(self._numbers).take(pa.array(order))
        columns = {
            **{name: numbers.column(name) for name in numbers.column_names},
            "adapter": numbers.column("adapter").combine_chunks().dictionary_encode(),
            "shared_tokens": pa.array(self._shared_tokens()[order]),
            "batch": pa.array(batch, pa.int32()),
            "row": pa.array(row, pa.int32()),
            "place": pa.array(order, pa.int32()),
        }
        return pa.table(columns, schema=prepared.INDEX_SCHEMA)

    def _shared_tokens(self) -> NDArray[np.int32]:
        """`fingerprints.shared_tokens` of the chunk's rows, in input order."""
        adapters = [name for batch in self._numbers for name in batch.column("adapter").to_pylist()]
        tokens = [batch.column(prepared.TOKENS) for batch in self._batches]
        prompts = [_tokens(column, row) for column in tokens for row in range(len(column))]
        return shared_tokens(adapters, prompts)

    def _drafts(
        self,
        columns: Mapping[str, list[Any]],
        adapters: list[str | None],
        undecodable: Mapping[int, list[str]],
        places: Sequence[str],
    ) -> list[RowDraft]:
        own = [name for name in SAMPLING_COLUMNS if name in columns]
        beside = [name for name in RENDERING_OPTIONS if name in columns]
        prompts = columns[self._prompt_role]
        has_messages = self._prompt_role == "messages"
        expected: list[str | None] = [None] * len(prompts)
        if has_messages:
            conversations = [read_messages(value, self._job.system_prompt) for value in prompts]
            if self._job.expected_field is not None:
                conversations, expected = self._without_answers(conversations)
            prompts = self._rendered(conversations, adapters, {name: columns[name] for name in beside})
        drafts = []
        for row, adapter in enumerate(adapters):
            row_id = columns["id"][row] if "id" in columns else places[row]
            sampling, problems = self._sampling({name: columns[name][row] for name in own}, self._vocab_size(adapter))
            draft = RowDraft(row_id, sampling, expected=expected[row])
            drafts.append(draft)
            for problem in undecodable.get(row, ()):
                draft.reject(ErrorKind.PROMPT, problem)
            if draft.problems:
                continue  # other columns of the row may be null only because they could not be decoded
            if row_id is None:
                draft.reject(ErrorKind.ID, "id=null: expected a value of its own for every row. Fill it in.")
            self._check_prompt(draft, prompts[row], adapter)
            if "continuation" in columns:
                check_continuation(draft, columns["continuation"][row])
            if not has_messages:
                check_unrendered(draft, {n: columns[n][row] for n in beside}, self._job.roles[self._prompt_role])
            for problem in problems:
                draft.reject(ErrorKind.SAMPLING, f"{problem}. Correct the row, or leave it null for the job's value.")
        return drafts

    def _vocab_size(self, adapter: str | None) -> int:
        """Size of the vocabulary of an adapter's rows: the adapter's own, else the base model's."""
        apart = None if adapter is None else self._job.prepared_apart.get(adapter)
        return (apart.vocab_size if apart else 0) or self._job.vocab_size

    def _sampling(self, values: Mapping[str, Any], vocab_size: int) -> tuple[SamplingParams, list[str]]:
        """A row's sampling and what is wrong with it. Kept by value, since rows mostly repeat a few combinations."""
        key = (
            vocab_size,
            *(
                (type(v), str(v) if isinstance(v, dict) else tuple(v) if isinstance(v, list) else v)
                for v in values.values()
            ),
        )
        if key not in self._samplings:
            self._samplings[key] = read_sampling(self._job.sampling, values, vocab_size)
        return self._samplings[key]

    def _check_prompt(self, draft: RowDraft, value: Any, adapter: str | None) -> None:
        if self._prompt_role == "prompt":
            check_text(draft, value)
            begin_reasoning(draft, draft.text or "")
        elif self._prompt_role == "messages":
            check_rendered(draft, value)
            if isinstance(value, RenderedMessages):
                begin_reasoning(draft, value.text, value.open_text)
        else:
            check_token_ids(draft, value, self._vocab_size(adapter))
            if draft.tokens and draft.sampling.reasoning is not None:
                tokenizer = self._tokenizer(adapter)
                keep = tokenizer.special_tokens_in(draft.sampling.reasoning)
                with rejecting(draft):
                    begin_reasoning(draft, tokenizer.decode(draft.tokens[-_END_TOKENS:], keep))

    @staticmethod
    def _without_answers(conversations: list[Any]) -> tuple[list[Any], list[str | None]]:
        """Conversations without their final answers, and the answers; None for a conversation without one."""
        split = [(one, None) if isinstance(one, PromptProblem) else split_answer(one) for one in conversations]
        return [messages for messages, _ in split], [answer for _, answer in split]

    def _rendered(
        self,
        given: list[list[dict[str, Any]] | PromptProblem],
        adapters: list[str | None],
        beside: Mapping[str, list[Any]],
    ) -> list[RenderedMessages | PromptProblem]:
        """Render each row's messages with its chat template, all rows of one tokenizer at once. `beside`: the rows' own
        values of `RENDERING_OPTIONS`, by option.
        """
        found: list[Any] = []
        options = self._rendering(())
        for row, messages in enumerate(given):
            if beside:
                options = self._rendering(tuple((name, _hashable(column[row])) for name, column in beside.items()))
            if isinstance(messages, PromptProblem) or isinstance(options, PromptProblem):
                found.append(messages if isinstance(messages, PromptProblem) else options)
            elif options.continue_final_message and self._job.expected_field is not None:
                found.append(PromptProblem(SPLIT_AND_CONTINUED))
            else:
                found.append(Conversation(messages, options))
                self.counts.update(peculiarities(messages, options))
        waiting: dict[Tokenizer, list[int]] = {}
        for row, conversation in enumerate(found):
            if isinstance(conversation, Conversation):
                waiting.setdefault(self._tokenizer(adapters[row]), []).append(row)
        for tokenizer, rows in waiting.items():
            conversations = [found[row] for row in rows]
            prompts = tokenizer.render_messages(conversations, allow_special_tokens=self._job.allow_special_tokens)
            for row, prompt in zip(rows, prompts, strict=True):
                found[row] = PromptProblem.of_template(prompt) if isinstance(prompt, ChatTemplateError) else prompt
        return found

    def _read_rendering(self, own: tuple[tuple[str, Any], ...]) -> RenderOptions | PromptProblem:
        return read_rendering(self._job.rendering, dict(own))

    def _tokenizer(self, adapter: str | None) -> Tokenizer:
        own = adapter if adapter in self._job.prepared_apart else None
        if own not in self._tokenizers:
            self._tokenizers[own] = self._tokenizer_of(own)
        return self._tokenizers[own]

    def _tokenise(self, drafts: list[RowDraft], adapters: list[str | None]) -> None:
        """Tokenise the drafts' texts, those of one tokenizer together, and the completions that are to be scored."""
        waiting: dict[Tokenizer, list[RowDraft]] = {}
        for draft, adapter in zip(drafts, adapters, strict=True):
            if draft.text is None:
                continue
            tokenizer = self._tokenizer(adapter)
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
        for draft, adapter in zip(drafts, adapters, strict=True):
            if self._prompt_role == "prompt_token_ids":
                with rejecting(draft):
                    self._score(draft, None, self._tokenizer(adapter))
            check_tokens(draft, self._vocab_size(adapter))

    def _check_options(self, drafts: list[RowDraft], adapters: list[str | None]) -> None:
        """Reject rows whose options hold texts that do not fit or cannot be tokenised, before an engine meets them."""
        for draft, adapter in zip(drafts, adapters, strict=True):
            sampling = draft.sampling
            if draft.problems or not (sampling.choice or sampling.bad_words):
                continue
            tokenizer = self._tokenizer(adapter)
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
        num_ends = tokenizer.num_end_tokens if self._prompt_role == "prompt" else 0
        together = [replace(draft, text=text + behind) for behind in draft.continuation_texts]
        whole = [tokens[: len(tokens) - num_ends] for tokens in _all(self._encoded(tokenizer, together))]
        prompt = prompt[: len(prompt) - num_ends]
        set_continuations(draft, [split_at_prompt(prompt, tokens) for tokens in whole])

    def _encoded(self, tokenizer: Tokenizer, drafts: list[RowDraft]) -> list[list[int] | TokenizerError]:
        if self._prompt_role != "messages":
            return tokenizer.encode_each([draft.text or "" for draft in drafts], is_rendered=False)
        rendered = [RenderedMessages(draft.text or "", draft.stand_ins) for draft in drafts]
        return tokenizer.encode_messages_each(rendered, allow_special_tokens=self._job.allow_special_tokens)

    def _append(
        self, batch: pa.RecordBatch, drafts: list[RowDraft], adapters: list[str | None], places: list[str]
    ) -> None:
        first, job = self._num_prepared, replace(self._job.sampling, n=1)
        self._num_prepared += len(drafts)
        ours = (
            [f"{self._chunk_id}:{number}" for number in range(first, self._num_prepared)],
            adapters,
            [draft.tokens for draft in drafts],
            [None if d.problems else sampling_overrides(job, d.sampling) for d in drafts],
            [" ".join(draft.problems) or None for draft in drafts],
            [row_fingerprint(d.row_id, d.tokens or (), d.sampling, d.sample) for d in drafts],
            places,
        )
        fields = [field for field in batch.schema if field.name not in self._job.dropped]
        columns = [batch.column(field.name) for field in fields]
        if "id" not in self._job.roles:
            fields.append(pa.field(DEFAULT_ID_COLUMN, pa.string()))
            columns.append(pa.array([draft.row_id for draft in drafts], pa.string()))
        if (expected := self._job.expected_field) is not None:
            fields.append(expected)
            columns.append(pa.array([draft.expected for draft in drafts], expected.type))
        if (numbers := self._job.sample_field) is not None:
            fields.append(numbers)
            columns.append(pa.array([draft.sample for draft in drafts], numbers.type))
        for column, values in zip(prepared.PREPARED_FIELDS, ours, strict=True):
            fields.append(column)
            columns.append(pa.array(values, column.type))
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))
        self._numbers.append(_numbers(drafts, adapters, list(map(self._fixed_tokens, drafts, adapters))))

    def _fixed_tokens(self, draft: RowDraft, adapter: str | None) -> int:
        """Tokens that will be computed behind a row's prompt; 0 when its options do not fix the number."""
        if draft.problems:
            return 0
        given = len(draft.sampling.continuation_token_ids)
        return given or steps_of_choice(self._tokenizer(adapter), draft.sampling, draft.tokens or ())


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


def _numbers(drafts: list[RowDraft], adapters: list[str | None], fixed_tokens: list[int]) -> pa.RecordBatch:
    """The rows' numbers for the index. Error rows have `max_tokens` 0: they need no engine."""
    values = {
        "prompt_tokens": [len(draft.tokens or ()) for draft in drafts],
        "max_tokens": [0 if draft.problems else draft.sampling.max_tokens for draft in drafts],
        "prefix_hash": [prefix_hash(draft.tokens or ()) for draft in drafts],
        "id_hash": [0 if draft.sample else id_hash(draft.row_id) for draft in drafts],
        "error_kind": [int(draft.kind) for draft in drafts],
        "is_drawn": [draft.sampling.is_drawn for draft in drafts],
        "is_scored": [draft.sampling.wants_prompt_logprobs for draft in drafts],
        "fixed_tokens": fixed_tokens,
    }
    columns = {name: pa.array(items, prepared.INDEX_SCHEMA.field(name).type) for name, items in values.items()}
    return pa.RecordBatch.from_pydict({"adapter": pa.array(adapters, pa.string()), **columns})


def _tokens(column: pa.Array, row: int) -> NDArray[np.int32]:
    """One row's tokens; none for an error row."""
    prompt = column[row].values
    return np.zeros(0, np.int32) if prompt is None else prompt.to_numpy()


def _values_of(role: str, column: pa.Array) -> list[Any]:
    """`_values` of a column. Values for chat templates are without the filling of nested columns."""
    values = _values(column)
    if not pa.types.is_nested(column.type) or role not in ("messages", *RENDERING_OPTIONS):
        return values
    return [v if isinstance(v, UnicodeDecodeError) else without_filling(v, column.type) for v in values]


def _values(column: pa.Array) -> list[Any]:
    """Python values of a column. Text that is not UTF-8 is a `UnicodeDecodeError` in its own row."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(item) for item in column]


def _take_undecodable(columns: Mapping[str, list[Any]]) -> dict[int, list[str]]:
    """Set values that are not UTF-8 to None, and return their problems by row."""
    found: dict[int, list[str]] = {}
    for role, values in columns.items():
        for row, value in enumerate(values):
            if isinstance(value, UnicodeDecodeError):
                found.setdefault(row, []).append(f"{role}: not valid UTF-8 text ({value.reason}).")
                values[row] = None
    return found


def _hashable(value: Any) -> Any:
    """A hashable stand-in for a column's value: equal for equal values."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _value(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return error
