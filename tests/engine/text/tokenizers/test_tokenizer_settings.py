"""Everything that stands beside a `tokenizer.json` is read as `AutoTokenizer` reads it, or refused by name."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from lorabatch.engine.errors import ModelFilesError
from lorabatch.engine.model_config import SUPPORTED_MODEL_TYPES
from lorabatch.engine.text.chat.conversation import RenderOptions
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.engine.text.tokenizers.tokenizer_settings import IRRELEVANT, READ, REFUSED, class_of

TEXTS = ["<|tool|> fetch <|obs|>the page", "answer: <|obs|> yes<|end|>", " Hello  world", "<|start|>a<|tool|>"]
NUM_FILE_TOKENS = 258
WRITTEN = {
    text: {
        "content": text,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    for text in ("<|tool|>", "<|obs|>")
}
DECODER = {str(NUM_FILE_TOKENS + i): token for i, token in enumerate(WRITTEN.values())}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer without merges, and its configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = TokenizerFile(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|start|>", "<|end|>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>", bos_token="<|start|>")
    return tmp_path


def write(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def ours(folder: Path) -> list[list[int]]:
    return Tokenizer.from_folder(folder).encode_batch(TEXTS, is_rendered=False)


def theirs(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [list(tokenizer(text)["input_ids"]) for text in TEXTS]


SETTINGS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda folder: None,
    "new special tokens, padding first": lambda folder: write(folder, pad_token="<|tool|>", unk_token="<|obs|>"),
    "new special tokens, the start last": lambda folder: write(
        folder, mask_token="<|tool|>", eos_token="<|obs|>", bos_token="<|new|>"
    ),
    "new special tokens of two files": lambda folder: (
        write(folder, sep_token="<|tool|>", image_token="page"),
        write(folder, "special_tokens_map.json", cls_token="answer", unk_token="<|obs|>"),
    )[0],
    "added_tokens_decoder": lambda folder: write(folder, added_tokens_decoder=DECODER),
    "added tokens that take blanks": lambda folder: write(
        folder, added_tokens_decoder={n: t | {"lstrip": True, "rstrip": True} for n, t in DECODER.items()}
    ),
    "added tokens that are whole words": lambda folder: write(
        folder, added_tokens_decoder={n: t | {"single_word": True, "special": False} for n, t in DECODER.items()}
    ),
    "other flags of a token of the file": lambda folder: write(
        folder,
        added_tokens_decoder={str(NUM_FILE_TOKENS - 1): WRITTEN["<|tool|>"] | {"content": "<|end|>", "lstrip": True}},
    ),
    "added_tokens.json": lambda folder: write(folder, "added_tokens.json", **{"<|tool|>": 258, "<|obs|>": 259}),
    "added_tokens.json beside added_tokens_decoder": lambda folder: (
        write(folder, "added_tokens.json", **{"<|tool|>": 258, "<|obs|>": 259}),
        write(folder, added_tokens_decoder={"258": WRITTEN["<|obs|>"]}),
    )[0],
    "additional_special_tokens": lambda folder: write(folder, additional_special_tokens=list(WRITTEN)),
    "additional_special_tokens of the map": lambda folder: write(
        folder, "special_tokens_map.json", additional_special_tokens=list(WRITTEN)
    ),
    "extra_special_tokens, a list": lambda folder: write(folder, extra_special_tokens=list(WRITTEN)),
    "extra_special_tokens by name": lambda folder: write(folder, extra_special_tokens={"tool_token": "<|tool|>"}),
    "a token by a name of its own": lambda folder: write(folder, image_token="<|obs|>"),
    "a padding token that the vocabulary lacks": lambda folder: write(folder, pad_token="<|obs|>"),
    "an object": lambda folder: write(
        folder, mask_token={"__type": "AddedToken", **WRITTEN["<|tool|>"], "lstrip": True}
    ),
    "the map over the configuration": lambda folder: write(folder, "special_tokens_map.json", eos_token="<|tool|>"),
    "an object in the map": lambda folder: write(
        folder, "special_tokens_map.json", cls_token={**WRITTEN["<|obs|>"], "rstrip": True}
    ),
    "split_special_tokens": lambda folder: write(folder, split_special_tokens=True),
    "add_prefix_space of GPT-2": lambda folder: write(folder, add_prefix_space=True, tokenizer_class="GPT2Tokenizer"),
    "add_prefix_space of a class without": lambda folder: write(folder, add_prefix_space=True),
    "add_bos_token": lambda folder: write(folder, add_bos_token=True, add_eos_token=True),
    "limits of training": lambda folder: write(folder, model_max_length=4, padding_side="left", truncation_side="left"),
    "paths elsewhere": lambda folder: write(folder, tokenizer_file="/nowhere/tokenizer.json", name_or_path="/nowhere"),
}


@pytest.mark.parametrize("case", list(SETTINGS))
def test_tokens_are_those_of_auto_tokenizer(folder: Path, case: str) -> None:
    SETTINGS[case](folder)
    if case == "add_prefix_space of GPT-2":
        write(folder, unk_token="<|end|>")  # transformers' class adds one of its own otherwise
    assert ours(folder) == theirs(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fix_mistral_regex": True}, "fix_mistral_regex=True: another pattern"),
        ({"post_processor": {"type": "ByteLevel"}}, "post_processor=.*expected none"),
        (
            {"added_tokens_decoder": {"300": WRITTEN["<|obs|>"]}},
            r"token '<\|obs\|>': number 300 here, 258 by the vocab",
        ),
        ({"added_tokens_decoder": {"0": WRITTEN["<|obs|>"]}}, "number 0 here, 258 by"),
        ({"added_tokens_decoder": {"258": "x"}}, "expected a number and a token each, found 'x' under 258"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "a tokenizer file by version"),
    ],
)
def test_what_would_be_another_tokenizer_is_refused_by_name(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    write(folder, **changes)
    with pytest.raises(ModelFilesError, match=expected):
        Tokenizer.from_folder(folder)


def test_a_prefix_space_that_only_another_file_could_have_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    write(folder, add_prefix_space=False, tokenizer_class="LlamaTokenizer")
    with pytest.raises(ModelFilesError, match=r"add_prefix_space=False: tokenizer.json has prepend_scheme='always'"):
        Tokenizer.from_folder(folder)


def test_cleaning_up_answers_is_refused_where_it_would_change_them(folder: Path) -> None:
    write(folder, clean_up_tokenization_spaces=True)
    assert ours(folder) == theirs(folder)  # byte pairs are never cleaned up
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"] = {"type": "WordLevel", "vocab": raw["model"]["vocab"], "unk_token": "!"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFilesError, match="clean_up_tokenization_spaces=True"):
        Tokenizer.from_folder(folder)


def test_keys_that_nothing_reads_are_named(folder: Path) -> None:
    write(folder, my_own_setting=1)
    assert Tokenizer.from_folder(folder).notes == ("keys that nothing reads: my_own_setting",)


def test_a_template_for_tools_in_its_own_file_renders_rows_with_tools(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    tools = [{"type": "function", "function": {"name": "search"}}]
    question = [{"role": "user", "content": "hi"}]
    oracle, own = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for asked in (None, tools):
        expected = oracle.apply_chat_template(question, tools=asked, tokenize=False, add_generation_prompt=True)
        assert own.render(question, RenderOptions(tools=asked)) == expected


# What transformers reads

_KWARGS = {"kwargs", "init_kwargs", "tokenizer_config", "local_kwargs"}
_READERS = (
    PreTrainedTokenizerBase.__init__,
    PreTrainedTokenizerBase._from_pretrained,
    PreTrainedTokenizerBase.from_pretrained,
    TokenizersBackend.__init__,
    TokenizersBackend.convert_to_native_format,
    TokenizersBackend._patch_mistral_regex,
    tokenization_auto.AutoTokenizer.from_pretrained,
)


def keys_read_by(function: Callable[..., Any]) -> Iterator[str]:
    """Keys that a function looks up in its keyword arguments."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        name: Any = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("pop", "get", "setdefault") and getattr(node.func.value, "id", "") in _KWARGS:
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in _KWARGS:
            name = node.slice
        elif isinstance(node, ast.Compare) and getattr(node.comparators[0], "id", "") in _KWARGS:
            name = node.left
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


# Classes that the supported families' tokenizers name.
_NEAR = ("GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "TokenizersBackend")


def keys_of_transformers(names: Iterable[str]) -> set[str]:
    """Keys that these tokenizer classes of transformers read."""
    found = {key for reader in _READERS for key in keys_read_by(reader)}
    for name in names:
        try:
            kind = tokenization_auto.tokenizer_class_from_name(name)
        except ImportError:
            continue
        if kind is not None and issubclass(kind, TokenizersBackend):
            found |= inspect.signature(kind.__init__).parameters.keys()
    return found - {"self", "args", "kwargs"}


EVERY = sorted(set(filter(None, tokenization_auto.TOKENIZER_MAPPING_NAMES.values())))


@pytest.mark.parametrize(
    "names", [pytest.param(_NEAR, id="of families"), pytest.param(EVERY, id="all", marks=pytest.mark.long)]
)
@pytest.mark.reference("transformers")
def test_every_key_that_transformers_reads_is_classified(
    names: Iterable[str], unclassified: Callable[[Iterable[str]], None]
) -> None:
    known = READ.keys() | IRRELEVANT.keys() | REFUSED.keys()
    unclassified(key for key in keys_of_transformers(names) - known if not key.endswith("_token"))
    assert not READ.keys() & IRRELEVANT.keys()
    assert not IRRELEVANT.keys() & REFUSED.keys()


# transformers imports all of its classes to find one beside "llama".
FAMILIES = (
    pytest.param("llama", marks=pytest.mark.long),
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "opt",
    *(
        pytest.param(family, marks=pytest.mark.long)
        for family in sorted(
            set(SUPPORTED_MODEL_TYPES)
            - {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "opt"}
        )
    ),
)
CLASSES = ("", "PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer", "GemmaTokenizer")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_is_the_one_that_auto_tokenizer_takes(folder: Path, family: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    for name in CLASSES:
        write(folder, tokenizer_class=name or None)
        oracle = type(AutoTokenizer.from_pretrained(folder)).__name__
        assert class_of(name, family, is_byte_level=True) == oracle, name


# Adapters

BASE_TOKENS = ["<|start|>", "<|end|>"]


@pytest.fixture
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, for files of an adapter over `folder`."""
    return tmp_path_factory.mktemp("adapter")


def older_files(base: Path, adapter: Path, **settings: Any) -> None:
    """`vocab.json` and `merges.txt` of the base's vocabulary."""
    model = json.loads((base / "tokenizer.json").read_text())
    vocab = model["model"]["vocab"] | {token["content"]: token["id"] for token in model["added_tokens"]}
    (adapter / "vocab.json").write_text(json.dumps(vocab | {"th": 258, "the": 259}))
    (adapter / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
    write(adapter, **(ends | {"tokenizer_class": "GPT2Tokenizer"} | settings))


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize(
    "settings", [{}, {"add_bos_token": True}, {"add_prefix_space": True}, {"additional_special_tokens": ["<|tool|>"]}]
)
def test_byte_pairs_in_the_older_form_are_read(folder: Path, adapter: Path, kind: str, settings: Any) -> None:
    older_files(folder, adapter, tokenizer_class=kind, **settings)
    texts = [*TEXTS, "the other 1234 don't\n\n x"]
    oracle = AutoTokenizer.from_pretrained(adapter)
    own = Tokenizer.from_folder(adapter, base=folder)
    assert own.encode_batch(texts, is_rendered=False) == [list(oracle(text)["input_ids"]) for text in texts]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"added_tokens.json": {"<|act|>": 258}}, r"added_tokens.json names tokens.*no tokenizer.json: '<\|act\|>'"),
        ({"special_tokens_map.json": {"additional_special_tokens": ["<|act|>"]}}, "names tokens that the base's"),
        ({"tokenizer_config.json": {"added_tokens_decoder": DECODER}}, "names tokens that the base's"),
        ({"tokenizer_config.json": {"split_special_tokens": True}}, "split_special_tokens=True, and there is no"),
        ({"vocab.json": {"a": 0}, "merges.txt": ""}, "vocab.json, merges.txt of tokenizer_class=None and no tokenizer"),
        ({"vocab.txt": "a\nb"}, "vocab.txt of tokenizer_class=None and no tokenizer.json"),
        ({"tokenizer.model": "no protocol buffer"}, "not a vocabulary"),
        ({"tekken.json": {}}, "tekken.json of tokenizer_class=None"),
    ],
)
def test_what_an_adapter_has_without_a_tokenizer_file_is_refused_by_name(
    folder: Path, adapter: Path, files: dict[str, Any], expected: str
) -> None:
    for name, content in files.items():
        (adapter / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelFilesError, match=expected):
        Tokenizer.from_folder(adapter, base=folder)


def test_settings_that_say_nothing_new_leave_the_tokenizer_to_the_base(folder: Path, adapter: Path) -> None:
    write(adapter, eos_token="<|end|>", chat_template="[{{ messages[0].content }}]", model_max_length=7)
    own = Tokenizer.from_folder(adapter, base=folder)
    assert own.encode_batch(TEXTS, is_rendered=False) == ours(folder)
    assert own.render([{"role": "user", "content": "hi"}]) == "[hi]"


def piece(text: str) -> bytes:
    """One piece of a SentencePiece model, with a score."""
    inner = bytes([0x0A, len(text.encode())]) + text.encode() + b"\x15\x00\x00\x80\xbf"
    return bytes([0x0A, len(inner)]) + inner


def test_a_sentencepiece_model_of_the_base_leaves_the_tokenizer_to_the_base(folder: Path, adapter: Path) -> None:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    model = b"".join(map(piece, pieces)) + b"\x12\x02\x08\x01"
    (adapter / "tokenizer.model").write_bytes(model)
    write(adapter, tokenizer_class="LlamaTokenizer", additional_special_tokens=["<|tool|>"])
    own = Tokenizer.from_folder(adapter, base=folder)
    assert own.encode_batch(["ab<|tool|>"], is_rendered=False) == [[vocab["a"], vocab["b"], 258]]
    (adapter / "tokenizer.model").write_bytes(b"".join(map(piece, reversed(pieces))))
    with pytest.raises(ModelFilesError, match=r"and a tokenizer.model with the base's pieces"):
        Tokenizer.from_folder(adapter, base=folder)
    shutil.copy(adapter / "tokenizer.model", folder)  # the same file in both
    assert Tokenizer.from_folder(adapter, base=folder).encode_batch(["a"], is_rendered=False) == [[vocab["a"]]]
