"""Reads what other systems call structured output as sampling options: OpenAI's `response_format` and vLLM's
`structured_outputs`, as jobs, columns and batch files have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

#: Sampling options that say which texts a completion may be; at most one is given.
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")
_ANY_OBJECT = '{"type": "object"}'
_KINDS_OF_VLLM = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def schema_text(schema: Any) -> str:
    """A JSON Schema as text. A class of pydantic, its dataclasses too, and a TypeAdapter give their own. Raises
    ValueError for what JSON has no word for, and for a class that has no schema.
    """
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(_schema_of(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"not JSON ({error}). Give a mapping of texts, numbers, lists and mappings, JSON, or a class of pydantic 2"
        ) from None


def _schema_of(schema: Any) -> Any:
    """The schema that a class of pydantic has; any other value as it is."""
    for name in ("model_json_schema", "json_schema"):
        if callable(found := getattr(schema, name, None)):
            break
    else:
        if not hasattr(schema, "__pydantic_core_schema__"):
            return schema
        from pydantic import TypeAdapter

        found = TypeAdapter(schema).json_schema
    try:
        return found()
    except Exception as error:  # pydantic's own, of several kinds
        raise ValueError(f"pydantic finds no schema: {str(error).partition(chr(10))[0]}") from None


def constraint_of(form: str, value: Any) -> dict[str, Any]:
    """The constraint behind a value of a form, as sampling options; none for free text.

    The value is JSON, or an object, in which what is null is not there. Raises ValueError for everything that it does
    not know: a key that is passed over would be a promise that is not kept.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else _without_nulls(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{form}: not JSON ({error})") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{form}: expected a JSON object")
    return FORMS[form](dict(given))


def _of_response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.pop("type", None)
    if kind == "json_schema":
        wrapper = given.pop("json_schema", None)
        if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
            raise ValueError("response_format.json_schema: expected an object with schema")
        _refuse_unknown("response_format.json_schema", wrapper, ("name", "schema", "strict", "description"))
        found = {"json_schema": schema_text(wrapper["schema"])}
    elif kind in ("json_object", "text"):
        found = {"json_schema": _ANY_OBJECT} if kind == "json_object" else {}
    else:
        raise ValueError(f"response_format.type={kind!r}: expected text, json_object or json_schema")
    _refuse_unknown("response_format", given, ())
    return found


def _of_structured_outputs(given: dict[str, Any]) -> dict[str, Any]:
    if given.pop("json_object", False):
        given["json"] = _ANY_OBJECT
    _refuse_unknown("structured_outputs", given, tuple(_KINDS_OF_VLLM))
    if len(given) != 1:
        raise ValueError("structured_outputs: expected one of json, regex, choice, grammar, json_object")
    [(kind, value)] = given.items()
    if kind == "json":
        value = schema_text(value)
    elif kind == "choice":
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
    elif not isinstance(value, str):
        raise ValueError(f"structured_outputs.{kind}: expected text")
    return {_KINDS_OF_VLLM[kind]: value}


#: Name of a form, an input column and a key of a job -> its reader.
FORMS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
}


def _refuse_unknown(place: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        next_step = f"known are {', '.join(known)}" if known else "leave it out"
        raise ValueError(f"{place}.{unknown[0]}: not supported; {next_step}")


def _without_nulls(value: Any) -> Any:
    """Columns of structs have null for every key that a row lacks."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list | tuple) else value
