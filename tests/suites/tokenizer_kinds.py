"""Small tokenizers of many kinds, and the settings that may stand beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hard_texts import SPECIAL, hard_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIZE = 700
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_FIRST = ["<unk>", "<s>", "</s>"]
_METASPACE_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
_STRIPPED = decoders.Sequence([_METASPACE_DECODER, decoders.Strip(" ", 1, 0)])


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(hard_texts() * 2, trainer)
    return tokenizer


def _byte_level(*, prefix: bool = False, split: str | None = None, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=_FIRST, initial_alphabet=alphabet))


def _pieces(model: Any, trainer: Any, *, scheme: str | None, normalizer: Any = None) -> Tokenizer:
    """SentencePiece's way: `scheme` of Metaspace, or None for normalizers that write its blanks."""
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if scheme is None else []
    if normalizer is not None or steps:
        tokenizer.normalizer = normalizers.Sequence([*([normalizer] if normalizer else []), *steps])
    if scheme is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "never")
    tokenizer.decoder = _METASPACE_DECODER if scheme == "never" else _STRIPPED
    return _trained(tokenizer, trainer)


def _piece_bpe(scheme: str | None, normalizer: Any = None) -> Tokenizer:
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=[*_FIRST, *_BYTES])
    found = _pieces(model, trainer, scheme=scheme, normalizer=normalizer)
    raw = json.loads(found.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in _BYTES]
    return Tokenizer.from_str(json.dumps(raw))


def _unigram(scheme: str, *, falls_back: bool) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=_SIZE, special_tokens=[*_FIRST, *_BYTES], unk_token="<unk>")
    found = _pieces(models.Unigram(), trainer, scheme=scheme)
    raw = json.loads(found.to_str())
    raw["model"]["byte_fallback"] = falls_back
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in _BYTES]
    return Tokenizer.from_str(json.dumps(raw))


def _word_piece(*, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    found = _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=_SIZE, special_tokens=["[UNK]", "[CLS]", "[SEP]"]))
    ends = [(text, found.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    found.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return found


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(tokenizer, trainers.WordLevelTrainer(vocab_size=_SIZE, special_tokens=_FIRST))


def _suffixes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=_FIRST, end_of_word_suffix="</w>"))


def _with(made: Tokenizer, *tokens: AddedToken, ends: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer with more tokens, and with tokens before and behind a text."""
    made.add_tokens(list(tokens))
    if ends:
        single = f"{ends[0]} $A" + "".join(f" {text}" for text in ends[1:])
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(text, made.token_to_id(text)) for text in ends]
        )
    return made


def _flagged(**flags: bool) -> list[AddedToken]:
    return [AddedToken(text, **flags) for text in ("[NEW]", "<think>", "</think>")]


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level, prefix": lambda: _byte_level(prefix=True),
    "byte-level, Llama 3's split": lambda: _byte_level(split=_LLAMA_3),
    "byte-level, NFC": lambda: _byte_level(split=_LLAMA_3, normalizer=normalizers.NFC()),
    "byte-level, NFKC and small letters": lambda: _byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "byte-level, no accents": lambda: _byte_level(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "byte-level, <s> first": lambda: _with(_byte_level(), ends=("<s>",)),
    "byte-level, <s> and </s>": lambda: _with(_byte_level(split=_LLAMA_3), ends=("<s>", "</s>")),
    "byte-level, special": lambda: _with(_byte_level(), *_flagged(special=True, normalized=False)),
    "byte-level, lstrip": lambda: _with(_byte_level(), *_flagged(special=True, lstrip=True)),
    "byte-level, rstrip": lambda: _with(_byte_level(), *_flagged(special=False, rstrip=True)),
    "byte-level, single words": lambda: _with(_byte_level(), *_flagged(special=False, single_word=True)),
    "byte-level, normalized": lambda: _with(
        _byte_level(normalizer=normalizers.Lowercase()), *_flagged(special=False, normalized=True)
    ),
    "pieces, SentencePiece's blanks": lambda: _with(_piece_bpe(None), ends=("<s>",)),
    "pieces, Metaspace always": lambda: _piece_bpe("always"),
    "pieces, Metaspace first": lambda: _with(_piece_bpe("first"), ends=("<s>",)),
    "pieces, Metaspace never": lambda: _piece_bpe("never"),
    "pieces, NFKC": lambda: _piece_bpe("first", normalizers.NFKC()),
    "pieces, special": lambda: _with(_piece_bpe(None), *_flagged(special=True, normalized=False)),
    "pieces, lstrip and rstrip": lambda: _with(_piece_bpe("first"), *_flagged(special=False, lstrip=True, rstrip=True)),
    "unigram": lambda: _unigram("always", falls_back=False),
    "unigram, bytes": lambda: _unigram("first", falls_back=True),
    "WordPiece": lambda: _word_piece(lowercase=True),
    "WordPiece, cased": lambda: _word_piece(lowercase=False),
    "words": _word_level,
    "suffixes": _suffixes,
}


def _more(number: int) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {str(number + n): {"content": text, "special": n == 0, **flags} for n, text in enumerate(SPECIAL[3:6])}


#: What stands beside a tokenizer.json: its size -> file -> content. `config.json` names a model type.
BESIDE: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "nothing": lambda _: {},
    "special tokens": lambda _: {
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    },
    "additional": lambda _: {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "[NEW]"]}},
    "extra, a list": lambda _: {"tokenizer_config.json": {"extra_special_tokens": ["<|im_start|>", "<think>"]}},
    "extra, by name": lambda _: {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|im_start|>"}}},
    "added, numbered": lambda size: {"tokenizer_config.json": {"added_tokens_decoder": _more(size)}},
    "added_tokens.json": lambda size: {"added_tokens.json": {"<|im_start|>": size, "<think>": size + 1}},
    "special_tokens_map.json": lambda _: {
        "special_tokens_map.json": {
            "eos_token": {
                "content": "</s>",
                "lstrip": False,
                "rstrip": True,
                "normalized": False,
                "single_word": False,
            },
            "additional_special_tokens": ["<|im_end|>"],
        }
    },
    "split_special_tokens": lambda _: {"tokenizer_config.json": {"split_special_tokens": True, "eos_token": "</s>"}},
    "add_prefix_space": lambda _: {"tokenizer_config.json": {"add_prefix_space": True}},
    "no add_prefix_space": lambda _: {"tokenizer_config.json": {"add_prefix_space": False}},
    "clean_up": lambda _: {"tokenizer_config.json": {"clean_up_tokenization_spaces": True}},
    "add_bos_token": lambda _: {"tokenizer_config.json": {"add_bos_token": True, "bos_token": "<s>"}},
    "no add_bos_token": lambda _: {"tokenizer_config.json": {"add_bos_token": False, "bos_token": "<s>"}},
    **{
        f"{name} of {kind or 'no type'}": lambda _, name=name, kind=kind: {
            "tokenizer_config.json": {"tokenizer_class": name, "unk_token": "<unk>"} | dict.fromkeys(ENDS, "</s>"),
            **({"config.json": {"model_type": kind}} if kind else {}),
        }
        for name, kind in (
            ("PreTrainedTokenizerFast", "llama"),
            ("LlamaTokenizerFast", "llama"),
            ("LlamaTokenizer", "mistral"),
            ("GPT2Tokenizer", ""),
            ("GPT2TokenizerFast", "opt"),
            ("Qwen2Tokenizer", "qwen2"),
            ("Qwen2TokenizerFast", "qwen3"),
            ("GemmaTokenizer", "gemma2"),
            ("TokenizersBackend", "phi3"),
        )
    },
}
ENDS = ("bos_token", "eos_token")


def folders(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Kind, what stands beside, and folder."""
    for place, (kind, make) in enumerate(KINDS.items()):
        tokenizer = make()
        for number, (beside, files) in enumerate(BESIDE.items()):
            folder = root / f"kind {place} {number}"
            folder.mkdir()
            tokenizer.save(str(folder / "tokenizer.json"))
            given = {"tokenizer_config.json": {}, "config.json": {"model_type": "llama"}}
            for name, content in (given | files(tokenizer.get_vocab_size())).items():
                (folder / name).write_text(json.dumps(content))
            yield kind, beside, folder


def older_folders(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, folder and base of adapters whose byte pairs or word pieces are in the older form."""
    base = root / "base"
    base.mkdir()
    made = _with(_byte_level(split=_LLAMA_3), AddedToken("<|endoftext|>", special=True))
    raw = json.loads(made.to_str())
    raw["model"]["vocab"]["<|endoftext|>"] = made.token_to_id("<|endoftext|>")
    made = Tokenizer.from_str(json.dumps(raw))
    made.save(str(base / "tokenizer.json"))
    size = made.get_vocab_size()
    for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast", "RobertaTokenizer", None):
        for number, (beside, files) in enumerate(BESIDE.items()):
            if " of " in beside:
                continue
            folder = root / f"older {name} {number}"
            folder.mkdir()
            (folder / "vocab.json").write_text(json.dumps(raw["model"]["vocab"]))
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
            (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
            given = files(size)
            settings = {"eos_token": "</s>"} | ({"tokenizer_class": name} if name else {})
            given["tokenizer_config.json"] = settings | given.get("tokenizer_config.json", {})
            for file, content in given.items():
                (folder / file).write_text(json.dumps(content))
            yield f"vocab.json and merges.txt of {name}, {beside}", folder, base
    for name in ("added_tokens.json", "tokenizer_config.json"):
        folder = root / f"alone {name}"
        folder.mkdir()
        new = {"[NEW]": size} if name == "added_tokens.json" else {"additional_special_tokens": ["[NEW]"]}
        (folder / name).write_text(json.dumps(new))
        yield f"{name} alone", folder, base
    folder = root / "vocab.txt"
    folder.mkdir()
    words = sorted(_word_piece(lowercase=True).get_vocab().items(), key=lambda pair: pair[1])
    (folder / "vocab.txt").write_text("\n".join(word for word, _ in words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    yield "vocab.txt", folder, base


def sentencepiece_folders(root: Path) -> Iterator[tuple[str, Path, Path | None]]:
    """Name, folder and base of SentencePiece models: of adapters, of a base, and of an adapter of another base."""
    import sentencepiece

    text = root / "corpus.txt"
    text.write_text(
        "\n".join(line for one in hard_texts() for line in one.replace("\x00", "").splitlines() if line) * 3
    )
    options = {"byte_fallback": [True, False], "add_dummy_prefix": [True, False]}
    for model_type in ("bpe", "unigram"):
        for falls_back, prefix in ((b, p) for b in options["byte_fallback"] for p in options["add_dummy_prefix"]):
            name = f"SentencePiece {model_type}, bytes {falls_back}, prefix {prefix}"
            stem = root / name.replace(" ", "-").replace(",", "")
            stem.mkdir()
            sentencepiece.SentencePieceTrainer.train(
                input=str(text),
                model_prefix=str(stem / "tokenizer"),
                model_type=model_type,
                vocab_size=_SIZE,
                byte_fallback=falls_back,
                add_dummy_prefix=prefix,
                hard_vocab_limit=False,
                character_coverage=0.995,
                max_sentence_length=65536,
                minloglevel=2,
            )
            (stem / "tokenizer.vocab").unlink()
            (stem / "config.json").write_text('{"model_type": "llama"}')
            for tokenizer_class in ("LlamaTokenizer", "T5Tokenizer", None):
                settings = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
                (stem / "tokenizer_config.json").write_text(json.dumps(settings))
                yield f"{name}, {tokenizer_class}: a base without tokenizer.json", stem, None
            base = root / f"{stem.name}-base"
            _as_base(stem, base)
            yield f"{name}: a base with tokenizer.json", base, None
            (stem / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
            yield f"{name}: an adapter's tokenizer.model of its base", stem, base
            yield f"{name}: an adapter's tokenizer.model of another base", stem, root / "base"


def _as_base(folder: Path, base: Path) -> None:
    """A base's folder as transformers saves it."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder).save_pretrained(base)
    (base / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (base / "config.json").write_text('{"model_type": "llama"}')
