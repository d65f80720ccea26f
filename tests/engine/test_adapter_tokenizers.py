"""Rows of adapters with tokenizers of their own, in an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft_oracle
import pytest

from lorabatch.engine.errors import TokenizerError
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.text.tokenizers import confined_tokenizer
from lorabatch.engine.text.tokenizers.confined_tokenizer import adapter_tokenizer
from lorabatch.engine.text.tokenizers.tokenizer import Detokenizer, Tokenizer

#: What makes a text of tokens -> steps of decoding, behind the base's own.
DECODERS: dict[str, list[dict[str, Any]]] = {
    "slow": [
        {"type": "Replace", "pattern": {"Regex": "^"}, "content": "x" + "a" * 999},
        *[{"type": "Replace", "pattern": {"Regex": "a*a*(?<=x)"}, "content": ""}] * 8,
    ],
    "growing": [{"type": "Replace", "pattern": {"Regex": "(?=.)|$"}, "content": "aa"}] * 10,
    "raising": [
        {"type": "Replace", "pattern": {"Regex": "(?m).+"}, "content": "aaa"},
        {"type": "Strip", "content": "a", "start": 3, "stop": 3},
    ],
    "sound": [],
}
#: How a row makes an engine decode or encode -> its sampling.
FORMS = {
    "at its end": SamplingParams(max_tokens=3),
    "while it runs": SamplingParams(max_tokens=3, stop=("never there",)),
    "a choice": SamplingParams(max_tokens=9, choice=("fox", "dog 7")),
    "a scored choice": SamplingParams(max_tokens=9, choice=("fox", "dog 7"), score_choices=True),
    "a pattern": SamplingParams(max_tokens=9, regex="(fox|dog) 7"),
    "bad words": SamplingParams(max_tokens=3, bad_words=("fox",)),
    "reasoning": SamplingParams(max_tokens=3, reasoning_markers=",x"),
}


@pytest.fixture
def folders(make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter."""
    base = make_model(tmp_path / "base")
    return base, make_adapter(tmp_path / "adapter", base, r=2, target_modules=["q_proj"])


def with_decoder(base: Path, adapter: Path, steps: list[dict[str, Any]]) -> None:
    """Give an adapter the base's tokenizer with more steps of decoding."""
    raw = json.loads((base / "tokenizer.json").read_text())
    raw["decoder"] = {"type": "Sequence", "decoders": [raw["decoder"], *steps]}
    (adapter / "tokenizer.json").write_text(json.dumps(raw))


def served(base: Path, adapters: dict[str, Path], forms: dict[str, SamplingParams]) -> dict[str, Result]:
    """A row of each form for each adapter, and for the base."""
    engine = peft_oracle.make_engine(base)
    ids: dict[str, str | None] = {"base": None}
    for name, folder in adapters.items():
        adapter_id = audit_adapter(folder, engine.model, name).identity_sha256
        assert adapter_id is not None
        engine.register_adapter(adapter_id, folder, name)
        ids[name] = adapter_id
    rows = [Request(f"{n}: {form}", (5, 6), i, forms[form]) for n, i in ids.items() for form in forms]
    return peft_oracle.serve(engine, rows)


def test_a_hostile_decoder_costs_its_adapter_s_rows_alone(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined_tokenizer, "CPU_S", 0)
    monkeypatch.setattr(confined_tokenizer, "_FREE_S", 0.5)
    base, adapter = folders
    adapters = {name: Path(shutil.copytree(adapter, tmp_path / name)) for name in DECODERS}
    for name, folder in adapters.items():
        with_decoder(base, folder, DECODERS[name])
    found = served(base, adapters, FORMS)
    assert [key for key, result in found.items() if key.startswith(("base", "sound")) and result.error] == []
    for name, reason in {
        "slow": "takes more than 1 s of computing",
        "growing": "makes more than",
        "raising": "slice index starts",
    }.items():
        errors = {form: found[f"{name}: {form}"].error or "" for form in FORMS}
        assert any(reason in error for error in errors.values()), errors
        assert [form for form, error in errors.items() if not error.startswith("the adapter's tokenizer")] == [], errors


def test_a_sound_tokenizer_says_the_same_in_its_process_as_in_ours(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    with_decoder(base, adapter, [{"type": "Replace", "pattern": {"String": "o"}, "content": "ö"}])
    ours, theirs = Tokenizer.from_folder(adapter, base=base), adapter_tokenizer(adapter, base, "")
    assert type(theirs) is not Tokenizer
    texts = ["the fox 7", "<|im_start|>dog é 中\n", ""]
    tokens = ours.encode_batch(texts, is_rendered=True)
    assert theirs.encode_batch(texts, is_rendered=True) == tokens
    for ids in [*tokens, list(range(200, 230)), [1, 2, 999_999]]:
        assert theirs.decode(ids) == ours.decode(ids)
        assert theirs.text_of(ids) == ours.text_of(ids)
        assert theirs.bytes_of(ids) == ours.bytes_of(ids)
        here, there = Detokenizer(ours), Detokenizer(theirs)
        assert list(map(there.add, ids)) == list(map(here.add, ids))
    assert theirs.num_end_tokens == ours.num_end_tokens


def test_an_adapter_s_rows_end_when_its_tokenizer_has_taken_too_long(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = folders
    with_decoder(base, adapter, DECODERS["sound"])
    tokenizer = adapter_tokenizer(adapter, base, "")
    monkeypatch.setattr(tokenizer, "_seconds", 100.0)
    for ask in (lambda: tokenizer.decode([5]), lambda: tokenizer.bytes_of([5]), lambda: tokenizer.for_grammars):
        with pytest.raises(TokenizerError, match="has taken too long on other texts and is not tried again"):
            ask()


def test_grammars_leave_the_same_tokens_in_either_process(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    with_decoder(base, adapter, DECODERS["sound"])
    forms = {
        "object": SamplingParams(max_tokens=40, json_schema='{"type": "object", "properties": {"name": {"enum": '
        '["red apple", "green pear"]}}, "required": ["name"], "additionalProperties": false}'),
        "pattern": SamplingParams(max_tokens=40, regex="the (quick|lazy) (fox|dog) 7"),
        "choice": SamplingParams(max_tokens=40, choice=("the fox", "the dog", "7")),
    }  # fmt: skip
    plain = Path(shutil.copytree(adapter, tmp_path / "plain"))
    (plain / "tokenizer.json").unlink()
    found = served(base, {"own": adapter, "plain": plain}, forms)
    for form in forms:
        own, by_base = found[f"own: {form}"], found[f"plain: {form}"]
        assert (own.error, own.token_ids, own.text) == (None, by_base.token_ids, by_base.text)


def test_a_tokenizer_replaced_since_the_audit_costs_its_adapter_s_rows_alone(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    with_decoder(base, adapter, DECODERS["sound"])
    engine = peft_oracle.make_engine(base)
    (adapter_id,) = peft_oracle.register_all(engine, {"own": adapter}).values()
    (adapter / "tokenizer.json").write_text((adapter / "tokenizer.json").read_text() + " ")
    rows = [Request(name, (5, 6), i, SamplingParams(max_tokens=2)) for name, i in (("own", adapter_id), ("base", None))]
    found = peft_oracle.serve(engine, rows)
    assert found["base"].error is None
    assert "its tokenizer holds content" in (found["own"].error or "")


def test_grammars_know_a_vocabulary_in_an_older_form_and_its_added_tokens(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    raw = json.loads((base / "tokenizer.json").read_text())["model"]
    (adapter / "vocab.json").write_text(json.dumps(raw["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["merges"]]
    (adapter / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    ends = dict.fromkeys(("bos_token", "unk_token"), "<|endoftext|>") | {"eos_token": "<|im_end|>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "additional_special_tokens": ["<|im_start|>"], **ends}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    found = served(base, {"own": adapter}, {"a pattern": FORMS["a pattern"]})["own: a pattern"]
    assert found.error is None
    assert found.text in ("fox 7", "dog 7")
