"""Completions that follow grammars: every one that ends is what its grammar says, wherever it was computed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from peft_oracle import make_engine, prompts, register_all, serve

from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.grammar import Grammars, grammar_problem
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizers

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "yesterday", 'a "quoted" one')
#: Sampling options, and whether a text is what they ask for.
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": json.dumps(PERSON)},
    "regex": {"regex": r"[a-c]{2,5}(-[0-9]+)?"},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": 'start: "(" start ")" | "x"'},
}


def follows(kind: str, text: str) -> bool:
    if kind == "schema":
        return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))
    if kind == "regex":
        return re.fullmatch(KINDS["regex"]["regex"], text) is not None
    return text in CHOICES if kind == "choice" else re.fullmatch(r"\(*x\)*", text) is not None


def rows_for(count: int, adapter_ids: list[str | None], **sampling: Any) -> list[Request]:
    """Rows of every kind in turn, and some without a grammar."""
    kinds: list[dict[str, Any]] = [*KINDS.values(), {}]
    return [
        Request(f"{list(KINDS)[i % 5] if i % 5 < 4 else 'free'}-{i}", prompt, adapter_ids[i % len(adapter_ids)],
                SamplingParams(**({"max_tokens": 40, "temperature": 1.5} | kinds[i % 5] | sampling)), i)
        for i, prompt in enumerate(prompts(count, 300))
    ]  # fmt: skip


def answers(engine: Engine, rows: list[Request]) -> dict[str, tuple[str, str]]:
    return {name: (result.text, result.finish_reason) for name, result in serve(engine, rows).items()}


def check(results: dict[str, Result]) -> int:
    """How many rows with a grammar came to its end; each of them follows it."""
    ended = 0
    for name, result in results.items():
        kind = name.partition("-")[0]
        assert result.error is None
        if kind != "free" and result.finish_reason == "stop":
            assert follows(kind, result.text), f"{name}: {result.text!r}"
            ended += 1
    return ended


@pytest.mark.parametrize("mode", ["unmerged", "exact"])
def test_what_ends_follows_its_grammar(mode: Any, tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = make_engine(tiny_llama, mode)
    ids = [None, *register_all(engine, tiny_adapters).values()]
    assert check(serve(engine, rows_for(40, ids))) >= 20


def test_a_row_that_moves_goes_on_as_if_it_had_stayed(tiny_llama: Path) -> None:
    rows = rows_for(20, [None])
    stayed = answers(make_engine(tiny_llama, "exact"), rows)
    one, other = make_engine(tiny_llama, "exact"), make_engine(tiny_llama, "exact")
    one.add(rows)
    found = {}
    for _ in range(9):
        found |= {result.request_id: (result.text, result.finish_reason) for result in one.step()}
    other.import_rows(one.export_rows([row.request_id for row in rows]))
    while other.num_unfinished:
        found |= {result.request_id: (result.text, result.finish_reason) for result in other.step()}
    assert found == stayed


def test_equal_grammars_are_compiled_once(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    serve(engine, rows_for(40, [None], max_tokens=5))
    assert engine.rules.num_compiled_grammars == len(KINDS.keys() - {"choice"}), "texts need no grammar"


def test_a_grammar_s_end_goes_before_min_tokens(tiny_llama: Path) -> None:
    [result] = serve(make_engine(tiny_llama), [
        Request("row", (3, 4), None, SamplingParams(max_tokens=30, min_tokens=25, choice=("no",)))
    ]).values()  # fmt: skip
    assert (result.text, result.finish_reason, result.error) == ("no", "stop", None)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("regex", "((", "unclosed group"),
        ("grammar", "start: other", "unknown name"),
        ("json_schema", "[1]", "not JSON of an object (it holds list, expected an object)"),
        ("json_schema", "{", "json_schema"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"$ref": "http://elsewhere/schema"}', "retriev"),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "json_schema"),
        ("choice", ("x" * 300_000,), "300016 characters"),
        (
            "grammar",
            "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(9000)) + 'r9000: "x"',
            "crash",
        ),
    ],
)
def test_what_cannot_be_enforced_is_named(option: str, value: Any, named: str) -> None:
    problem = grammar_problem(SamplingParams(**{option: value}).constraint)
    assert problem is not None
    assert named in problem
    assert len(problem) < 2000


def test_a_token_that_is_refused_leaves_its_grammar_as_it_was(tiny_llama: Path) -> None:
    """Tokens are tried instead of looked at: masks before and after are those of a row that was never tried."""
    tokenizers = Tokenizers(tiny_llama, lambda _: None, (2,))
    tried, other = Grammars(tokenizers), Grammars(tokenizers)
    rng = random.Random(0)
    for number, options in enumerate(KINDS.values()):
        row = Sequence(Request(f"row-{number}", (3, 4), None, SamplingParams(max_tokens=40, **options)))
        for _ in range(12):
            masks = [grammars.allowed([row], 320)[0] for grammars in (tried, other)]
            assert (masks[0] == masks[1]).all()
            allowed = [token for token in range(320) if masks[0][token // 32] >> token % 32 & 1]
            for token in rng.sample(range(320), 20):
                if token not in allowed:
                    assert not tried.takes(row, token, 320)
            assert (tried.allowed([row], 320)[0] == masks[1]).all()
            token = rng.choice(allowed)
            assert tried.takes(row, token, 320)
            row.token_ids.append(token)
            if token == 2 or other.is_complete(row):
                break
