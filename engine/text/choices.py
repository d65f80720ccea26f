"""Scores the texts of a row's `choice`: the model's log-probability of each after the prompt.

Texts are encoded by themselves, as continuations are. Those that begin alike share their beginning in a tree; a place
of it, which is the tokens that lead there, needs one distribution for all tokens that come next. Places that the row's
own answer passes are read while it is generated. When it is complete the row goes to the others, one token each, over
the keys and values of its prompt. Nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..request import Request, Result, SamplingParams
from ..sequence import Sequence
from .reasoning import AnswerTokens
from .tokenizer import Tokenizer, Tokenizers

_MOST_TREES_KEPT = 256
# Tokens from the beginning of the answer.
_Place = tuple[int, ...]


class ChoiceTree:
    """`texts`: tokens of each text. `following`: place -> tokens that come next there, each place before those
    behind it.
    """

    def __init__(self, texts: Iterable[Iterable[int]]) -> None:
        self.texts: tuple[_Place, ...] = tuple(map(tuple, texts))
        following: dict[_Place, dict[int, None]] = {}
        for text in sorted(self.texts):
            for length, token in enumerate(text):
                following.setdefault(text[:length], {})[token] = None
        self.following = {place: tuple(tokens) for place, tokens in following.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens of the place that is furthest from the root."""
        return max(map(len, self.following), default=0)

    def logprobs(self, found: Mapping[_Place, Mapping[int, float]]) -> tuple[float, ...]:
        """Of each text. `found`: place -> log-probabilities of the tokens that come next."""
        return tuple(math.fsum(found[text[:i]][token] for i, token in enumerate(text)) for text in self.texts)


@dataclass(slots=True)
class _Row:
    """A row whose texts are scored. `answer`: where its answer begins, in rows that may reason. `tokens`: of the
    answer so far. `result`: of the row, once its answer is complete.
    """

    tree: ChoiceTree
    answer: AnswerTokens | None
    places: Iterator[_Place]
    place: _Place | None = None
    tokens: list[int] = field(default_factory=list)
    num_seen: int = 0
    found: dict[_Place, dict[int, float]] = field(default_factory=dict)
    result: Result | None = None


def steps_of_choice(tokenizer: Tokenizer, sampling: SamplingParams) -> int:
    """Tokens that a row of a choice computes behind its prompt: one for each place of its tree where texts are scored,
    else as many as texts have on average. 0 where that is not known, since the row may reason before.
    """
    if not sampling.choice or sampling.reasoning is not None:
        return 0
    tree = _tree_of(tokenizer, sampling.choice)
    num_tokens = sum(map(len, tree.texts))
    return len(tree.following) if sampling.scores_choices else math.ceil(num_tokens / len(tree.texts))


class ChoiceScores:
    """Leads rows through the trees of their texts. `tokenizers`: what their tokens mean."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
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
        row.tokens += new if row.answer is None else row.answer.add(new)
        answer = row.tokens
        if row.answer is not None and not row.tokens:
            answer = row.answer.undecided
            if row.answer.is_reasoning:
                row.found.clear()
                row.place, sequence.asked_tokens, sequence.answer_start = None, (), None
                return
        sequence.answer_start = len(sequence.token_ids) - len(answer)
        row.place = tuple(answer)
        sequence.asked_tokens = row.tree.following.get(row.place, ())

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
            return replace(row.result, choice_logprobs=row.tree.logprobs(row.found))
        sequence.go_to([*sequence.token_ids[: sequence.answer_start], *row.place])
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
            row = self._rows[request.request_id] = _Row(tree, answer, iter(tree.following))
        return row

    def _tree(self, request: Request) -> ChoiceTree:
        return _tree_of(self._tokenizers.of(request.adapter_id), request.sampling.choice)


@lru_cache(_MOST_TREES_KEPT)
def _tree_of(tokenizer: Tokenizer, texts: tuple[str, ...]) -> ChoiceTree:
    return ChoiceTree(tokenizer.encode_batch(list(texts), is_rendered=True))
