"""Texts behind prompts have the tokens that they have in their place, in three kinds of tokenizers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as File
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.text.answers.choices import ChoiceMatcher, ChoiceTree, choice_of, tree_of
from lorabatch.engine.text.answers.completion import _TextSoFar
from lorabatch.engine.text.tokenizers.boundary import (
    first_merged,
    given_text,
    split_at_prompt,
    text_behind,
    texts_behind,
)
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

WORDS = ("the", "an", "in", "and", "er", "ing")
LETTERS = "abcdefghijklmnopqrstuvwxyzABC."
KINDS = ("SentencePiece", "Metaspace", "byte-level")


def word_pieces(blank: str) -> models.BPE:
    """Pairs that become the words, with and without a blank before."""
    vocab = {"<unk>": 0}
    for text in [f"<0x{byte:02X}>" for byte in range(256)] + [blank, *LETTERS, *(blank + c for c in LETTERS)]:
        vocab.setdefault(text, len(vocab))
    merges = [(blank, letter) for letter in LETTERS]
    for word, before in itertools.product(WORDS, (blank, "")):
        for end in range(2, len(word) + 1):
            left, right = before + word[: end - 1], word[end - 1]
            vocab.setdefault(left + right, len(vocab))
            merges.append((left, right))
    return models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "byte-level":
        model = word_pieces("Ġ")
        file = File(model)
        file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        file.decoder = decoders.ByteLevel()
    else:
        file = File(word_pieces("▁"))
        ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        file.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
        if request.param == "SentencePiece":
            file.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            file.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    folder = tmp_path_factory.mktemp(request.param)
    file.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.from_folder(folder)


def encoded(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return tokenizer.encode_batch(list(texts), is_rendered=True)


PARTS = st.lists(st.sampled_from([*WORDS, " ", ".", "t", "x", " the", "B"]), min_size=1, max_size=9).map("".join)


@settings(max_examples=60, deadline=None)
@given(prompt=PARTS, text=PARTS)
def test_tokens_are_those_of_the_whole_less_those_of_the_prompt(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before, whole = encoded(tokenizer, prompt, prompt + text)
    found = texts_behind(tokenizer, before, (text,))
    if whole[: len(before)] == before:
        assert found == (tuple(whole[len(before) :]),)
        assert first_merged(tokenizer, before, (text,)) is None
        assert split_at_prompt(before, whole) == (before, tuple(whole[len(before) :]))
    else:
        assert first_merged(tokenizer, before, (text,)) == 0
        kept, rest = split_at_prompt(before, whole)
        assert [*kept, *rest] == whole, "the last tokens of the prompt belong to the text"
        assert len(kept) < len(before)


@pytest.mark.parametrize(
    ("prompt", "text", "is_merged"),
    [("the an and", " the", False), ("the an and s", "t", False), ("the an and", ".", False), ("the an ", "and", True)],
)
def test_a_text_in_its_place_reads_as_it_was_given(
    tokenizer: Tokenizer, prompt: str, text: str, is_merged: bool
) -> None:
    before, whole = encoded(tokenizer, prompt, prompt + text)
    found = texts_behind(tokenizer, before, (text, "."))
    assert first_merged(tokenizer, before, (text, ".")) == (0 if is_merged else None)
    if not is_merged:
        assert before + list(found[0]) == whole
        assert text_behind(tokenizer, before, found[0]) == text


@pytest.mark.parametrize("scheme", ["Prepend", "always", "first", "never"])
def test_a_text_behind_a_special_token_is_the_given_one(scheme: str, tmp_path: Path) -> None:
    file = File(word_pieces("▁"))
    if scheme == "Prepend":
        file.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        file.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    file.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    file.add_special_tokens(["[end]"])
    file.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    (before,) = encoded(tokenizer, "the an[end]")
    for text in ("and", " and", "  in", "é", "."):
        (whole,) = encoded(tokenizer, "the an[end]" + text)
        found = texts_behind(tokenizer, before, (text,))
        assert before + list(found[0]) == whole
        with_blank = texts_behind(tokenizer, before, (f" {text}",))[0]
        expected = f" {text}" if with_blank == found[0] else text
        assert given_text(tokenizer, before, found[0]) == expected
        assert expected == text or scheme == "always", "where a text has the same tokens with a blank"


def test_an_answer_has_the_tokens_that_scores_count(tokenizer: Tokenizer) -> None:
    (prompt,) = encoded(tokenizer, "the an and")
    texts = (" the", " in", "s", "")[:3]
    row = Request("row", tuple(prompt), None, SamplingParams(choice=texts))
    tree = tree_of(tokenizer, row)
    expected = [encoded(tokenizer, "the an and" + text)[0][len(prompt) :] for text in texts]
    assert [list(tokens) for tokens in tree.texts] == expected
    for text, tokens in zip(texts, expected, strict=True):
        matcher = ChoiceMatcher(tree, (1,))
        for token in tokens:
            assert token in matcher.allowed_tokens
            assert matcher.try_consume_tokens([token]) == 1
        assert matcher.is_stopped()
        assert choice_of(tokenizer, row, tokens) == text
    assert choice_of(tokenizer, row, ()) is None


def test_an_answer_may_end_where_another_text_goes_on() -> None:
    matcher = ChoiceMatcher(ChoiceTree([(1, 2), (1, 2, 3), (4,)]), (9,))
    assert set(matcher.allowed_tokens) == {1, 4}
    assert (matcher.validate_tokens([1, 2]), matcher.validate_tokens([1, 3])) == (2, 1)
    matcher.consume_tokens([1, 2])
    assert set(matcher.allowed_tokens) == {3, 9}
    assert not matcher.is_stopped()
    ended, longer = matcher.deep_copy(), matcher.deep_copy()
    ended.consume_tokens([9])
    longer.consume_tokens([3])
    assert ended.is_stopped()
    assert longer.is_stopped()
    assert set(longer.allowed_tokens) == {9}
    matcher.consume_tokens([1])
    assert matcher.is_error()
    assert not matcher.allowed_tokens


@settings(max_examples=40, deadline=None)
@given(token_ids=st.lists(st.sampled_from([*range(1, 257), *range(257, 280)]), max_size=12))
def test_text_so_far_is_that_of_its_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    if not tokenizer.byte_tokens:
        return
    so_far = _TextSoFar(tokenizer, token_ids[:3])
    for count in range(3, len(token_ids)):
        so_far.add(token_ids[count])
        assert so_far.text.rstrip("\ufffd") == tokenizer.decode(token_ids[: count + 1]).rstrip("\ufffd")
    so_far.finish()
    assert so_far.text == tokenizer.decode(token_ids)


def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    for text in ("the an and", "in the. B", "aé\n中"):
        (tokens,) = encoded(tokenizer, text)
        words = tokenizer.bytes_of(tokens)
        if tokenizer.byte_tokens or text.isascii():  # this byte-level vocabulary lacks other letters
            assert b"".join(words).decode().lstrip(" ") == text
    assert tokenizer.bytes_of([10_000_000]) == [b""]


def test_the_file_s_decoder_says_which_tokens_are_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = json.dumps(json.loads(tokenizer._backend.to_str())["decoder"])
    assert len(tokenizer.byte_tokens) == (256 if "ByteFallback" in decoder else 0)
