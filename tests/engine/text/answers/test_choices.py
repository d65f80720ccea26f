"""Log-probabilities of the texts of a choice: those of transformers and PEFT, and of the same texts as continuations,
wherever and beside whatever a row runs."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft_oracle import Oracle, make_engine, prompts, register_all, scores_of_continuations, serve

from lorabatch.engine.request import MOST_SCORED, Request, Result, SamplingParams
from lorabatch.engine.text.answers.choices import ChoiceTree
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.kernels.launch import is_interpreted

#: Texts that begin alike, that are the beginning of others, twice the same, and of one token.
TEXTS = ("yes", "yesterday", "no", "nobody knows", "no", "x", 'a "quoted" one', "yester", "the quick brown")

FEW = ("yes", "yesterday", "no")


def rows_for(adapter_ids: list[str | None], count: int = 12, **sampling: Any) -> list[Request]:
    options = {"max_tokens": 20, "choice": TEXTS} | sampling
    return [
        Request(f"row-{i}", prompt, adapter_ids[i % len(adapter_ids)],
                SamplingParams(**options, temperature=i % 3 / 2), i)
        for i, prompt in enumerate(prompts(count, 300))
    ]  # fmt: skip


def scores(results: dict[str, Result]) -> dict[str, Any]:
    return {name: (r.text, r.finish_reason, r.reasoning, r.choice_logprobs) for name, r in results.items()}


@given(texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12))
def test_a_tree_asks_each_place_once_and_before_those_behind_it(texts: list[list[int]]) -> None:
    tree = ChoiceTree(texts)
    wanted = {(tuple(text[:i]), token) for text in texts for i, token in enumerate(text)}
    paths = [tree.path(place) for place in tree.places]
    assert {(tree.path(place), token) for place in tree.places for token in tree.tokens_at(place)} == wanted
    assert all(path[:-1] in paths[:i] for i, path in enumerate(paths) if path)
    assert all(tree.behind(0, tree.path(place)) == place for place in tree.places)
    assert {tree.path(place) for place in tree.whole} == set(map(tuple, texts))
    assert tree.behind(0, (9,)) < 0
    assert tree.tokens_at(tree.behind(0, (9, 1))) == ()
    assert tree.num_tokens == max(map(len, texts)) - 1
    found = {place: {t: -(len(tree.path(place)) + t / 8) for t in tree.tokens_at(place)} for place in tree.places}
    assert tree.logprobs(found) == tuple(math.fsum(-(i + t / 8) for i, t in enumerate(text)) for text in texts)


@pytest.mark.parametrize(
    "texts", [[[1] * 5000], [[1] * 3000 + [2], [1] * 3000 + [3]], [[i, *[1] * 60] for i in range(100)]]
)
def test_a_tree_takes_memory_in_proportion_to_its_texts(texts: list[list[int]]) -> None:
    tracemalloc.start()
    ChoiceTree(texts)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 600 * sum(map(len, texts))


def test_scores_are_those_of_transformers_and_peft(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = make_engine(tiny_llama)
    names = {None: None} | {sha: name for name, sha in register_all(engine, tiny_adapters).items()}
    asked = rows_for(list(names))
    results = serve(engine, asked)
    oracle = Oracle(tiny_llama, tiny_adapters)
    tokens = Tokenizer.from_folder(tiny_llama).encode_batch(list(TEXTS), is_rendered=True)
    with torch.no_grad():
        for row in asked:
            result = results[row.request_id]
            assert (result.text in TEXTS, result.finish_reason) == (True, "stop")
            expected = [sum(oracle.scores(row.prompt_token_ids, text, names[row.adapter_id])) for text in tokens]
            assert result.choice_logprobs == pytest.approx(expected, abs=1e-3)


def test_scores_have_the_bits_of_continuations_and_greedy_answers_are_the_likeliest(tiny_llama: Path) -> None:
    asked = rows_for([None])
    scored = serve(make_engine(tiny_llama, "exact"), asked)
    plain = serve(make_engine(tiny_llama, "exact"), rows_for([None], score_choices=False))
    for row in asked:
        ours, theirs = scored[row.request_id], plain[row.request_id]
        logprobs = dict(zip(TEXTS, ours.choice_logprobs or (), strict=True))
        if row.sampling.is_drawn:
            assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        else:
            assert logprobs[ours.text] == max(logprobs.values()) or ours.text.startswith(max(TEXTS, key=logprobs.get))
    assert {r.choice_logprobs for r in plain.values()} == {None}
    expected = scores_of_continuations(tiny_llama, asked, TEXTS)
    assert {name: result.choice_logprobs for name, result in scored.items()} == expected


def move(model: Path, given: list[Request], num_steps: int) -> dict[str, Result]:
    one, other = make_engine(model, "exact"), make_engine(model, "exact")
    one.add(given)
    found: dict[str, Result] = {}
    for _ in range(num_steps):
        found |= {result.request_id: result for result in one.step()}
        one.check_integrity()
    rows = one.export_rows([row.request_id for row in given])
    assert not any(row.problems() for row in rows)
    other.import_rows(rows)
    while other.num_unfinished:
        found |= {result.request_id: result for result in other.step()}
        other.check_integrity()
    return found


@pytest.mark.parametrize("markers", ["", *(pytest.param(m, marks=pytest.mark.long) for m in (",e", "t,e"))])
def test_a_row_that_moves_has_the_scores_of_one_that_stays(tiny_llama: Path, markers: str) -> None:
    given = rows_for([None], reasoning_markers=markers, max_tokens=60 if markers else 20)
    stayed = serve(make_engine(tiny_llama, "exact"), given)
    for num_steps in (1, 4, 9, 17, 30):
        assert scores(move(tiny_llama, given, num_steps)) == scores(stayed)
    answered = [r for r in stayed.values() if r.finish_reason == "stop"]
    assert len(answered) >= 6
    assert all(len(r.choice_logprobs or ()) == len(TEXTS) for r in answered)


def test_scores_come_after_the_row_s_own_reasoning(tiny_llama: Path) -> None:
    given = rows_for([None], reasoning_markers=",e", max_tokens=60)
    results = serve(make_engine(tiny_llama, "exact"), given)
    tokenizer, oracle = Tokenizer.from_folder(tiny_llama), Oracle(tiny_llama, {})
    [text] = tokenizer.encode_batch(["no"], is_rendered=True)
    checked = 0
    for row in given:
        result = results[row.request_id]
        if result.finish_reason != "stop":
            continue
        answer = next(i for i in range(len(result.token_ids)) if "e" in tokenizer.decode(result.token_ids[: i + 1])) + 1
        before = [*row.prompt_token_ids, *result.token_ids[:answer]]
        expected = sum(oracle.scores(before, text, None))
        assert (result.choice_logprobs or ())[TEXTS.index("no")] == pytest.approx(expected, abs=1e-3)
        checked += 1
    assert checked >= 4
    cut = serve(make_engine(tiny_llama), rows_for([None], reasoning_markers=",no such marker", max_tokens=9))
    assert {(r.finish_reason, r.choice_logprobs) for r in cut.values()} == {("length", None)}


def test_reasoning_that_takes_all_of_max_tokens_leaves_room_for_the_texts(tiny_llama: Path) -> None:
    """Rows of one page more or less beside each other: a token in the wrong place would be another row's."""
    found: dict[str, set[Any]] = {}
    ended_there = 0
    for max_tokens in range(3, 24, 2):
        rows = rows_for([None], reasoning_markers=",e", max_tokens=max_tokens)
        results = serve(make_engine(tiny_llama, "exact", page_tokens=4), rows)
        for name, result in results.items():
            found.setdefault(name, set()).add(result.choice_logprobs)
            ended_there += result.choice_logprobs is not None and result.text == ""
    assert ended_there, "in some rows nothing but the answer was missing"
    assert all(len(scores - {None}) <= 1 for scores in found.values())


def test_a_greedy_answer_is_the_likeliest_text_where_texts_are_different_letters(tiny_llama: Path) -> None:
    letters = ("A", "B", "C", "D")
    for result in serve(make_engine(tiny_llama), rows_for([None], 9, choice=letters, max_tokens=1)).values():
        logprobs = dict(zip(letters, result.choice_logprobs or (), strict=True))
        if result.request_id in ("row-0", "row-3", "row-6"):
            assert result.text == max(letters, key=logprobs.__getitem__)


def test_an_answer_that_is_cut_off_has_all_scores_beside_its_log_probabilities(tiny_llama: Path) -> None:
    whole = serve(make_engine(tiny_llama), rows_for([None]))
    cut = serve(make_engine(tiny_llama), rows_for([None], max_tokens=1, logprobs=True, top_logprobs=2))
    for name, result in cut.items():
        assert (len(result.token_ids), len(result.token_logprobs or ()), len(result.top_logprobs or ())) == (1, 1, 1)
        assert result.choice_logprobs == pytest.approx(whole[name].choice_logprobs, abs=1e-4)


def test_what_cannot_be_scored_is_said(tiny_llama: Path) -> None:
    long = Request("long", tuple(range(3, 240)), None, SamplingParams(max_tokens=2, choice=("yes", "no " * 40)))
    [result] = serve(make_engine(tiny_llama), [long]).values()
    assert result.error is not None
    assert "the choice's texts exceed the context of 256 tokens" in result.error
    many = SamplingParams(choice=tuple(map(str, range(MOST_SCORED + 1))))
    assert f"expected at most {MOST_SCORED} that are scored" in many.problems()[0]
    assert not SamplingParams(choice=many.choice, score_choices=False).problems()


@pytest.mark.long
def test_rows_that_lose_their_memory_begin_again(tiny_llama: Path) -> None:
    """Block tables grow; a pool that is too small for all preempts rows in the middle of their texts."""
    given = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in rows_for([None], 4, choice=FEW)]
    expected = scores(serve(make_engine(tiny_llama), given))
    device = {"kernels": "triton", "device": "cpu"} if is_interpreted() else {"device": "cuda", "dtype": "float32"}
    engine = make_engine(tiny_llama, page_tokens=4, **(device | {"pool_bytes": 40 << 10}))
    found = scores(serve(engine, given))
    assert engine.num_preempted > 0
    for name, value in found.items():
        assert value[:3] == expected[name][:3]
        assert value[3] == pytest.approx(expected[name][3], abs=1e-3)
