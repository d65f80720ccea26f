"""Finds which tokens a row's grammar allows next. All that lorabatch knows of llguidance.

Masks depend on the constraint, the tokenizer and the row's own tokens alone, so that a row that goes on in another
engine is constrained as if it had stayed. A row that may reason is constrained from where its answer begins.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from ....system.confinement import ConfinedError, confined
from ....system.untrusted import shown
from ...errors import EngineError, TokenizerError
from ...request import Request
from ...sequence import Sequence
from ..tokenizers.tokenizer import Tokenizer, Tokenizers
from .choices import ChoiceMatcher, ChoiceTree, tree_of
from .json_schema import enforceable
from .reasoning import AnswerTokens

#: Characters of a grammar. Schemas in use have a few thousand.
MOST_CHARACTERS = 256 * 1024
# The confined process that compiles a grammar first: its task, CPU seconds, memory and stack.
_TASK = "engine.text.answers.grammar"
_CPU_S, _MEMORY_BYTES, _STACK_BYTES = 5, 1 << 30, 1 << 20
# JSON as Python writes it, on one line. With free white space a confused model emits blanks for ever.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Without \uXXXX: a key that is written with one would be another key to the grammar, and the same to a reader.
_ESCAPES = 'nrbtf\\"'
_SCHEMA_IN_GRAMMAR = re.compile(r"%json\s*\{")
# Compiled grammars that are kept for rows to come.
_MOST_COMPILED = 1024
# Twice llguidance's own for a first look, a fifth of its states: a hostile grammar costs seconds and megabytes.
_LIMITS = LLParserLimits(initial_lexer_fuel=2_000_000, max_lexer_states=50_000)


@lru_cache(_MOST_COMPILED)
def grammar_problem(constraint: str) -> str | None:
    """Why a constraint (`SamplingParams.constraint`) cannot be enforced, as a plain sentence; None for one that can be.
    A constraint that would be enforced in part is a problem, too.

    Found in a confined process, which the library may crash. Raises `NoProcessError`.
    """
    [kind] = json.loads(constraint)
    if len(constraint) > MOST_CHARACTERS:
        return f"{kind}: {len(constraint)} characters, expected at most {MOST_CHARACTERS}"
    try:
        problem: str | None = confined().run(_TASK, constraint, _CPU_S, _MEMORY_BYTES)
    except ConfinedError as error:
        return f"{kind}: cannot be compiled ({error})"
    return problem


def run(constraint: str) -> str | None:
    """The task of the confined process: what `grammar_problem` says of a constraint.

    On a small stack: what nests too deeply ends this process, and no thread of an engine.
    """
    threading.stack_size(_STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_problem, constraint).result()


def _problem(constraint: str) -> str | None:
    [(kind, value)] = json.loads(constraint).items()
    try:
        source = _source(kind, value)
    except EngineError as problem:
        return str(problem)
    except (ValueError, RecursionError) as error:
        return f"{kind}: not JSON of an object ({error})"
    found = _finding(source)
    return None if found is None else _in_the_user_s_words(kind, value, found)


def _finding(source: str) -> str | None:
    """The first objection of llguidance to a grammar; None when there is none."""
    _, messages = LLMatcher.validate_grammar_with_warnings(source, limits=_LIMITS)
    return messages[0] if messages else None


def _in_the_user_s_words(kind: str, value: Any, found: str) -> str:
    """A finding of llguidance, which speaks of grammars and options of its own."""
    if kind == "regex":
        return f"regex={shown(value)}: {_about_pattern(found, kind)}"
    if kind == "json_schema" and ("regex" in found or "lookaround" in found):
        for place, given, written in enforceable(value)[2]:
            about = _finding(_source("regex", written.removeprefix("^").removesuffix("$")))
            if about is not None:
                return f"{place}={shown(given)}: {_about_pattern(about, kind)}"
    if "oneOf constraints" in found:
        return (
            "json_schema.oneOf: not supported where one instance may be of several parts. Write anyOf, or give the "
            "parts types, constants or required keys that exclude each other."
        )
    if "min/maxProperties" in found:
        return (
            "json_schema.minProperties, maxProperties: not supported beside optional keys of properties. Name all of "
            "them in required, or leave the bound out."
        )
    return f"{kind}: {' '.join(found.split())}"


def _about_pattern(found: str, kind: str) -> str:
    """Why a regular expression cannot be enforced, and what to write. Those of schemas match anywhere in a text."""
    if "; Word" in found:
        return r"\b and \B are not supported. Write the characters that may stand there."
    if "; Start" in found or "; End" in found:
        next_step = "Leave them out: it is matched from its beginning to its end."
        if kind == "json_schema":
            next_step = "Write them at its beginning and its end only."
        return f"^ and $ inside of it are not supported. {next_step}"
    reason = next((line.removeprefix("error: ") for line in found.splitlines() if line.startswith("error: ")), found)
    syntax = "the syntax of Rust's regex" if kind == "regex" else "what ECMA-262 and Rust's regex have in common"
    return f"{' '.join(reason.split())}. Write it in {syntax}."


def _source(kind: str, value: Any) -> str:
    """A constraint as llguidance reads it. Raises ValueError for what is no JSON Schema, EngineError for a schema that
    is not enforced whole.
    """
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "choice":
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(value)))))
    if kind == "grammar":
        if _SCHEMA_IN_GRAMMAR.search(value):
            raise EngineError("grammar: %json would be enforced in part. Give the schema as json_schema instead.")
        return str(LLMatcher.grammar_from_lark(value))
    schema, form, _ = enforceable(value)
    overrides: Any = {**_JSON_FORM, **form, "json_allowed_escapes": _ESCAPES}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))


@dataclass(slots=True)
class _Running:
    """A row's matcher, and how many of its tokens it has seen. `answer`: finds where the matcher begins, in rows that
    may reason. `width`: tokens of its masks: its tokenizer may have more than the model.
    """

    matcher: LLMatcher | ChoiceMatcher
    width: int
    answer: AnswerTokens | None = None
    num_seen: int = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the row's next token is part of its reasoning."""
        return self.answer is not None and self.answer.is_reasoning

    @property
    def start_token(self) -> int | None:
        """The token that would begin reasoning, or go on with its marker; None where the answer has begun."""
        return None if self.answer is None else self.answer.start_token

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows its end and nothing else."""
        has_begun = not self.is_reasoning and self.start_token is None
        return has_begun and bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    def next_matcher(self) -> LLMatcher | ChoiceMatcher:
        """The matcher for the row's next token, if that is not of its reasoning."""
        if self.answer is None or not self.answer.undecided:
            return self.matcher
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(self.answer.undecided)
        return matcher

    def catch_up(self, sequence: Sequence) -> None:
        """Feed the row's new tokens to the matcher: the last one, or all of a row from elsewhere."""
        new = sequence.token_ids[self.num_seen :]
        if not new:
            return
        answer = new if self.answer is None else self.answer.add(new)
        if answer and not self.matcher.is_error():
            self.matcher.consume_tokens(answer)
        self.num_seen += len(new)


class Grammars:
    """Finds the tokens that rows with grammars may have next. `tokenizers`: what their tokens mean. `num_threads`:
    threads that find masks, of rows with different grammars.
    """

    def __init__(self, tokenizers: Tokenizers, num_threads: int = 1) -> None:
        self._tokenizers = tokenizers
        self._running: dict[str, _Running] = {}
        self._executor = LLExecutor(num_threads)
        self._compiled = lru_cache(_MOST_COMPILED)(self._compile)
        self._tokenizer = lru_cache(None)(self._read_tokenizer)
        #: request_id -> why an adapter's own tokenizer fails on a row: it may have no token.
        self.problems: dict[str, str] = {}
        #: Grammars compiled so far.
        self.num_compiled = 0

    def allowed(self, sequences: Items[Sequence], vocab_size: int) -> NDArray[np.int32]:
        """Masks of the tokens that rows may have next, a bit for each token, at least `vocab_size` of them:
        [num_sequences, num_words].

        A mask is empty where the row's tokens do not fit its grammar, or the grammar has grown too complex. A row that
        reasons may have all tokens but its ends.
        """
        rows = [self._caught_up(sequence, vocab_size) for sequence in sequences]
        vocab_size = max(row.width for row in rows)
        mask = allocate_token_bitmask(len(rows), vocab_size)
        matchers = {number: row.next_matcher() for number, row in enumerate(rows) if not row.is_reasoning}
        valid = [
            (matcher, number)
            for number, matcher in matchers.items()
            if isinstance(matcher, LLMatcher) and not matcher.is_error()
        ]
        if valid:
            fill_next_token_bitmask_par(self._executor, valid, mask)
        bits = mask.view(np.uint32)
        for number, row in enumerate(rows):
            if row.is_reasoning:
                bits[number] = ~np.uint32(0)
                for token in self._tokenizers.ends(sequences[number].request):
                    bits[number, token // 32] &= ~np.uint32(1 << token % 32)
            elif isinstance(matcher := matchers[number], ChoiceMatcher):
                bits[number] = 0
                for token in matcher.allowed_tokens:
                    bits[number, token // 32] |= np.uint32(1 << token % 32)
            elif matcher.is_error():
                bits[number] = 0
            if (start := row.start_token) is not None:
                bits[number, start // 32] |= np.uint32(1 << start % 32)
        return mask

    def takes(self, sequence: Sequence, token: int, vocab_size: int) -> bool:
        """Whether the row may have this token next. It gets the token, then."""
        row = self._caught_up(sequence, vocab_size)
        if row.answer is None:
            # to look at a token first would take as long again
            is_taken: bool = row.matcher.try_consume_tokens([token]) == 1
            row.num_seen += is_taken
            return is_taken
        if row.is_reasoning:
            return token not in self._tokenizers.ends(sequence.request)
        matcher = row.next_matcher()
        return token == row.start_token or (not matcher.is_error() and matcher.validate_tokens([token]) == 1)

    def is_forced(self, sequence: Sequence, vocab_size: int) -> bool:
        """Whether the row's text can go on in one way only."""
        row = self._caught_up(sequence, vocab_size)
        return not row.is_reasoning and bool(row.next_matcher().compute_ff_bytes())

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the row's grammar allows its end and nothing else."""
        running = self._running.get(sequence.request.request_id)
        if running is None:
            return False
        running.catch_up(sequence)
        return running.is_complete

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a row that ended or left."""
        self._running.pop(sequence.request.request_id, None)
        self.problems.pop(sequence.request.request_id, None)

    def _caught_up(self, sequence: Sequence, vocab_size: int) -> _Running:
        request_id = sequence.request.request_id
        try:
            running = self._running.get(request_id) or self._begun(sequence.request, vocab_size)
            running.catch_up(sequence)
        except TokenizerError as error:
            self.problems[request_id] = str(error)
            running = _Running(ChoiceMatcher(ChoiceTree(()), ()), vocab_size, num_seen=len(sequence.token_ids))
        self._running[request_id] = running
        return running

    def _begun(self, request: Request, vocab_size: int) -> _Running:
        tokenizer = self._tokenizers.of(request.adapter_id)
        width, ends = max(vocab_size, tokenizer.vocab_size), self._tokenizers.ends(request)
        if request.sampling.choice:
            # exactly the tokens that scores count
            matcher: LLMatcher | ChoiceMatcher = ChoiceMatcher(tree_of(tokenizer, request), ends)
        else:
            matcher = self._compiled(request.sampling.constraint, (tokenizer, width, ends)).deep_copy()
        markers = request.sampling.reasoning
        return _Running(matcher, width, None if markers is None else AnswerTokens(tokenizer, markers))

    def _compile(self, constraint: str, key: tuple[Tokenizer, int, tuple[int, ...]]) -> LLMatcher:
        self.num_compiled += 1
        [(kind, value)] = json.loads(constraint).items()
        return LLMatcher(self._tokenizer(*key), _source(kind, value), log_level=0, limits=_LIMITS)

    def _read_tokenizer(self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> LLTokenizer:
        return LLTokenizer(tokenizer.for_grammars, n_vocab=vocab_size, eos_token=list(ends))
