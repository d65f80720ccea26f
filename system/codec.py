"""Encodes messages between processes, frozen dataclasses, as plain values, and decodes them.

    FRAMES = Codec(Start, Add, Cancel)
    plain = FRAMES.encode(Add(rows))      # {"type": "Add", "rows": [...]}: as msgpack and JSON carry it
    FRAMES.decode(plain) == Add(rows)

The annotations of a message's fields say how its values travel: numbers, strings, bytes and `Any` as they are, a path
as a string, a tuple as a list, a mapping as a dict, a dataclass as a dict of its fields. Only plain values travel, so
neither side can make the other run code. Both sides have the same version of lorabatch, so every field must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .untrusted import shown

MessageT = TypeVar("MessageT")
_Convert = Callable[[Any], Any]
_UNKNOWN_SHOWN = 8
_PLAIN = (bool, int, float, str, bytes, NoneType, Any)


class MessageError(ValueError):
    """Plain values that are no message of a codec: of an unknown type, or with other fields than the type has."""


class Codec(Generic[MessageT]):
    """Encodes and decodes the messages of one protocol. `types`: frozen dataclasses with names of their own. `named`:
    types that annotations of fields name, but that their modules import for type checkers only.

    Raises TypeError for a type with a field that cannot travel.
    """

    def __init__(self, *types: type[MessageT], named: tuple[type, ...] = ()) -> None:
        self._types = {kind.__name__: kind for kind in types}
        self._named = named
        for kind in self._types.values():
            _converters(kind, kind.__name__, named)

    def encode(self, message: MessageT) -> dict[str, Any]:
        """The message as plain values, its type's name under `type`. Raises `MessageError` for another type's."""
        name = type(message).__name__
        if self._types.get(name) is not type(message):
            raise MessageError(f"type={name!r}: expected one of {', '.join(self._types)}")
        return {"type": name, **_to_plain(self._named, message)}

    def decode(self, plain: Any) -> MessageT:
        """The message that `encode` was given. Raises `MessageError`."""
        if not isinstance(plain, Mapping) or "type" not in plain:
            raise MessageError(f"{shown(plain)}: expected a message with its type")
        name = plain["type"]
        kind = self._types.get(name) if isinstance(name, str) else None
        if kind is None:
            raise MessageError(f"type={shown(name)}: expected one of {', '.join(self._types)}")
        values = {name: value for name, value in plain.items() if name != "type"}
        message: MessageT = _from_plain(kind, self._named, values)
        return message


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict of its fields, nested ones too."""
    return _to_plain((), value)


def from_plain(kind: Any, plain: Mapping[str, Any]) -> Any:
    """The dataclass of type `kind` that `to_plain` was given. Raises `MessageError`."""
    return _from_plain(kind, (), plain)


def _to_plain(named: tuple[type, ...], value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    encoders, _ = _dataclass_converters(kind, named)
    return {name: encode(getattr(value, name)) for name, encode in encoders.items()}


def _from_plain(kind: Any, named: tuple[type, ...], plain: Mapping[str, Any]) -> Any:
    _, decoders = _dataclass_converters(kind, named)
    if not isinstance(plain, Mapping):
        raise MessageError(f"{kind.__name__}: {shown(plain)}, expected its fields")
    if plain.keys() != decoders.keys():
        missing = sorted(decoders.keys() - plain.keys())
        unknown = sorted(map(shown, plain.keys() - decoders.keys()))[:_UNKNOWN_SHOWN]
        raise MessageError(f"{kind.__name__}: missing fields {missing}, unknown fields [{', '.join(unknown)}]")
    return kind(**{name: _decoded(kind, name, decode, plain[name]) for name, decode in decoders.items()})


def _decoded(kind: Any, name: str, decode: _Convert, value: Any) -> Any:
    try:
        return decode(value)
    except MessageError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"{kind.__name__}.{name}={shown(value)}: not of the field's type ({error})") from None


@cache
def _dataclass_converters(kind: Any, named: tuple[type, ...]) -> tuple[dict[str, _Convert], dict[str, _Convert]]:
    """Functions that encode and decode each field of a dataclass, by name. `named`: see `Codec`."""
    hints = get_type_hints(kind, localns={each.__name__: each for each in named})
    converters = {
        field.name: _converters(hints[field.name], f"{kind.__name__}.{field.name}", named) for field in fields(kind)
    }
    return {name: pair[0] for name, pair in converters.items()}, {name: pair[1] for name, pair in converters.items()}


def _converters(hint: Any, place: str, named: tuple[type, ...]) -> tuple[_Convert, _Convert]:
    """Functions that encode and decode a value with this annotation. `place`: field of the annotation, for messages."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN or origin is Literal:
        return _same, _same
    if hint is Path:
        return str, Path
    if isinstance(hint, type) and is_dataclass(hint):
        _dataclass_converters(hint, named)
        return partial(_to_plain, named), partial(_from_plain, hint, named)
    if origin in (Union, UnionType):
        return _optional(arguments, place, named)
    if origin is tuple and arguments[1:] == (...,):
        encode, decode = _converters(arguments[0], place, named)
        if decode is _same:
            return list, tuple
        return partial(_list_of, encode), partial(_tuple_of, decode)
    if origin is tuple:
        each = [_converters(argument, place, named) for argument in arguments]
        return partial(_zipped, list, [pair[0] for pair in each]), partial(_zipped, tuple, [pair[1] for pair in each])
    if origin in (Mapping, dict):
        encode, decode = _converters(arguments[1], place, named)
        return partial(_dict_of, encode), partial(_dict_of, decode)
    raise TypeError(f"{place}: {hint!r} cannot travel in a message")


def _optional(arguments: tuple[Any, ...], place: str, named: tuple[type, ...]) -> tuple[_Convert, _Convert]:
    converters = [_converters(argument, place, named) for argument in arguments if argument is not NoneType]
    if all(pair == (_same, _same) for pair in converters):
        return _same, _same
    if len(converters) > 1:
        raise TypeError(f"{place}: a union of more than one structured type cannot travel in a message")
    encode, decode = converters[0]
    return partial(_unless_none, encode), partial(_unless_none, decode)


def _same(value: Any) -> Any:
    return value


def _list_of(encode: _Convert, values: Any) -> list[Any]:
    return [encode(value) for value in values]


def _tuple_of(decode: _Convert, values: Any) -> tuple[Any, ...]:
    return tuple(decode(value) for value in values)


def _zipped(container: Callable[[Any], Any], converters: list[_Convert], values: Any) -> Any:
    return container(convert(value) for convert, value in zip(converters, values, strict=True))


def _dict_of(convert: _Convert, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: convert(value) for name, value in values.items()}


def _unless_none(convert: _Convert, value: Any) -> Any:
    return None if value is None else convert(value)
