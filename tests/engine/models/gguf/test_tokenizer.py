from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.gguf.tokenizer import _RULES, write_tokenizer


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello", "<s>", "<end>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (len(tokens) - 3), 3, 3, 4],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<end>"),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}",
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    letters = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ell", "▁hell", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    # Real files score pieces by rank: the earlier a piece was learnt, the higher.
    scores = [0.0] * (len(tokens) - 6) + [-1.0, -2.0, -4.0, -3.0, -5.0, -6.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(letters)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def written(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer(metadata, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text cut by the splitting rule alone, before any merge, spaces shown as they are."""
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 1234", " o", "'", "Clock", "!!", "\n\n", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "Clock", "!!", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("command-r", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "Clock", "!!", "\n\n", " x"]),
        ("glm4", ["It", "'s", " ", "123", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", " o", "'Clock", "!!", "\n\n", " x"]),
        ("gpt-4o", ["It's", " ", "123", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " o", "'Clock", "!!\n\n", " x"]),
        ("hunyuan-dense", ["It", "'s", " ", "123", "4", " o", "'Clock", "!!\n\n", " x"]),
    ],
)
def test_each_named_rule_splits_text_its_own_way(pre, expected, tmp_path):
    assert pieces(written(byte_level_metadata(pre=pre), tmp_path), "It's 1234 o'Clock!!\n\n x") == expected


def test_bytes_merge_by_the_files_merges_and_decode_to_the_same_text(tmp_path):
    tokenizer = written(byte_level_metadata(), tmp_path)
    text = "hello hell é 日本 \t 42\n"
    encoding = tokenizer.encode(text)
    assert encoding.tokens[0] == "hello"
    assert tokenizer.decode(encoding.ids) == text


def test_special_tokens_are_never_split_and_vanish_when_skipped(tmp_path):
    tokenizer = written(byte_level_metadata(), tmp_path)
    encoding = tokenizer.encode("hello<end><tool>hello")
    assert encoding.tokens == ["hello", "<end>", "<tool>", "hello"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "hello<tool>hello"


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"pre": "smollm"}, "hello"),
        ({"pre": "llama-bpe"}, "<s>"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "hello"),
        ({"pre": "smollm", "add_bos_token": True}, "<s>"),
        ({"pre": "tekken"}, "<s>"),
        ({"pre": "smaug-bpe"}, "hello"),
    ],
)
def test_texts_start_with_bos_when_the_file_or_its_family_says_so(changes, first, tmp_path):
    tokenizer = written(byte_level_metadata(**changes), tmp_path)
    assert tokenizer.encode("hello").tokens[0] == first
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


def test_transformers_reads_the_folder_with_its_chat_template(tmp_path):
    write_tokenizer(byte_level_metadata(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<end>"
    assert tokenizer.bos_token == "<s>"
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hello<end>"


def test_sentencepiece_merges_follow_the_scores(tmp_path):
    metadata = sentencepiece_metadata()
    assert written(metadata, tmp_path).encode("hello").tokens == ["<s>", "▁hello"]
    # With `lo` ahead of `ell`, the last two letters pair up first and the whole word is out of reach.
    scores, tokens = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.tokens"]
    scores[tokens.index("lo")] = -2.5
    assert written(metadata, tmp_path).encode("hello").tokens == ["<s>", "▁h", "el", "lo"]


def test_sentencepiece_falls_back_to_bytes_for_unknown_letters(tmp_path):
    tokenizer = written(sentencepiece_metadata(add_bos_token=False), tmp_path)
    assert tokenizer.encode("é").tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hé lo").ids) == "hé lo"


HARD = "It's naïve cafe\u0301 नमस्ते दुनिया ก็ได้ 1234 x\u0301\u0301!!\u0301\r\n\n  \t hello\n\n\n\u0301 hell"


@pytest.mark.reference("transformers")
def test_qwen_3_5_cuts_text_as_its_own_tokenizer_does(tmp_path):
    """Marks stay with the letters before them, which Qwen 2's rule does not do."""
    metadata = byte_level_metadata(pre="qwen35")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    own = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    tokenizer = written(metadata, tmp_path)
    text = tokenizer.normalizer.normalize_str(HARD)
    assert (
        pieces(tokenizer, text)
        == pieces(own, text)
        != pieces(written(byte_level_metadata(pre="qwen2"), tmp_path), text)
    )
    assert tokenizer.encode(HARD).ids == own.encode(HARD).ids


def gemma4_metadata(**changes: Any) -> dict[str, Any]:
    letters = ["▁", "h", "e", "l", "o", "\n", "▁▁", "▁h", "el", "\n\n", "▁hel"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "<|channel>"]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(letters), 4],
        "tokenizer.ggml.merges": ["▁ ▁", "▁ h", "e l", "\n \n", "▁h el"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.mark.reference("transformers")
@pytest.mark.parametrize("text", ["hello", " hello   hel\n\n\nhello é日 \n", HARD, "a<|channel>hel<eos>", ""])
def test_gemma_4_merges_as_its_own_tokenizer_does(text, tmp_path):
    metadata = gemma4_metadata(add_bos_token=False)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    own = GemmaTokenizer(vocab=vocabulary, merges=merges)
    own.add_tokens(["<|channel>"])
    tokenizer = written(metadata, tmp_path)
    # texts begin with it whatever the file says
    assert tokenizer.encode(text).ids == [2, *own.encode(text, add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"pre": "viking"}, "viking"),
        ({"pre": "pixtral"}, "pixtral"),
        ({"model": "t5"}, "t5"),
        ({"model": "llama", "pre": "chatglm-spm"}, "chatglm-spm"),
        ({"model": "gemma4", "add_space_prefix": True}, "add_space_prefix=True"),
    ],
)
def test_rules_not_known_exactly_are_refused_by_name(changes, value, tmp_path):
    with pytest.raises(EngineError, match=value):
        write_tokenizer(byte_level_metadata(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_documented_rules_are_those_that_are_known():
    page = (Path(__file__).parents[4] / "docs" / "reference" / "gguf.md").read_text("utf-8")
    listed = page.split("## Vocabularies")[1].split("`tokenizer.ggml.pre`:")[1].split("##")[0]
    assert sorted(re.findall("`([^`]+)`", listed)) == sorted(_RULES)
