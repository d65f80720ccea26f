"""Keywords of JSON Schema: each is enforced, or its schema is refused; none is passed over."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from peft_oracle import make_engine, prompts, serve

from lorabatch.benchmarks.engine.constraints import Constraints, problem_with
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.grammar import grammar_problem
from lorabatch.engine.text.answers.token_rules import TokenRules
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizers

INT, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INT, "b": INT}}
#: Keyword: a schema with it, an instance, and what is none because of it.
KEYWORDS: dict[str, tuple[Any, Any, Any]] = {
    "type": (INT, 5, "5"),
    "type, several": ({"type": ["integer", "null"]}, None, "x"),
    "enum": ({"enum": ["a", 1]}, 1, 2),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "minLength": ({"type": "string", "minLength": 3}, "abc", "ab"),
    "maxLength": ({"type": "string", "maxLength": 2}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, "abc", "abd"),
    "pattern, unanchored": ({"type": "string", "pattern": "b"}, "abc", "acc"),
    "format": ({"type": "string", "format": "date"}, "2026-01-31", "yesterday"),
    "minimum": ({"type": "integer", "minimum": 3}, 3, 2),
    "maximum": ({"type": "integer", "maximum": 3}, 3, 4),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, 2, 3),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 14, 15),
    "items": ({"type": "array", "items": INT}, [1, 2], [1, "2"]),
    "prefixItems": ({"type": "array", "prefixItems": [INT, TEXT]}, [1, "a"], ["a", 1]),
    "items: false": ({"type": "array", "prefixItems": [INT], "items": False}, [1], [1, 2]),
    "minItems": ({"type": "array", "items": INT, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "items": INT, "maxItems": 1}, [1], [1, 2]),
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, [1, 2], [1, 1]),
    "contains": ({"type": "array", "contains": INT}, ["a", 1], ["a"]),
    "minContains": ({"type": "array", "contains": INT, "minContains": 2}, [1, 2], [1]),
    "properties": (AB, {"a": 1}, {"a": "x"}),
    "required": (AB | {"required": ["a", "b"]}, {"a": 1, "b": 2}, {"a": 1}),
    "additionalProperties": (AB | {"additionalProperties": False}, {"a": 1}, {"a": 1, "c": 1}),
    "additionalProperties, a schema": (AB | {"additionalProperties": TEXT}, {"a": 1, "c": "x"}, {"a": 1, "c": 1}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": INT}, "additionalProperties": False}, {"n1": 1}, {"n1": "x"}
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"a": 1}, {"b": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "minProperties, of keys that may repeat": ({"type": "object", "minProperties": 2}, {"a": 1, "b": 1}, {"a": 1}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "dependentRequired": (AB | {"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": (AB | {"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1, "b": 1}, {"a": 1}),
    "anyOf": ({"anyOf": [INT, {"const": "x"}]}, "x", "y"),
    "oneOf": ({"oneOf": [INT, {"const": "x"}]}, "x", "y"),
    "oneOf, overlapping": ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, 7, 3),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}, 3, 7),
    "not": ({"type": "string", "not": {"const": "x"}}, "y", "x"),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, 3, 2),
    "$ref": ({"$ref": "#/$defs/i", "$defs": {"i": INT}}, 3, "3"),
    "$ref, recursive": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}},
                                              "additionalProperties": False}}}, {"t": {"t": {}}}, {"t": {"t": 1}},
    ),
    "unevaluatedProperties": (AB | {"unevaluatedProperties": False}, {"a": 1}, {"c": 1}),
    "unevaluatedItems": ({"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, [1], [1, 2]),
}  # fmt: skip
REFUSED = {
    "uniqueItems", "contains", "minContains", "propertyNames", "dependentRequired",
    "dependentSchemas", "minProperties, of keys that may repeat", "oneOf, overlapping", "not", "if",
    "unevaluatedProperties", "unevaluatedItems",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(weightless_model: Path) -> Tokenizers:
    return Tokenizers(weightless_model, lambda adapter_id: None, (2,))


def accepts(tokenizers: Tokenizers, schema: Any, instance: Any) -> bool:
    """Whether a row of this schema may have the instance as its whole completion."""
    rules, tokenizer = TokenRules(tokenizers), tokenizers.of(None)
    [token_ids] = tokenizer.encode_batch([json.dumps(instance)], is_rendered=True)
    row = Sequence(Request("row", (1,), None, SamplingParams(json_schema=json.dumps(schema))))
    for token in [*token_ids, None]:
        if token is None and rules.is_complete(row):
            return True
        logits = torch.zeros(1, tokenizer.vocab_size)
        rules.apply_(logits, [row])
        if not logits[0, 2 if token is None else token].isfinite():
            return False
        row.token_ids.append(token or 0)
    return True


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_enforced_or_refused(keyword: str, tokenizers: Tokenizers) -> None:
    schema, good, bad = KEYWORDS[keyword]
    jsonschema.validate(good, schema)
    assert not jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).is_valid(bad)
    problem = grammar_problem(SamplingParams(json_schema=json.dumps(schema)).constraint)
    assert (problem is not None) == (keyword in REFUSED), problem
    if problem is None:
        assert accepts(tokenizers, schema, good)
        assert not accepts(tokenizers, schema, bad)


@pytest.mark.parametrize(
    "num_rows", [pytest.param(200, id="200 rows"), pytest.param(10_000, id="10,000 rows", marks=pytest.mark.long)]
)
@pytest.mark.timeout(1200)
def test_every_row_that_ends_is_what_its_schema_or_expression_says(num_rows: int, tiny_llama: Path) -> None:
    constraints = Constraints.random()
    engine = make_engine(tiny_llama, max_batch_rows=64, max_step_tokens=512, pool_bytes=64 << 20)
    assert all(grammar_problem(SamplingParams(**o).constraint) is None for o in constraints.options)
    rows = [
        Request(str(i), prompt, None, SamplingParams(max_tokens=80, temperature=1.0, **constraints.of_row(i)), i)
        for i, prompt in enumerate(prompts(num_rows, 300))
    ]
    found = serve(engine, rows)
    assert len(found) == num_rows
    num_ended: Counter[str] = Counter()
    for name, result in found.items():
        assert result.error is None
        if result.finish_reason == "stop":
            option = constraints.of_row(int(name))
            assert problem_with(result.text, option) is None
            num_ended[next(iter(option))] += 1
    assert num_ended["json_schema"] > num_rows * 0.4 * 0.5
    assert num_ended["regex"] > num_rows * 0.6 * 0.9
    assert engine.rules.num_compiled_grammars == len({row.sampling.constraint for row in rows})
