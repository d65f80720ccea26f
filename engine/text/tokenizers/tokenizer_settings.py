"""Reads what stands beside a `tokenizer.json` as transformers' `AutoTokenizer` reads it: special and added tokens, and
the settings of `tokenizer_config.json`.

`READ`, `IRRELEVANT` and `REFUSED` classify every key; a test walks the keys that transformers reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from ....system.untrusted import shown, shown_name

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Key of `tokenizer_config.json` -> what is done with it. Other keys that end with `_token` name special tokens, too.
READ: Mapping[str, str] = {
    **dict.fromkeys(SPECIAL_NAMES, "a special token; added where the vocabulary lacks it"),
    "added_tokens_decoder": "tokens and their numbers, added where tokenizer.json lacks them",
    "additional_special_tokens": "special tokens, added where tokenizer.json lacks them",
    "extra_special_tokens": "the same in transformers 5, as a list or by name",
    "model_specific_special_tokens": "special tokens by name",
    "split_special_tokens": "texts of special tokens are split like other text",
    "add_prefix_space": "a blank before each text, for classes that apply it",
    "add_bos_token": "for a vocabulary in an older form; beside tokenizer.json transformers drops it",
    "add_eos_token": "for a vocabulary in an older form; beside tokenizer.json transformers drops it",
    "tokenizer_class": "which class's way of reading applies",
    "chat_template": "the chat template, where there is no chat_template.jinja",
    "clean_up_tokenization_spaces": "applied to no byte pairs, as in transformers; refused for other kinds",
    "fast_tokenizer_files": "refused where it names another file than tokenizer.json",
}
_OF_CALLS = "for calls that ask for it, which no prompt does"
_OF_TRAINING = "for batches of equal length"
_OF_FILES = "transformers takes the folder's own files"
_OF_REBUILDING = "for classes that transformers builds anew; tokenizer.json is followed"
_OF_DOWNLOADS = "for downloads"
#: Key -> why it changes no token and no text.
IRRELEVANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("model_max_length", "max_len", "max_length", "max_seq_length"), "the model's context is the limit"
    ),
    **dict.fromkeys(("padding_side", "pad_to_multiple_of", "pad_token_type_id", "padding"), _OF_TRAINING),
    **dict.fromkeys(("truncation_side", "truncation_strategy", "truncation", "stride", "tokenizer_padding"), _OF_CALLS),
    **dict.fromkeys(("tokenizer_truncation", "_json_padding", "_json_truncation", "return_token_type_ids"), _OF_CALLS),
    **dict.fromkeys(("model_input_names", "verbose", "deprecation_warnings", "add_special_tokens"), _OF_CALLS),
    **dict.fromkeys(("tokenizer_file", "vocab_file", "merges_file", "name_or_path", "files_loaded"), _OF_FILES),
    **dict.fromkeys(("vocab", "merges", "spm_file", "special_tokens_map_file", "tokenizer_type"), _OF_FILES),
    **dict.fromkeys(("backend", "is_fast", "use_fast", "from_slow", "is_local", "local_files_only"), _OF_FILES),
    **dict.fromkeys(("legacy", "legacy_behaviour", "use_default_system_prompt", "unk_id"), _OF_REBUILDING),
    **dict.fromkeys(("do_lower_case", "clean_text", "strip_accents", "tokenize_chinese_chars"), _OF_REBUILDING),
    **dict.fromkeys(("do_basic_tokenize", "never_split", "trim_offsets", "keep_accents"), _OF_REBUILDING),
    **dict.fromkeys(("remove_space", "split_by_punct", "wordpieces_prefix", "offset"), _OF_REBUILDING),
    **dict.fromkeys(
        ("extra_ids", "predict_timestamps", "normalizer_file", "_spm_precompiled_charsmap"), _OF_REBUILDING
    ),
    **dict.fromkeys(("language", "task", "src_lang", "tgt_lang", "errors", "normalize"), _OF_REBUILDING),
    **dict.fromkeys(("tags_dict", "entity_vocab", "max_entity_length", "max_mention_length"), _OF_REBUILDING),
    **dict.fromkeys(("max_depth", "max_width", "pad_width", "only_label_first_subword"), _OF_REBUILDING),
    **dict.fromkeys(("cls_token_box", "sep_token_box", "pad_token_box", "pad_token_label"), _OF_REBUILDING),
    **dict.fromkeys(("mask_token_sent", "chain_break_token", "sp_model_kwargs", "sp_model"), _OF_REBUILDING),
    **dict.fromkeys(("spaces_between_special_tokens", "additional_chat_templates"), "transformers 5 does not read it"),
    **dict.fromkeys(("revision", "token", "proxies", "cache_dir", "subfolder", "code_revision"), _OF_DOWNLOADS),
    **dict.fromkeys(("force_download", "trust_remote_code", "_commit_hash", "_from_auto"), _OF_DOWNLOADS),
    **dict.fromkeys(("_from_pipeline", "config", "mistral_format", "commit_hash"), _OF_DOWNLOADS),
    "processor_class": "of images, sound and video",
    "image_processor_type": "of images",
    "auto_map": "code of the folder, which is never run; transformers uses its own classes without trust_remote_code",
    "response_template": "reads answers in transformers; see --tool-call-parser and --reasoning-markers",
    "response_schema": "transformers drops it",
    "chat_control_tokens": "texts of added tokens inside of messages, which transformers sanitizes on request only",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": "refused by the key that it belongs to",
    "transformers_version": "who wrote the file",
    "unsloth_version": "who wrote the file",
    "tokenizer": "not a setting of a file",
    "is_assistant_tokens_mask_supported": "of training",
}
#: Key -> why it is refused where it is set.
REFUSED: Mapping[str, str] = {
    "fix_mistral_regex": "another pattern than tokenizer.json has. Save the tokenizer with transformers",
    "post_processor": "expected none: tokenizer.json has it. Remove the key",
    "tokenizer_object": "not a setting of a file. Remove the key",
    "gguf_file": "expected none beside tokenizer.json. Give the GGUF file as the model",
    "init_inputs": "expected none: positional arguments of an older class. Save the tokenizer with transformers",
}
#: Classes of transformers that build a tokenizer from `tokenizer.json` as it is.
AS_WRITTEN = "TokenizersBackend"
_AS_WRITTEN_NAMES = (AS_WRITTEN, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
#: `model_type` -> the class that transformers has for it, where it has one.
CLASS_OF_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("mistral", "mistral3", "ministral", "ministral3", "phi3", "ernie4_5", "glm", "glm4"), AS_WRITTEN),
    **dict.fromkeys(("granite", "granitemoehybrid", "olmo2", "olmo3", "smolvlm"), AS_WRITTEN),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3"), "GemmaTokenizer"),
    **dict.fromkeys(("opt", "gpt2", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
}
# Types whose published files are known to name a wrong class.
_OVERRULED = ("qwen2", "qwen3_5", "phi3", "ernie4_5")
# Classes without a blank of their own before texts.
_WITHOUT_PREFIX_SPACE = (AS_WRITTEN, "GemmaTokenizer")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Settings from the files beside `tokenizer.json`."""

    #: Name of a special token -> its text.
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    #: Tokens to be added, in order.
    tokens: tuple[AddedToken, ...] = ()
    #: Text of an added token -> the number that a file gives it.
    numbers: Mapping[str, int] = field(default_factory=dict)
    #: Whether texts of special tokens are encoded as ordinary text.
    splits_special_tokens: bool = False
    #: Whether a blank is put before texts; None where no file says, or the class has none.
    prefix_space: bool | None = None
    #: Whether decoded text is cleaned up (`clean_up_tokenization_spaces`).
    cleans_up: bool = False
    #: Class with which transformers reads the tokenizer.
    class_name: str = AS_WRITTEN
    #: Remarks, as clauses for people.
    notes: tuple[str, ...] = ()
    #: Reasons to refuse the tokenizer, as clauses for people.
    problems: tuple[str, ...] = ()


def class_of(tokenizer_class: Any, model_type: str, *, is_byte_level: bool) -> str:
    """The class with which transformers 5 reads a tokenizer of this `tokenizer_class`, beside this `model_type`."""
    given = str(tokenizer_class or "").removesuffix("Fast")
    registered = CLASS_OF_TYPE.get(model_type)
    if given == "LlamaTokenizer" and is_byte_level and model_type not in _OVERRULED:
        return AS_WRITTEN
    if given and registered not in (None, given):
        if registered == AS_WRITTEN:
            return AS_WRITTEN
        if model_type in _OVERRULED:
            return str(registered)
    name = given or registered or AS_WRITTEN
    return AS_WRITTEN if name in _AS_WRITTEN_NAMES else name


def read_settings(
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    added: Mapping[str, Any],
    in_file: Mapping[int, AddedToken],
    *,
    model_type: str = "",
    is_byte_level: bool = False,
) -> TokenizerSettings:
    """The settings of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.

    `in_file`: added tokens of `tokenizer.json`, by number. `model_type`: of the model beside it.
    """
    problems = list(_problems(config))
    named_tokens, extra = _special_tokens(config, special_map if "added_tokens_decoder" not in config else {})
    named = {name: token.content for name, token in named_tokens.items()}
    special = {*named.values(), *(token.content for token in extra)}
    numbered = _numbered_tokens(config, added, in_file, special, problems)
    tokens = [token for _, token in sorted(numbered.items())]
    texts = {token.content for token in (*in_file.values(), *tokens)}
    for token in (*named_tokens.values(), *extra):
        if token.content not in texts:
            texts.add(token.content)
            tokens.append(token)
    tokens = [_as_special(token) if token.content in named.values() else token for token in tokens]
    class_name = class_of(config.get("tokenizer_class"), model_type, is_byte_level=is_byte_level)
    prefix_space = config.get("add_prefix_space")
    unknown = sorted(key for key in config if not _is_known(key))
    return TokenizerSettings(
        special_tokens=named,
        tokens=tuple(tokens),
        numbers={token.content: number for number, token in numbered.items()},
        splits_special_tokens=config.get("split_special_tokens") is True,
        prefix_space=prefix_space
        if isinstance(prefix_space, bool) and class_name not in _WITHOUT_PREFIX_SPACE
        else None,
        cleans_up=config.get("clean_up_tokenization_spaces") is True,
        class_name=class_name,
        notes=(f"keys that nothing reads: {', '.join(map(shown_name, unknown[:8]))}",) if unknown else (),
        problems=tuple(problems),
    )


def _is_known(key: str) -> bool:
    return key in READ or key in IRRELEVANT or key in REFUSED or key.endswith("_token") or key.startswith("_")


def _problems(config: Mapping[str, Any]) -> Iterable[str]:
    for key, why in REFUSED.items():
        if config.get(key) not in (None, False, "", [], {}):
            yield f"{key}={shown(config[key])}: {why}"
    names = config.get("fast_tokenizer_files")
    for name in names if isinstance(names, list) else ():
        if re.fullmatch(r"tokenizer\..+\.json", str(name)):
            yield f"fast_tokenizer_files={shown(name)}: a tokenizer file by version. Save it with transformers"


def _special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Special tokens by name, in transformers' order, by which new ones are numbered; and others. `special_map` takes
    precedence.
    """
    given = dict(config)
    if not given.get("extra_special_tokens") and "additional_special_tokens" in given:
        given["extra_special_tokens"] = given["additional_special_tokens"]
    by_name: dict[str, Any] = {key: value for key, value in given.items() if key.endswith("_token")}
    extra = given.get("extra_special_tokens")
    for values in (given.get("model_specific_special_tokens"), extra):
        by_name |= values if isinstance(values, Mapping) else {}
    by_name |= {key: value for key, value in special_map.items() if key.endswith("_token")}
    more = special_map.get("extra_special_tokens")
    by_name |= more if isinstance(more, Mapping) else {}
    listed = [values for values in (extra, more) if isinstance(values, list) and values]
    if not listed and isinstance(special_map.get("additional_special_tokens"), list):
        listed = [special_map["additional_special_tokens"]]
    by_name = {name: by_name[name] for name in SPECIAL_NAMES if name in by_name} | by_name
    named = {name: token for name, value in by_name.items() if (token := _token(value)) is not None}
    others = {token.content: token for values in listed for value in values if (token := _token(value)) is not None}
    return named, list(others.values())


def _numbered_tokens(
    config: Mapping[str, Any],
    added: Mapping[str, Any],
    in_file: Mapping[int, AddedToken],
    special: Collection[str],
    problems: list[str],
) -> dict[int, AddedToken]:
    """Added tokens by number: those of the configuration, else those of the older files and of `tokenizer.json`."""
    found: dict[int, AddedToken] = {}
    try:
        if "added_tokens_decoder" in config:
            for number, value in config["added_tokens_decoder"].items():
                token = _token(value, is_special=False) if isinstance(value, Mapping) else None
                if token is None:
                    raise TypeError(f"{shown(value)} under {shown_name(number)}")
                found[int(number)] = token
            return found
        for text, number in added.items():
            is_special = text in special
            found[int(number)] = AddedToken(text, normalized=not is_special, special=is_special)
    except (TypeError, ValueError, AttributeError) as error:
        problems.append(f"added tokens: expected a number and a token each, found {shown_name(str(error))}")
    return found | dict(in_file)


def _token(value: Any, *, is_special: bool = True) -> AddedToken | None:
    """A token written as a string or as an object with `content`; None for anything else, and for no text."""
    given = value if isinstance(value, Mapping) else {"content": value}
    text = given.get("content")
    if not isinstance(text, str) or not text:
        return None
    flags = {"special": is_special} | {name: bool(given[name]) for name in _FLAGS if given.get(name) is not None}
    return AddedToken(text, **flags)


def _as_special(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, **(flags | {"special": True}))
