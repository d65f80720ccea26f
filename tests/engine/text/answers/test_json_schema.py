"""Keywords, formats, keys and patterns of JSON Schemas: each is enforced whole, asks nothing, or is refused by name.
What a refusal advises is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_specifications
import pytest

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.grammar import Grammars, grammar_problem
from lorabatch.engine.text.answers.json_schema import FORMATS, KEYWORDS, NUMBER_FORMATS, enforceable
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizers

ROOT = Path(__file__).parents[4]
TEXT, INT = {"type": "string"}, {"type": "integer"}
END = 2
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.fixture(scope="module")
def tokenizers(weightless_model: Path) -> Tokenizers:
    return Tokenizers(weightless_model, lambda adapter_id: None, (END,))


def problem(schema: Any) -> str | None:
    return grammar_problem(SamplingParams(json_schema=json.dumps(schema)).constraint)


def accepts(tokenizers: Tokenizers, schema: Any, *texts: str) -> list[bool]:
    """Whether a row of this schema may have each text as its whole completion."""
    tokenizer, found = tokenizers.of(None), []
    for text, token_ids in zip(texts, tokenizer.encode_batch(list(texts), is_rendered=True), strict=True):
        grammars = Grammars(tokenizers)
        row = Sequence(Request(text, (1,), None, SamplingParams(json_schema=json.dumps(schema))))
        is_taken = True
        for token in token_ids:
            is_taken = is_taken and grammars.takes(row, token, tokenizer.vocab_size)
            row.token_ids.append(token)
        found.append(is_taken and (grammars.is_complete(row) or grammars.takes(row, END, tokenizer.vocab_size)))
    return found


@pytest.mark.reference("jsonschema-specifications")
def test_every_keyword_of_the_standard_is_classified(unclassified: Callable[[Iterable[str]], None]) -> None:
    validators = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator)
    words = {word for validator in validators for word in validator.VALIDATORS}
    registry = jsonschema_specifications.REGISTRY
    for address in registry:
        if "draft/2020-12/" in address or "draft-07" in address:
            words |= registry.contents(address)["properties"].keys()
    assert len(words) > 50
    unclassified(words - KEYWORDS.keys())


def keyword_table() -> str:
    """The table of docs/reference/json-schema.md."""
    lines = ["| keyword | |", "|---|---|"]
    saying = {"enforced": "enforced", "ignored": "asks nothing", "refused": "refused"}
    for (fate, why), pairs in groupby(KEYWORDS.items(), key=lambda pair: pair[1]):
        words = " ".join(f"`{word}`" for word, _ in pairs)
        lines.append(f"| {words} | {saying[fate]}{': ' * bool(why)}{why} |")
    formats = " ".join(f"`{name}`" for name in (*FORMATS, *NUMBER_FORMATS))
    lines.append(f"| `format` with {formats} | enforced; other formats are refused |")
    return "\n".join(lines)


def test_the_documented_list_of_keywords_is_the_one_that_is_served() -> None:
    assert keyword_table() in (ROOT / "docs" / "reference" / "json-schema.md").read_text("utf-8"), keyword_table()


#: Refused keyword -> a schema with it, and one that its refusal advises.
ADVICE: dict[str, tuple[Any, Any]] = {
    "not": ({"not": TEXT}, {"anyOf": [INT, {"type": "null"}]}),
    "if": ({"if": INT, "then": {"minimum": 3}}, {"anyOf": [{"type": "integer", "minimum": 3}, TEXT]}),
    "then": ({"then": INT}, {"anyOf": [INT, TEXT]}),
    "else": ({"else": INT}, {"anyOf": [INT, TEXT]}),
    "dependentRequired": (
        {"dependentRequired": {"a": ["b"]}},
        {"anyOf": [{"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a", "b"]}, {"type": "null"}]},
    ),
    "dependentSchemas": ({"dependentSchemas": {"a": INT}}, {"anyOf": [INT, TEXT]}),
    "dependencies": ({"dependencies": {"a": ["b"]}}, {"anyOf": [INT, TEXT]}),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, {"type": "array", "items": INT, "maxItems": 3}),
    "contains": ({"contains": INT}, {"type": "array", "prefixItems": [INT], "items": TEXT, "minItems": 1}),
    "minContains": ({"minContains": 1}, {"type": "array", "prefixItems": [INT], "items": TEXT, "minItems": 1}),
    "maxContains": ({"maxContains": 1}, {"type": "array", "prefixItems": [INT], "items": TEXT, "minItems": 1}),
    "propertyNames": (
        {"propertyNames": {"pattern": "^a"}},
        {"type": "object", "patternProperties": {"^a": True}, "additionalProperties": False},
    ),
    "unevaluatedProperties": (
        {"unevaluatedProperties": False},
        {"type": "object", "properties": {"a": INT}, "required": ["a"], "additionalProperties": False},
    ),
    "unevaluatedItems": ({"unevaluatedItems": False}, {"type": "array", "prefixItems": [INT], "items": False}),
    **{
        word: ({word: "#"}, {"$ref": "#/$defs/a", "$defs": {"a": INT}})
        for word in ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
    },
    "oneOf": (
        {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]},
        {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]},
    ),
    "oneOf, exclusive": (
        {"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]},
        {"oneOf": [{"type": "object", "properties": {"a": {"const": v}}, "required": ["a"]} for v in ("x", "y")]},
    ),
    "coerce_one_of": ({"oneOf": [INT], "x-guidance": {"coerce_one_of": True}}, {"anyOf": [INT, INT]}),
    "lenient": ({"x-guidance": {"lenient": True}}, {"x-guidance": {"whitespace_flexible": True}, **INT}),
    "item_separator": (
        {"x-guidance": {"item_separator": ";"}}, {"x-guidance": {"item_separator": ",", "key_separator": ": "}, **INT}
    ),
    "format": ({"type": "string", "format": "regex"}, {"type": "string", "pattern": "^[a-z]+$"}),
    "minProperties": (
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a", "b"], "minProperties": 2},
    ),
    "minProperties, maxProperties": (
        {"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1},
        {"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1, "required": ["a", "b"]},
    ),
    "nullable": ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    "min_length": ({"type": "string", "min_length": 3}, {"type": "string", "minLength": 3}),
    "const": ({"const": "\x01"}, {"const": "a"}),
    "draft 7": (
        {"$schema": DRAFT_7, "$ref": "#/definitions/a", "maximum": 3, "definitions": {"a": INT}},
        {"$schema": DRAFT_7, "definitions": {"a": INT}, "allOf": [{"$ref": "#/definitions/a"}, {"maximum": 3}]},
    ),
    "contentEncoding": (
        {"$schema": DRAFT_7, "definitions": {}, "contentEncoding": "base64"},
        {"type": "string", "contentEncoding": "base64"},
    ),
    "patternProperties": ({"patternProperties": {"a^b": INT}}, {"type": "object", "patternProperties": {"^ab$": INT}}),
}  # fmt: skip


def test_each_refused_keyword_has_its_advice_executed() -> None:
    assert {word for word, (fate, _) in KEYWORDS.items() if fate == "refused"} <= ADVICE.keys()


@pytest.mark.parametrize("word", ADVICE)
def test_what_is_refused_is_named_and_what_is_advised_is_accepted(word: str) -> None:
    refused, advised = ADVICE[word]
    found = problem({"type": "array", "items": refused} if "x-guidance" not in refused and "$defs" not in refused
                    and "definitions" not in refused else refused)  # fmt: skip
    assert found is not None
    assert word.partition(",")[0] in found
    assert found.endswith((".", "?"))
    assert problem(advised) is None


@pytest.mark.parametrize(
    "key", ["a", "ä", "😀", "\t", '"', "\\", "a b", "\x01", pytest.param("日本", marks=pytest.mark.long)]
)
def test_a_key_that_is_written_with_escapes_keeps_its_schema(key: str, tokenizers: Tokenizers) -> None:
    written = json.dumps(key, ensure_ascii=False)
    units = key.encode("utf-16-be").hex()
    escaped = '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'
    assert json.loads(escaped) == json.loads(written) == key
    for schema in (
        {"type": "object", "properties": {key: INT}},
        {"type": "object", "properties": {key: INT}, "additionalProperties": TEXT},
        {"type": "object", "required": [key], "properties": {key: INT}},
        {"allOf": [{"type": "object", "properties": {key: INT}}, {"type": "object"}]},
    ):
        texts = (f"{{{written}: 1}}", f'{{{written}: "x"}}', f'{{{escaped}: "x"}}', f'{{{written}: 1, {escaped}: "x"}}')
        assert accepts(tokenizers, schema, *texts) == [True, False, False, False]
    if key.isalpha():
        schema = {"type": "object", "patternProperties": {f"^{key}": INT}}
        assert accepts(tokenizers, schema, f"{{{written}: 1}}", f'{{{escaped}: "x"}}') == [True, False]


#: Format: texts of it, and texts that are none.
FORMAT_TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2020-02-29", "2000-02-29", "2021-12-31"], ["2021-02-29", "2100-02-29", "2021-04-31", "0000-01-01"]),
    "time": (["23:59:59Z", "08:30:06.283185-08:00"], ["22:59:60Z", "24:00:00Z", "08:30:06"]),
    "date-time": (["2020-02-29T23:59:59.5+05:30"], ["1998-12-31T22:59:60Z", "2021-02-29T00:00:00Z", "2021-02-28"]),
    "hostname": (
        ["a", "example.com", "a--b.c", ".".join(["a" * 63] * 3), "1.2"],
        [".".join(["a" * 63] * 5), "xn--X.com", "ab--c", "a" * 64, "-a", "a-", "a..b", ""],
    ),
    "email": (["joe@example.com", "te.st@a"], ["a@" + ".".join(["b" * 63] * 5), "a" * 65 + "@b", ".a@b", "a"]),
    "duration": (["P4DT12H30M5S", "P2W"], ["P", "PT", "P1Y2W", "4D"]),
    "ipv4": (["192.168.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::1", "fe80::1:2"], ["12345::", "1::2::3", "1:2:3:4:5:6:7:8:9"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08"]),
    "uri": (["http://a.b/c?d#e", "urn:a:b"], ["//a.b", "a b:c", "abc"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_enforced_whole(name: str, tokenizers: Tokenizers) -> None:
    good, bad = FORMAT_TEXTS[name]
    texts = [json.dumps(text) for text in good + bad]
    for schema in ({"type": "string", "format": name}, {"type": ["string", "null"], "format": name, "minLength": 0}):
        assert accepts(tokenizers, schema, *texts) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int32", 2**31 - 1), ("uint16", 65535)])
def test_formats_of_numbers_are_bounds(name: str, most: int, tokenizers: Tokenizers) -> None:
    assert accepts(tokenizers, {"type": "integer", "format": name}, str(most), str(most + 1)) == [True, False]


def test_parts_that_references_name_are_read_too(tokenizers: Tokenizers) -> None:
    date = {"type": "string", "format": "date"}
    for schema in (
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": date}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": date, "unused": {"not": True}}},
        {"$ref": "#d", "$defs": {"a": {"$anchor": "d", **date}}},
        {"$ref": "#d", "items": {"$defs": {"a": {"$anchor": "d", **date}}}},
        {"$schema": DRAFT_7, "$ref": "#d", "definitions": {"a": {"definitions": {"b": {"$id": "#d", **date}}}}},
        {"$id": "http://e/r", "$ref": "http://e/r#/x/y", "x": {"y": date}},
        {"$id": "http://e/r", "$ref": "r#/$defs/a/$defs/b", "$defs": {"a": {"$defs": {"b": date}}}},
        # a path begins at the schema that has an address
        {"$ref": "b", "$defs": {"y": INT, "x": {"$id": "b", "$ref": "#/$defs/y", "$defs": {"y": date}}}},
        {"$ref": "#/items", "items": {"$id": "b", "$ref": "#/$defs/y", "$defs": {"y": date}}, "$defs": {"y": INT}},
    ):
        assert accepts(tokenizers, schema, '"2021-02-28"', '"2021-02-29"') == [True, False]


#: Pattern -> texts that it matches by ECMA-262, and texts that it does not.
PATTERNS: dict[str, tuple[str, str]] = {
    r"^\s$": (" \t\n\xa0\u2028\u3000\ufeff", "a\x85\u200b\u180e"),
    r"^\S$": ("a\x85\u200b\U0001f600", " \n\xa0\ufeff"),
    r"^[^\s]$": ("a\x85", "\ufeff\u2029"),
    r"^[\S\n]$": ("a\n", "\ufeff\t"),
    r"^.$": ("a\x85\ufeff\U0001f600", "\n\r\u2028\u2029"),
    r"^[.]$": (".", "a"),
    r"^[\d_-]$": ("1_-", "a\u0e51"),
    r"^[\w-.]$": ("a1-.", "é"),
    r"^[+--]$": ("+,-", "."),
    r"^[a&&b~~c]$": ("ab&~c", "d"),
    r"^[^[\]]$": ("a", "[]"),
    r"^\u{1F600}$": ("\U0001f600", "u"),
    r"^{$": ("{", "a"),
    r"^(?i:k)$": ("kK", "a"),
    r"^\cJ$": ("\n", "J"),
    r"^[\b]$": ("\b", "b"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_read_as_ecma_262_has_it(pattern: str, tokenizers: Tokenizers) -> None:
    good, bad = ([json.dumps(sign, ensure_ascii=False) for sign in signs] for signs in PATTERNS[pattern])
    schema = {"type": "string", "pattern": pattern}
    assert accepts(tokenizers, schema, *good, *bad) == [True] * len(good) + [False] * len(bad)
    named = {"type": "object", "patternProperties": {pattern: INT}, "additionalProperties": False}
    assert accepts(tokenizers, named, f"{{{good[0]}: 1}}", f"{{{bad[0]}: 1}}") == [True, False]


def test_escapes_of_a_pattern_stand_for_their_characters(tokenizers: Tokenizers) -> None:
    schema = {"type": "string", "pattern": r"^\<\/\-\u00e9\ud83d\ude00\x41\$$"}
    assert accepts(tokenizers, schema, '"</-é😀A$"', '"</-é😀A"') == [True, False]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("[]a]", "[] and [^]"),
        ("[^]", "[] and [^]"),
        ("[[:alpha:]]", "[:alpha:] is not of ECMA-262"),
        ("(?s)a.b", "flags other than i, here s"),
        ("(?x: a b)", "flags other than i, here x"),
        ("a++", "a repeat of a repeat, ++"),
        ("a{2}{3}", "a repeat of a repeat"),
        ("a{,3}", "write {0,2} for {,2}"),
        (r"\ha", r"\h is no escape"),
        (r"\Qa.b\E", r"\Q is no escape"),
        ("[a", "unclosed character class"),
        ("a\\", "escapes nothing"),
        ("[b-a]", "start must be <= the end"),
        ("^a$b", "Write them at its beginning and its end only"),
    ],
)
def test_what_other_syntaxes_of_patterns_mean_is_refused_by_name(pattern: str, said: str) -> None:
    for word, schema in (("pattern", pattern), ("patternProperties", {pattern: INT})):
        found = problem({"properties": {"q": {word: schema}}}) or ""
        assert found.startswith(f"json_schema.properties.q.{word}={pattern!r}: ")
        assert said in found
        assert found.endswith(".")


def test_a_keyword_that_was_taken_out_on_purpose_asks_nothing() -> None:
    assert problem({"type": "string", "_format": "regex", "x-pattern": "(", "__minLength": 3}) is None
    assert "did you mean minLength" in (problem({"type": "string", "min_length": 3}) or "")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("regex", "(?=a)b", "regex='(?=a)b': look-around"),
        ("regex", r"(a)\1", r"regex='(a)\\1': backreferences are not supported"),
        ("regex", r"a\bc", r"regex='a\\bc': \b and \B are not supported"),
        ("json_schema", '{"properties": {"q": {"pattern": "a^b"}}}', "json_schema.properties.q.pattern='a^b': ^ and $"),
        ("json_schema", '{"pattern": "(("}', "json_schema.pattern='((': unclosed group"),
        ("json_schema", '{"patternProperties": {"(?!a)": true}}', "json_schema.patternProperties='(?!a)': look-around"),
        ("json_schema", '{"type": "string", "type": "null"}', "key 'type' is given twice"),
        ("grammar", 'start: %json {"type": "object"}', "Give the schema as json_schema"),
    ],
)
def test_a_message_cites_the_user_s_words(option: str, value: str, named: str) -> None:
    found = grammar_problem(SamplingParams(**{option: value}).constraint)
    assert found is not None
    assert named in found
    assert " at 1(" not in found


def test_annotations_and_whole_numbers_are_read_as_the_standard_has_them() -> None:
    schema = {"type": "array", "deprecated": True, "uniqueItems": False, "maxItems": 2.0, "x-own": {"not": 1}}
    assert enforceable(json.dumps(schema))[0] == {"type": "array", "maxItems": 2, "x-own": {"not": 1}}
    assert problem(schema) is None


def test_a_schema_that_nests_deeply_is_refused_by_its_depth() -> None:
    schema: Any = INT
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    assert "nests deeper than 100 levels" in (problem(schema) or "")
