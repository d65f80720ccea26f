"""Reads JSON Schemas for llguidance: every keyword is enforced, known to ask nothing, or refused by name.

`KEYWORDS` and `FORMATS` are the whole list; `enforceable` refuses what they do not have, and writes what llguidance
enforces in part (formats) or refuses needlessly (annotations) in words that it enforces whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal
from urllib.parse import unquote, urljoin

from ....system.untrusted import parse_object, shown, shown_name
from ...errors import EngineError
from .ecma_pattern import rust_pattern

#: Treatment of a keyword.
Fate = Literal["enforced", "ignored", "refused"]
_ENFORCED: tuple[Fate, str] = ("enforced", "")
_ANNOTATION: tuple[Fate, str] = ("ignored", "describes the schema, by the standard")
_CONTENT: tuple[Fate, str] = ("ignored", "an annotation by draft 2020-12; no validator checks it by default")
_NAME: tuple[Fate, str] = ("ignored", "names a place that references name")


def _refused(next_step: str) -> tuple[Fate, str]:
    return "refused", next_step


_EACH = "Write the schema of each case as a part of anyOf."
_NAMED_KEYS = "Name the keys in properties and required, with additionalProperties: false."
_STATIC = "Write $ref."
#: Keyword of draft 2020-12, 2019-09, 7 or 4 -> its treatment, and why or what to write instead.
KEYWORDS: Mapping[str, tuple[Fate, str]] = {
    **dict.fromkeys(
        (
            "type", "enum", "const", "format", "pattern", "minLength", "maxLength",
            "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
            "items", "prefixItems", "additionalItems", "minItems", "maxItems",
            "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
            "$ref", "allOf", "anyOf", "oneOf",
        ),
        _ENFORCED,
    ),
    **dict.fromkeys(
        ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"), _ANNOTATION
    ),
    **dict.fromkeys(("contentEncoding", "contentMediaType", "contentSchema"), _CONTENT),
    **dict.fromkeys(("$id", "id", "$anchor", "$defs", "definitions"), _NAME),
    "$schema": ("ignored", "says the draft: in draft 7 and older, keywords beside $ref are refused"),
    "$vocabulary": ("ignored", "is of schemas of schemas"),
    **dict.fromkeys(("not", "if", "then", "else"), _refused(_EACH)),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _refused(_EACH)),
    "uniqueItems": _refused("Bound the list with maxItems, or leave uniqueItems out and check the answers."),
    **dict.fromkeys(
        ("contains", "minContains", "maxContains"), _refused("Say it with prefixItems, items and minItems.")
    ),
    "propertyNames": _refused("Write patternProperties with additionalProperties: false."),
    "unevaluatedProperties": _refused(_NAMED_KEYS),
    "unevaluatedItems": _refused("Write items: false beside prefixItems."),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"), _refused(_STATIC)),
}  # fmt: skip
_DROPPED = {word for word, (fate, why) in KEYWORDS.items() if fate == "ignored" and why != _NAME[1]} - {"$schema"}
_SPELLINGS = {word.lower(): word for word, (fate, _) in KEYWORDS.items() if fate != "ignored"}

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_END, _MIDDLE = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
# RFC 5890: hyphens as third and fourth character are kept for encoded labels, whose content no pattern can check.
_LABEL = (
    rf"{_END}(?:{_END}|{_MIDDLE}{_END}|{_MIDDLE}{{2}}{_END}|"
    rf"{_MIDDLE}(?:{_END}{_MIDDLE}|-{_END}){_MIDDLE}{{0,58}}{_END})?"
)
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
#: Format of texts -> the constraints that enforce it whole.
FORMATS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    # RFC 3339. A leap second is no time that Python, Arrow or DuckDB reads.
    "date": ({"pattern": f"^{_DATE}$"},),
    "time": ({"pattern": f"^{_TIME}$"},),
    "date-time": ({"pattern": f"^{_DATE}[tT]{_TIME}$"},),
    # RFC 1123 and 1035: labels of 63 characters, 253 in all.
    "hostname": ({"pattern": f"^{_HOST}$"}, {"maxLength": 253}),
    # RFC 5321: 64 characters before the @, 254 in all.
    "email": ({"format": "email"}, {"pattern": "^[^@]{1,64}@"}, {"maxLength": 254}),
    **{name: ({"format": name},) for name in ("duration", "ipv4", "ipv6", "uuid", "uri")},
}
#: Format of numbers -> their bounds.
NUMBER_FORMATS: Mapping[str, Mapping[str, int]] = {
    **{f"int{n}": {"minimum": -(2 ** (n - 1)), "maximum": 2 ** (n - 1) - 1} for n in (8, 16, 32)},
    **{f"uint{n}": {"minimum": 0, "maximum": 2**n - 1} for n in (8, 16, 32)},
    # integers of 64 bits are all that llguidance writes
    **{name: {} for name in ("int64", "float", "double")},
}
#: Keys of `x-guidance`: how the JSON is written.
GUIDANCE = ("whitespace_flexible", "item_separator", "key_separator")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that hold schemas: one, a list, a mapping.
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_MOST_NESTED = 100
# Characters that are not written, as they stand in JSON of ASCII.
_UNWRITABLE = re.compile(r"\\u00[01][0-9a-f]|\x7f")
# Drafts in which $ref stands alone.
_OLDER_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")


def enforceable(text: str) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str, str]]]:
    """The schema in a JSON text, with keywords that llguidance enforces whole; how its JSON is written, as the schema
    has it; and the place of each regular expression, as it is written there, and in Rust's syntax. Raises
    `EngineError` for a keyword that cannot be enforced whole, ValueError for what is no JSON object.
    """
    schema = parse_object(text)
    form = _form(schema.pop("x-guidance", {}))
    reader = _SchemaReader(schema)
    reader.read(schema, "json_schema", 0)
    return schema, form, reader.patterns


def _form(given: Any) -> dict[str, Any]:
    place = "json_schema.x-guidance"
    if not isinstance(given, Mapping):
        raise EngineError(f"{place}={shown(given)}: expected an object of {', '.join(GUIDANCE)}.")
    for key, value in given.items():
        if key == "coerce_one_of":
            raise EngineError(f"{place}.{key}: not supported. Write anyOf where several parts of oneOf may hold.")
        if key not in GUIDANCE:
            raise EngineError(f"{place}.{shown_name(key)}: not supported. Known are {', '.join(GUIDANCE)}.")
        sign = {"item_separator": ",", "key_separator": ":"}.get(key)
        if sign is None and not isinstance(value, bool):
            raise EngineError(f"{place}.{key}={shown(value)}: expected true or false.")
        if sign is not None and (not isinstance(value, str) or value.strip(" \t\r\n") != sign):
            raise EngineError(f"{place}.{key}={shown(value)}: expected {sign!r} with blanks around it.")
    return dict(given)


class _SchemaReader:
    """Goes through a schema from its root, along references, and rewrites it. Each part is read once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        #: Place of each regular expression, as it is written there, and in Rust's syntax.
        self.patterns: list[tuple[str, str, str]] = []
        self._read = set[int]()
        draft = self._root.get("$schema")
        self._ref_stands_alone = isinstance(draft, str) and any(name in draft for name in _OLDER_DRAFTS)
        self._resource_of, self._resources = resources(self._root)

    def read(self, schema: Any, place: str, depth: int) -> None:
        """Refuse or rewrite a part and the parts in it. What is no schema is llguidance's to name."""
        if not isinstance(schema, dict) or id(schema) in self._read:
            return
        self._read.add(id(schema))
        if depth > _MOST_NESTED:
            raise EngineError(f"json_schema: it nests deeper than {_MOST_NESTED} levels. Write it flatter.")
        self._refuse_unserved(schema, place)
        for word in _DROPPED & schema.keys():
            del schema[word]
        for word in _COUNTS:
            if isinstance(schema.get(word), float) and schema[word].is_integer():
                schema[word] = int(schema[word])
        self._refuse_repeated_keys(schema, place)
        for part, name in list(_parts(schema)):
            self.read(part, f"{place}.{name}", depth + 1)
        self._refuse_unwritable(schema, place)
        self._write_patterns(schema, place)
        self._write_format(schema, place)
        if "$ref" in schema:
            self._read_reference(schema, schema["$ref"], depth)

    def _refuse_unserved(self, schema: dict[str, Any], place: str) -> None:
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for word in schema:
            fate, next_step = KEYWORDS.get(word, _ANNOTATION)
            if fate == "refused":
                raise EngineError(f"{place}.{word}: not supported. {next_step}")
            meant = _SPELLINGS.get(word.replace("_", "").replace("-", "").lower())
            # with _ in front, a keyword was taken out on purpose
            if word not in KEYWORDS and meant is not None and not word.startswith("_"):
                raise EngineError(f"{place}.{shown_name(word)}: no keyword; did you mean {meant}?")
        if schema.get("nullable"):
            raise EngineError(f"{place}.nullable: OpenAPI's, not JSON Schema's. Add \"null\" to the type.")
        content = [word for word in schema if self._ref_stands_alone and KEYWORDS.get(word) == _CONTENT]
        if content:
            raise EngineError(
                f"{place}.{content[0]}: an assertion by draft 7, which is not supported. Leave it out, or name draft "
                "2020-12 in $schema."
            )
        if self._ref_stands_alone and "$ref" in schema:
            beside = [word for word in schema if word not in _DROPPED | {"$ref", "$schema", *_DEFINITIONS}]
            if beside:
                raise EngineError(
                    f"{place}.{shown_name(beside[0])}: draft 7 passes over it beside $ref. Put both into allOf, or "
                    "name draft 2020-12 in $schema."
                )

    @staticmethod
    def _refuse_repeated_keys(schema: dict[str, Any], place: str) -> None:
        """Keys that the schema does not name may stand twice in an answer, and are one key to its readers."""
        least, required = schema.get("minProperties"), schema.get("required", [])
        if not isinstance(least, int) or not isinstance(required, list):
            return
        is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
        if is_open and least > len(required) + 1:
            raise EngineError(
                f"{place}.minProperties={least}: not supported for more than one key beside those of required, which "
                f"are {len(required)}. Name keys in required."
            )

    @staticmethod
    def _refuse_unwritable(schema: dict[str, Any], place: str) -> None:
        """Texts of constants are written without \\uXXXX, which some control characters need."""
        for word in ("const", "enum"):
            found = word in schema and _UNWRITABLE.search(json.dumps(schema[word]))
            if found:
                raise EngineError(f"{place}.{word}: the character {found[0]} cannot be written. Leave it out.")

    def _write_patterns(self, schema: dict[str, Any], place: str) -> None:
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = self._written(schema["pattern"], f"{place}.pattern")
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            written = {self._written(p, f"{place}.patternProperties"): part for p, part in named.items()}
            if len(written) < len(named):
                raise EngineError(f"{place}.patternProperties: two of its patterns are the same. Write one.")
            schema["patternProperties"] = written

    def _written(self, pattern: str, place: str) -> str:
        """A pattern in Rust's syntax."""
        try:
            written = rust_pattern(pattern)
        except ValueError as error:
            raise EngineError(f"{place}={shown(pattern)}: {error}.") from None
        self.patterns.append((place, pattern, written))
        return written

    def _write_format(self, schema: dict[str, Any], place: str) -> None:
        name = schema.get("format")
        if name is None:
            return
        if not isinstance(name, str) or name not in {*FORMATS, *NUMBER_FORMATS}:
            raise EngineError(
                f"{place}.format={shown(name)}: not supported; supported are {', '.join((*FORMATS, *NUMBER_FORMATS))}. "
                "Leave it out, or say it with pattern."
            )
        del schema["format"]
        added = list(map(dict, FORMATS.get(name) or (NUMBER_FORMATS[name],)))
        self._read.update(map(id, added))
        schema["allOf"] = [*schema.get("allOf", []), *added]

    def _read_reference(self, schema: dict[str, Any], reference: Any, depth: int) -> None:
        """Read what a reference names; every definition, too, where it is not a plain path from the root."""
        if not isinstance(reference, str):
            return
        address, _, path = reference.partition("#")
        own, name = self._resource_of[id(schema)]
        resource = self._resources.get(urljoin(name, address)) if address else own
        if resource is not None and (not path or path.startswith("/")):
            place = "json_schema" if resource is self._root else f"json_schema.{shown_name(address or name)}"
            self.read(pointed_at(resource, f"#{path}"), f"{place}{path.replace('/', '.')}", depth + 1)
        if resource is not self._root or address or (path and not path.startswith("/")):
            self._read_definitions(self._root, "json_schema", depth, set())

    def _read_definitions(self, schema: Any, place: str, depth: int, seen: set[int]) -> None:
        """Read all schemas of a schema: one of them has the name or the address."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        parts = list(_parts(schema))
        for word in _DEFINITIONS:
            definitions = schema.get(word)
            named = definitions.items() if isinstance(definitions, dict) else ()
            parts += [(part, f"{word}.{shown_name(name)}") for name, part in named]
        for part, name in parts:
            self.read(part, f"{place}.{name}", depth + 1)
            self._read_definitions(part, f"{place}.{name}", depth + 1, seen)


#: A schema with an address of its own, and that address.
_Resource = tuple[dict[str, Any], str]


def resources(root: dict[str, Any]) -> tuple[dict[int, _Resource], dict[str, dict[str, Any]]]:
    """The resource in which each object of a schema stands, by `id`; and all resources by their addresses."""
    of_object: dict[int, _Resource] = {}
    by_address: dict[str, dict[str, Any]] = {"": root}
    waiting: list[tuple[Any, _Resource]] = [(root, (root, ""))]
    while waiting:
        value, resource = waiting.pop()
        if isinstance(value, dict):
            for word in ("$id", "id"):
                name = value.get(word)
                if isinstance(name, str) and not name.startswith("#"):
                    resource = value, urljoin(resource[1], name).removesuffix("#")
                    by_address[resource[1]] = value
            of_object[id(value)] = resource
        if isinstance(value, dict | list):
            waiting += [(part, resource) for part in (value.values() if isinstance(value, dict) else value)]
    return of_object, by_address


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """The schemas right inside of a schema, and where they stand."""
    for word in _ONE:
        yield schema.get(word), word
    for word in _LISTS:
        parts = schema.get(word)
        yield from ((part, f"{word}[{i}]") for i, part in enumerate(parts if isinstance(parts, list) else ()))
    for word in _MAPPINGS:
        parts = schema.get(word)
        named = parts.items() if isinstance(parts, dict) else ()
        yield from ((part, f"{word}.{shown_name(name)}") for name, part in named)


def pointed_at(root: Any, reference: str) -> Any:
    """The part of a schema that a reference within it (`#`, `#/$defs/a`) names; None where there is nothing of that
    name.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
