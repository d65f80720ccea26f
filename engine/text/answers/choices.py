"""Scores the texts of a row's `choice`: the model's log-probability of each after the prompt.

Texts are encoded in their place behind the prompt, as continuations are, and an answer has exactly these tokens
(`ChoiceMatcher`). Those that begin alike share their beginning in a tree; a place
of it, which is the tokens that lead there, needs one distribution for all tokens that come next. Places that the row's
own answer passes are read while it is generated. When it is complete the row goes to the others, one token each, over
the keys and values of its prompt. Nothing is drawn. A greedy row answers with the likeliest text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ...request import Request, Result, SamplingParams
from ...sequence import Sequence
from ..tokenizers.boundary import texts_behind
from ..tokenizers.tokenizer import Tokenizer, Tokenizers
from .reasoning import AnswerTokens

_MOST_TREES_KEPT = 64
#: Tokens of all texts of a choice together. Each may be a step of the row.
MOST_TOKENS = 1 << 16
# A node of a tree: a number in the order of a walk that visits each place before those behind it; 0 is the beginning of
# the answer.
_Place = int
_ROOT, _OUTSIDE = 0, -1


class ChoiceTree:
    """The tokens of texts as a trie. `texts`: tokens of each text. `following`: place -> tokens that come next there;
    none where texts end only. `whole`: places where a text ends.
    """

    def __init__(self, texts: Iterable[Iterable[int]]) -> None:
        self.texts: tuple[tuple[int, ...], ...] = tuple(map(tuple, texts))
        following: list[list[int]] = [[]]
        self._children: list[list[int]] = [[]]
        self._before: list[tuple[_Place, int]] = [(_OUTSIDE, 0)]
        whole = set[_Place]()
        for text in sorted(self.texts):
            place = _ROOT
            for token in text:
                # texts are sorted: a token that is there already was added last
                if not following[place] or following[place][-1] != token:
                    following[place].append(token)
                    self._children[place].append(len(following))
                    self._before.append((place, token))
                    following.append([])
                    self._children.append([])
                place = self._children[place][-1]
            whole.add(place)
        self.following = tuple(map(tuple, following))
        self.whole = frozenset(whole)

    @property
    def places(self) -> list[_Place]:
        """Places where tokens come next, each before those behind it."""
        return [place for place, tokens in enumerate(self.following) if tokens]

    @property
    def num_tokens(self) -> int:
        """Tokens of the place that is furthest from the root."""
        return max(map(len, self.texts), default=1) - 1

    def tokens_at(self, place: _Place) -> tuple[int, ...]:
        """Tokens that come next at a place; none outside of the tree."""
        return self.following[place] if place >= 0 else ()

    def behind(self, place: _Place, token_ids: Iterable[int]) -> _Place:
        """The place to which tokens lead from another one; negative where they lead out of the tree."""
        for token in token_ids:
            found = self.tokens_at(place)
            if token not in found:
                return _OUTSIDE
            place = self._children[place][found.index(token)]
        return place

    def path(self, place: _Place) -> tuple[int, ...]:
        """The tokens that lead to a place."""
        tokens = []
        while place > _ROOT:
            place, token = self._before[place]
            tokens.append(token)
        return tuple(reversed(tokens))

    def logprobs(self, found: Mapping[_Place, Mapping[int, float]]) -> tuple[float, ...]:
        """Log-probability of each text. `found`: place -> log-probabilities of the tokens that come next."""
        return tuple(math.fsum(self.token_logprobs(text, found)) for text in self.texts)

    def token_logprobs(self, text: Iterable[int], found: Mapping[_Place, Mapping[int, float]]) -> list[float]:
        """Log-probability of each token of a text. `found`: as in `logprobs`."""
        logprobs, place = [], _ROOT
        for token in text:
            logprobs.append(found[place][token])
            place = self.behind(place, (token,))
        return logprobs


@dataclass(slots=True)
class _Row:
    """A row whose texts are scored."""

    #: Tokens of its texts.
    tree: ChoiceTree
    #: Finds where its answer begins; None in rows that do not reason.
    answer: AnswerTokens | None
    #: Places of the tree that may still have to be read.
    places: Iterator[_Place]
    #: Place whose log-probabilities are asked next; None: none are.
    place: _Place | None = None
    #: Tokens of the answer so far.
    tokens: list[int] = field(default_factory=list)
    #: Place of the tree to which these tokens lead.
    reached: _Place = _ROOT
    #: Tokens of the sequence that were taken into account.
    num_seen: int = 0
    #: Place -> log-probabilities of the tokens that come next there.
    found: dict[_Place, dict[int, float]] = field(default_factory=dict)
    #: Result of the row, once its answer is complete.
    result: Result | None = None


def steps_of_choice(tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Items[int]) -> int:
    """Tokens that a row of a choice computes behind its prompt: one for each place of its tree where texts are scored,
    else as many as texts have on average. 0 where that is not known, since the row may reason before.
    """
    if not sampling.choice or sampling.reasoning is not None:
        return 0
    tree = _tree_behind(tokenizer, prompt_token_ids, sampling.choice)
    num_tokens = sum(map(len, tree.texts))
    return len(tree.places) if sampling.scores_choices else math.ceil(num_tokens / len(tree.texts))


class ChoiceScores:
    """Leads rows through the trees of their texts. `tokenizers`: what their tokens mean. `has_states`: the model has
    recurrent layers, so that a row that goes to other tokens is computed from its start.
    """

    def __init__(self, tokenizers: Tokenizers, *, has_states: bool) -> None:
        self._tokenizers = tokenizers
        self._has_states = has_states
        self._rows: dict[str, _Row] = {}

    def spare_tokens(self, request: Request) -> int:
        """Tokens beyond prompt and `max_tokens` that a row may store while its texts are scored."""
        sampling = request.sampling
        if not sampling.scores_choices:
            return 0
        longest = self._tree(request).num_tokens
        # reasoning may take all of `max_tokens`
        return longest + 1 if sampling.reasoning is not None else max(longest - sampling.max_tokens + 1, 0)

    def ask(self, sequence: Sequence) -> None:
        """Say which log-probabilities the row's next position is asked for, once its tokens so far are known."""
        if not sequence.request.sampling.scores_choices:
            return
        row = self._row(sequence.request)
        new = sequence.token_ids[row.num_seen :]
        row.num_seen += len(new)
        added = new if row.answer is None else row.answer.add(new)
        row.tokens += added
        row.reached = row.tree.behind(row.reached, added)
        answer, place = row.tokens, row.reached
        if row.answer is not None and not row.tokens:
            answer = row.answer.undecided
            place = row.tree.behind(_ROOT, answer)
            if row.answer.is_reasoning:
                row.found.clear()
                row.place, sequence.asked_tokens, sequence.answer_start = None, (), None
                return
        sequence.answer_start = len(sequence.token_ids) - len(answer)
        row.place = place
        sequence.asked_tokens = row.tree.tokens_at(place)

    def note(self, sequence: Sequence, logprobs: Iterable[float]) -> None:
        """Keep the log-probabilities that were asked for."""
        row = self._rows[sequence.request.request_id]
        assert row.place is not None, f"row {sequence.request.request_id} was asked for nothing"
        row.found[row.place] = dict(zip(sequence.asked_tokens, logprobs, strict=True))

    def finish(self, sequence: Sequence, result: Result | None = None) -> Result | None:
        """The result of a row whose answer is complete, with what was found. None while a place of its tree was not
        read: the row is there now. `result`: when the answer has just become complete.
        """
        row = self._rows.get(sequence.request.request_id)
        if row is None:
            return result
        row.result = result or row.result
        assert row.result is not None, f"row {sequence.request.request_id} has no answer"
        if sequence.answer_start is None:
            return row.result  # it ended while it reasoned
        row.place = next((place for place in row.places if place not in row.found), None)
        if row.place is None:
            return _with_scores(sequence, row, row.result)
        tokens = [*sequence.token_ids[: sequence.answer_start], *row.tree.path(row.place)]
        sequence.go_to(tokens, from_start=self._has_states)
        sequence.asked_tokens = row.tree.following[row.place]
        return None

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a row that ended or left."""
        self._rows.pop(sequence.request.request_id, None)

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request.request_id)
        if row is None:
            tree, markers = self._tree(request), request.sampling.reasoning
            answer = None if markers is None else AnswerTokens(self._tokenizers.of(request.adapter_id), markers)
            row = self._rows[request.request_id] = _Row(tree, answer, iter(tree.places))
        return row

    def _tree(self, request: Request) -> ChoiceTree:
        return tree_of(self._tokenizers.of(request.adapter_id), request)


class ChoiceMatcher:
    """Finds the tokens that an answer may have next: those of its texts in their place, and an end behind a whole text.
    It is used as a grammar's matcher is. `ends`: tokens that end a row.
    """

    def __init__(self, tree: ChoiceTree, ends: tuple[int, ...], place: _Place = _ROOT) -> None:
        self._tree = tree
        self._ends = ends
        self._place = place
        self._has_ended = self._is_wrong = False

    @property
    def allowed_tokens(self) -> tuple[int, ...]:
        if self._has_ended or self._is_wrong:
            return ()
        return (*self._tree.tokens_at(self._place), *(self._ends if self._is_whole else ()))

    def deep_copy(self) -> ChoiceMatcher:
        other = ChoiceMatcher(self._tree, self._ends, self._place)
        other._has_ended, other._is_wrong = self._has_ended, self._is_wrong
        return other

    def consume_tokens(self, token_ids: Items[int]) -> None:
        for token in token_ids:
            if self.try_consume_tokens([token]) == 0:
                self._is_wrong = True

    def try_consume_tokens(self, token_ids: Items[int]) -> int:
        """Take the tokens in order until one may not come next. Returns the number of tokens taken."""
        for number, token in enumerate(token_ids):
            if token not in self.allowed_tokens:
                return number
            if token in self._tree.tokens_at(self._place):
                self._place = self._tree.behind(self._place, (token,))
            else:
                self._has_ended = True
        return len(token_ids)

    def validate_tokens(self, token_ids: Items[int]) -> int:
        return self.deep_copy().try_consume_tokens(token_ids)

    def is_stopped(self) -> bool:
        return self._has_ended or (self._is_whole and not self._tree.tokens_at(self._place))

    def is_error(self) -> bool:
        return self._is_wrong

    def compute_ff_bytes(self) -> bytes:
        """Bytes that are not empty where the answer can go on in one way only."""
        return b"." if len(self.allowed_tokens) == 1 else b""

    @property
    def _is_whole(self) -> bool:
        return self._place in self._tree.whole


def tree_of(tokenizer: Tokenizer, request: Request) -> ChoiceTree:
    """The tree of a row's choice behind its prompt; in a row that may reason, behind the end of reasoning."""
    markers = request.sampling.reasoning
    before = request.prompt_token_ids
    if markers is not None:
        before = tuple(tokenizer.encode_batch([markers[1]], is_rendered=True)[0])
    return _tree_behind(tokenizer, before, request.sampling.choice)


def choice_of(tokenizer: Tokenizer, request: Request, token_ids: Items[int]) -> str | None:
    """The listed text that an answer of these tokens is; None for an answer that was cut off."""
    texts = tree_of(tokenizer, request).texts
    answer = tuple(token_ids)
    return request.sampling.choice[texts.index(answer)] if answer in texts else None


def _with_scores(sequence: Sequence, row: _Row, result: Result) -> Result:
    """The result with log-probabilities of all texts. Of a greedy row, whose choice nothing else decides, it is the
    likeliest text; not where that is the beginning of the row's own answer, which has gone on.
    """
    logprobs = row.tree.logprobs(row.found)
    result = replace(result, choice_logprobs=logprobs)
    sampling = sequence.request.sampling
    best = max(range(len(logprobs)), key=logprobs.__getitem__)
    tokens = row.tree.texts[best]
    has_other_rules = replace(sampling, choice=()).has_rules
    if result.finish_reason != "stop" or sampling.is_drawn or sampling.stop or has_other_rules:
        return result
    if tuple(row.tokens[: len(tokens)]) == tokens:
        return result
    start = sequence.answer_start or 0
    found = row.tree.token_logprobs(tokens, row.found)
    tops = result.top_logprobs
    if tops is not None:
        num_same = next(
            (n for n, (one, other) in enumerate(zip(tokens, row.tokens, strict=False)) if one != other),
            len(row.tokens),
        )
        # the row itself was not at the other places
        tops = (*tops[: start + num_same + 1], *((),) * (len(tokens) - num_same - 1))
    return replace(
        result,
        text=sampling.choice[best],
        token_ids=(*result.token_ids[:start], *tokens),
        token_logprobs=None if result.token_logprobs is None else (*result.token_logprobs[:start], *found),
        top_logprobs=tops,
    )


def _tree_behind(tokenizer: Tokenizer, prompt_token_ids: Items[int], texts: tuple[str, ...]) -> ChoiceTree:
    return _tree(texts_behind(tokenizer, prompt_token_ids, texts))


_tree = lru_cache(_MOST_TREES_KEPT)(ChoiceTree)
