"""The column `answer`: a JSON Schema's instances as Arrow values, read back as they were written."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.input.answer_type import answer_type

TEXT, INT, FLOAT = pa.string(), pa.int64(), pa.float64()
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
POINT_TYPE = pa.struct([("x", FLOAT), ("y", FLOAT)])
NAMED = {"type": "object", "properties": {"n": {"type": "string"}}}
WHOLE = {"n": "a", "x": 1.0, "y": 2.5}
ALL_TYPE = pa.struct([("n", TEXT), ("x", FLOAT), ("y", FLOAT)])


@pytest.mark.parametrize(
    ("schema", "arrow", "instance", "value"),
    [
        (POINT, POINT_TYPE, {"x": 1, "y": 2.5}, {"x": 1.0, "y": 2.5}),
        (POINT, POINT_TYPE, {"x": 1, "other": True}, {"x": 1.0, "y": None}),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(INT), [1, 2], [1, 2]),
        ({"enum": ["a", "b"]}, TEXT, "a", "a"),
        ({"enum": ["a", None]}, TEXT, None, None),
        ({"enum": [1, 2.5]}, FLOAT, 1, 1.0),
        ({"enum": [1, "a"]}, TEXT, "a", '"a"'),
        ({"const": True}, pa.bool_(), True, True),
        ({"const": {"a": 1}}, TEXT, {"a": 1}, '{"a": 1}'),
        ({"type": ["string", "null"]}, TEXT, None, None),
        ({"type": ["string", "integer"]}, TEXT, 5, "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, INT, 5, 5),
        ({"anyOf": [POINT, {"type": "null"}]}, POINT_TYPE, {"x": 1, "y": 2}, {"x": 1.0, "y": 2.0}),
        ({"anyOf": [POINT, POINT]}, TEXT, {"x": 1}, '{"x": 1}'),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, TEXT, "b", "b"),
        # keywords beside one another add up
        ({"$defs": {"p": POINT}, "$ref": "#/$defs/p", **NAMED}, ALL_TYPE, WHOLE, WHOLE),
        ({**NAMED, "allOf": [POINT]}, ALL_TYPE, WHOLE, WHOLE),
        ({**NAMED, "anyOf": [POINT]}, ALL_TYPE, WHOLE, WHOLE),
        ({**NAMED, "oneOf": [POINT]}, ALL_TYPE, WHOLE, WHOLE),
        ({"allOf": [NAMED, {"allOf": [POINT]}]}, ALL_TYPE, WHOLE, WHOLE),
        ({"type": "array", "items": {"$ref": "#/$defs/p", **NAMED}, "$defs": {"p": POINT}},
         pa.list_(pa.struct([("x", FLOAT), ("y", FLOAT), ("n", TEXT)])), [WHOLE], [WHOLE]),
        ({**NAMED, "anyOf": [POINT, {"type": "object", "properties": {"z": {}}}]}, TEXT, WHOLE, json.dumps(WHOLE)),
        ({**NAMED, "anyOf": [{"required": ["n"]}, {"required": ["n"], "minProperties": 1}]},
         pa.struct([("n", TEXT)]), {"n": "a"}, {"n": "a"}),
        ({**NAMED, "required": ["n", "k"]}, pa.struct([("n", TEXT), ("k", TEXT)]), {"n": "a", "k": [1]},
         {"n": "a", "k": "[1]"}),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, TEXT, {"n": "a", "k": 1}, '{"n": "a", "k": 1}'),
        ({**NAMED, "patternProperties": {"^k": {}}}, TEXT, {"n": "a", "k": 1}, '{"n": "a", "k": 1}'),
        ({"type": "object", "properties": {"x": {"type": "number"}}, "allOf": [{"properties": {"x": {"type": "integer"},
          "y": {}}}]}, pa.struct([("x", INT), ("y", TEXT)]), {"x": 1, "y": 2}, {"x": 1, "y": "2"}),
        ({"properties": {"x": {"type": "number"}}}, TEXT, 5, "5"),
        ({"type": "string", "anyOf": [{"minLength": 3}, {"pattern": "^a"}]}, TEXT, "abc", "abc"),
        ({"type": "array", "items": [{"type": "integer"}]}, TEXT, [1], "[1]"),
        ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, POINT_TYPE, {"x": 1, "y": 2}, {"x": 1.0, "y": 2.0}),
        ({"$ref": "http://elsewhere"}, TEXT, {"x": 1}, '{"x": 1}'),
        ({"type": "object"}, TEXT, {"x": [1]}, '{"x": [1]}'),
        ({}, TEXT, "a", '"a"'),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "integer"}}, TEXT, [1], "[1]"),
    ],
)  # fmt: skip
def test_types_and_values(schema: Any, arrow: pa.DataType, instance: Any, value: Any) -> None:
    found = answer_type(json.dumps(schema))
    if pa.types.is_struct(arrow):
        assert {field.name: field.type for field in found.arrow} == {field.name: field.type for field in arrow}
    else:
        assert found.arrow == arrow
    assert found.column([json.dumps(instance)]).to_pylist() == [value]


def test_what_is_no_instance_is_null() -> None:
    found = answer_type(json.dumps(POINT))
    assert found.column([None, "", "{", "[]", '"x"', '{"x": "a"}', '{"x": 1}']).to_pylist() == [
        *[None] * 6, {"x": 1.0, "y": None}
    ]  # fmt: skip


def test_integers_beyond_64_bits_are_null() -> None:
    found = answer_type('{"type": "integer"}')
    assert found.column([str(2**63 - 1), str(2**63), "-" + "9" * 5000]).to_pylist() == [2**63 - 1, None, None]


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": ["number", "string"]}, True])
def test_numbers_beyond_floats_are_null_and_never_infinite(schema: Any) -> None:
    texts = answer_type(json.dumps(schema)).column(["1e400", "-5E3549", "1e308"]).to_pylist()
    assert texts[:2] == [None, None]
    assert float(texts[2]) == 1e308


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "b", "$defs": {"y": {"type": "integer"}, "x": {"$id": "b", "$ref": "#/$defs/y"}}},
        {"$ref": "#d", "$defs": {"x": {"$anchor": "d", "type": "string"}}},
        {"properties": {"q": {"$ref": "#d"}, "x": {"$anchor": "d", "type": "integer"}}, "$ref": "#d"},
    ],
)
def test_what_references_name_by_an_address_is_text(schema: Any) -> None:
    assert answer_type(json.dumps(schema)).arrow == TEXT


def test_recursive_schemas_end_in_text() -> None:
    schema = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}}}}
    assert answer_type(json.dumps(schema)).column(['{"c": {"c": null}}']).null_count == 0


def referring(*names: str, **beside: Any) -> dict[str, Any]:
    """A schema whose properties are itself."""
    part = {"type": "object", "properties": {name: {"$ref": "#/$defs/t"} for name in names}, **beside}
    return {"$ref": "#/$defs/t", "$defs": {"t": part}}


def doubling(depth: int) -> dict[str, Any]:
    """A schema without recursion that stands for 2**depth parts."""
    parts = {
        f"p{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/p{i + 1}"} for k in "ab"}}
        for i in range(depth)
    }
    return {"$ref": "#/$defs/p0", "$defs": parts | {f"p{depth}": {"type": "integer"}}}


def each_other(count: int) -> dict[str, Any]:
    """Schemas that each refer to all others: every order of them is a path."""
    names = [f"t{i}" for i in range(count)]
    part = {"type": "object", "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names}}
    return {"$ref": "#/$defs/t0", "$defs": dict.fromkeys(names, part)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        (referring("a", "b", "c"), {"a": {"a": {}}}),
        (referring(*"abcdefghijklmnopqrst"), {"a": {"a": {}}}),
        (referring("a", "b", additionalProperties={"$ref": "#"}), {"a": {}, "k": {}}),
        (doubling(40), {"a": {}}),
        (each_other(9), {"t1": {"t2": {}}}),
        ({"allOf": [{"$ref": "#"}], "type": "object", "properties": {"a": {"$ref": "#"}}}, {"a": {}}),
        ({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, [[None]]),
        ({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(6000)}}, {"k5": 1}),
        ({"type": "string", "title": "a" * 300_000}, "a"),
    ],
    ids=["3 times", "20 times", "by other keys", "2**40 parts", "each other", "allOf", "items", "6,000 keys", "long"],
)
def test_any_schema_has_a_type_of_bounded_size(schema: Any, instance: Any) -> None:
    found = answer_type(json.dumps(schema))
    assert len(str(found.arrow)) < 20_000
    [value] = found.column([json.dumps(instance)]).to_pylist()

    def plain(value: Any) -> Any:
        """What a value says, with the JSON in it read."""
        if isinstance(value, str) and value != "a":
            return plain(json.loads(value))
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items() if part is not None}
        return [plain(part) for part in value] if isinstance(value, list) else value

    assert plain(value) == instance


_SCHEMAS = st.recursive(
    st.sampled_from(
        [{"type": name} for name in ("string", "integer", "number", "boolean", "null")]
        + [{"enum": ["a", "b"]}, {"const": 3}, {}, True, {"type": ["boolean", "null"]}]
    ),
    lambda part: (
        part.map(lambda s: {"type": "array", "items": s})
        | st.dictionaries(st.text(max_size=3), part, max_size=4).map(lambda p: {"type": "object", "properties": p})
        | st.lists(part, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=8,
)


def instances(schema: Any) -> st.SearchStrategy[Any]:
    """Instances with all properties and no others."""
    if schema is True or not schema:
        return st.none() | st.integers(-9, 9) | st.text(max_size=3)
    if "anyOf" in schema:
        return st.one_of([instances(part) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return st.lists(instances(schema["items"]), max_size=3)
    if schema["type"] == "object":
        return st.fixed_dictionaries({key: instances(part) for key, part in schema.get("properties", {}).items()})
    return {
        "string": st.text(max_size=4), "integer": st.integers(-(2**63), 2**63 - 1), "boolean": st.booleans(),
        "number": st.floats(allow_nan=False, allow_infinity=False), "null": st.none(),
    }.get(schema["type"] if isinstance(schema["type"], str) else "", st.none() | st.booleans())  # fmt: skip


@given(data=st.data(), schema=_SCHEMAS)
def test_every_instance_has_a_value_that_says_the_same(data: st.DataObject, schema: Any) -> None:
    instance = data.draw(instances(schema))
    jsonschema.validate(instance, schema)
    found = answer_type(json.dumps(schema))
    [value] = found.column([json.dumps(instance)]).to_pylist()

    def agrees(instance: Any, value: Any, arrow: pa.DataType) -> bool:
        if pa.types.is_struct(arrow) and isinstance(instance, dict):
            # a field that this form of the answer lacks is null
            return all(agrees(instance.get(field.name), value[field.name], field.type) for field in arrow)
        if pa.types.is_list(arrow) and isinstance(instance, list):
            return all(agrees(a, b, arrow.value_type) for a, b in zip(instance, value, strict=True))
        return value == instance or (pa.types.is_string(arrow) and json.loads(value) == instance)

    assert agrees(instance, value, found.arrow)
