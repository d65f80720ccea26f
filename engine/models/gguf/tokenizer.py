"""Translates the tokenizer inside a GGUF file to Hugging Face's `tokenizer.json` and `tokenizer_config.json`.

A GGUF file names its splitting rules (`tokenizer.ggml.pre`) and does not spell them out. Only rules known
exactly are translated; any other name is refused, because a nearly right tokenizer gives silently wrong answers.
Source of the rules: llama.cpp `src/llama-vocab.cpp` (split patterns per `pre` name, defaults for added tokens)
and the `tokenizer.json` published with each model family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....system.untrusted import shown
from ...errors import EngineError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# `tokenizer.ggml.token_type` values (GGUF specification).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Most characters of a piece of the vocabulary: each piece is cut at every place.
_MAX_PIECE_CHARACTERS = 1024
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_AND_SPACES
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_AND_SPACES
_SEED_SPLIT = _CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+")
# Words by the case of their letters: (upper or caseless, lower or caseless), the one or the other at least once.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT = "|".join(_CASED) + r"|\p{N}" + _SIGNS_AND_SPACES
_GPT4O_SPLIT = "|".join(f"{words}{_CONTRACTIONS}?" for words in _CASED) + r"|\p{N}{1,3}" + _SIGNS_AND_SPACES
_HUNYUAN_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _ByteLevelRules:
    """Rules by which one `pre` name splits text before byte-pair merging."""

    #: Patterns of the pieces, of which each cuts what those before it have left; none: GPT-2's own.
    splits: tuple[str, ...] = ()
    #: Whether every digit is a piece of its own.
    has_single_digits: bool = False
    #: Whether text is normalized to NFC first.
    is_nfc: bool = False
    #: Whether a piece that is a token is not merged from parts.
    has_whole_words: bool = False
    #: Whether prompts begin with the BOS token, unless the file says otherwise.
    adds_bos: bool = False


_GPT2, _DIGITS = _ByteLevelRules(), _ByteLevelRules(has_single_digits=True)
_LLAMA3 = _ByteLevelRules((_LLAMA3_SPLIT,), has_whole_words=True, adds_bos=True)
_CL100K, _QWEN2 = _ByteLevelRules((_LLAMA3_SPLIT,)), _ByteLevelRules((_QWEN2_SPLIT,), is_nfc=True)
#: `tokenizer.ggml.pre` -> its rules.
_RULES: Mapping[str, _ByteLevelRules] = {
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    "command-r": _ByteLevelRules(has_single_digits=True, is_nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "smaug-bpe": _ByteLevelRules((_LLAMA3_SPLIT,), has_whole_words=True),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _ByteLevelRules((_QWEN35_SPLIT,), is_nfc=True),
    "gpt-4o": _ByteLevelRules((_GPT4O_SPLIT,)),
    "tekken": _ByteLevelRules((_TEKKEN_SPLIT,), has_whole_words=True, adds_bos=True),
    "seed-coder": _ByteLevelRules((_SEED_SPLIT,)),
    "hunyuan-dense": _ByteLevelRules(_HUNYUAN_SPLITS),
}


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raises `EngineError` for a tokenizer model or a splitting rule that is not known exactly."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise EngineError(
            f"tokenizer.ggml.model={shown(kind)}: not supported. Supported: 'gpt2', 'llama', 'gemma4'. "
            "Give the model's Hugging Face folder instead."
        )
    if kind == "gemma4" and metadata.get("tokenizer.ggml.add_space_prefix"):
        raise EngineError(
            "tokenizer.ggml.add_space_prefix=True: not supported with tokenizer.ggml.model='gemma4'. "
            "Give the model's Hugging Face folder instead."
        )
    name = str(metadata.get("tokenizer.ggml.pre", "<absent>"))
    # ChatGLM 3 begins every text with tokens that the file does not name
    if (kind == "gpt2" and name not in _RULES) or name == "chatglm-spm":
        raise EngineError(
            f"tokenizer.ggml.pre={shown(name)}: its splitting rules are not known here. Supported: "
            f"{', '.join(sorted(_RULES))}. Give the model's Hugging Face folder instead."
        )


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` from GGUF metadata (key -> value).

    Raises as `check_tokenizer` does.
    """
    check_tokenizer(metadata)
    kind = metadata["tokenizer.ggml.model"]
    tokenizer, adds_bos = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    _mark_special_tokens(tokenizer, metadata)
    # Gemma 4's texts begin with it whatever its files say, as in llama.cpp
    adds_bos = kind == "gemma4" or bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    if adds_bos:
        _prepend_bos(tokenizer, metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(metadata)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE (GPT-2 and its descendants), and whether the family starts texts with its bos token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rules = _RULES[str(metadata["tokenizer.ggml.pre"])]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=rules.has_whole_words)
    tokenizer = Tokenizer(model)
    if rules.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if rules.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.adds_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE (Llama 2, TinyLlama, Mistral): merges follow from the scores, but in Gemma 4's files, which
    have them.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    is_gemma4 = metadata["tokenizer.ggml.model"] == "gemma4"
    if is_gemma4:
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges_from_scores(vocabulary, metadata["tokenizer.ggml.scores"])
    model = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma4))
    prefix = [normalizers.Prepend("▁")] if has_prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges_from_scores(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces is a merge; the better the piece's score, the earlier."""
    longest = max(map(len, vocabulary), default=0)
    if longest > _MAX_PIECE_CHARACTERS:
        raise EngineError(
            f"tokenizer.ggml.tokens: a token of {longest} characters, expected at most {_MAX_PIECE_CHARACTERS}. "
            "Give the model's Hugging Face folder instead."
        )
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token_id], vocabulary[left], vocabulary[right], (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _mark_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    special_types = (_CONTROL, _UNKNOWN)
    added = [
        AddedToken(token, special=kind in special_types, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (*special_types, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _prepend_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    from tokenizers import processors

    token = special_token(metadata, "bos")
    if token is None:
        raise EngineError(
            "tokenizer.ggml.bos_token_id: missing, but the tokenizer starts every text with it. "
            "The GGUF file is damaged; fetch it again."
        )
    token_id = int(metadata["tokenizer.ggml.bos_token_id"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, token_id)]
    )


def special_token(metadata: Mapping[str, Any], role: str) -> str | None:
    """The text of the token with this role (`bos`, `eos`, `unknown`, `padding`), when the file names one."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if token_id is None else str(metadata["tokenizer.ggml.tokens"][int(token_id)])


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, role in roles.items():
        if (token := special_token(metadata, role)) is not None:
            config[key] = token
    architecture = metadata.get("general.architecture")
    if (context_tokens := metadata.get(f"{architecture}.context_length")) is not None:
        config["model_max_length"] = int(context_tokens)
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
