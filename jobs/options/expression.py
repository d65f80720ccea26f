"""`Expression`: a condition or a number over the values of one row, in a closed language.

The language has Python's syntax for comparisons, `and`, `or`, `not`, `in`, arithmetic of two numbers, `len`, `any`,
`all`, and the fields of a value as `x.field` or `x["two words"]`. Nothing else of Python is in it: an expression calls
no code and reads no file.

Nulls pass through: a field of null is null, arithmetic with null is null, and a comparison with null is false. A field
of a list is the list of its items' fields, and a list that is compared with one value is a list of comparisons.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...system.untrusted import shown

MAX_CHARACTERS = 2000
_MAX_NODES = 300
_EXAMPLE = "such as best.by < 0.7 or any(judge.choice == 'good')"
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS = ("len", "any", "all")
_Evaluate = Callable[[Mapping[str, Any]], Any]


class Expression:
    """An expression, parsed. Raises ValueError, with what is allowed, for a text that is none."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"has {len(text)} characters, expected at most {MAX_CHARACTERS}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{shown(text)} is no expression, {_EXAMPLE}") from None
        if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
            raise ValueError(f"has more than {_MAX_NODES} parts")
        self.text = text
        names: dict[str, None] = {}
        self._evaluate = _compiled(tree.body, names)
        #: Names of the columns and stages that the expression reads.
        self.names = tuple(names)

    def value(self, scope: Mapping[str, Any]) -> Any:
        """The value of the expression. `scope`: value of each name, of JSON's types. None where the types of two
        values do not fit each other.
        """
        return self._evaluate(scope)

    def is_true(self, scope: Mapping[str, Any]) -> bool:
        """Whether the value is true; a null, and a list that is empty or has a false item, is not."""
        return _truth(self.value(scope))


def _truth(value: Any) -> bool:
    return bool(value) and all(value) if isinstance(value, list) else bool(value)


def _compiled(node: ast.expr, names: dict[str, None]) -> _Evaluate:
    """The function that evaluates a node. Adds the names that it reads to `names`."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return lambda scope: constant
        case ast.Name(id=name):
            names.setdefault(name)
            return lambda scope: scope.get(name)
        case ast.Attribute(value=of, attr=field):
            return _field(_compiled(of, names), field)
        case ast.Subscript(value=of, slice=ast.Constant(value=str() | int() as key)):
            return _field(_compiled(of, names), key)
        case ast.Subscript(value=of, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as behind))):
            return _field(_compiled(of, names), -behind)
        case ast.UnaryOp(op=ast.Not(), operand=one):
            operand = _compiled(one, names)
            return lambda scope: not _truth(operand(scope))
        case ast.UnaryOp(op=ast.USub(), operand=one):
            return partial(_arithmetic, operator.sub, lambda scope: 0, _compiled(one, names))
        case ast.BoolOp(op=op, values=several):
            parts = [_compiled(part, names) for part in several]
            joined = any if isinstance(op, ast.Or) else all
            return lambda scope: joined(_truth(part(scope)) for part in parts)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return partial(_arithmetic, _ARITHMETIC[type(op)], _compiled(left, names), _compiled(right, names))
        case ast.Compare(left=first, ops=ops, comparators=others):
            sides = [_compiled(side, names) for side in (first, *others)]
            return partial(_compared, list(map(_comparison, ops)), sides)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            found = [_compiled(item, names) for item in items]
            return lambda scope: [item(scope) for item in found]
        case ast.Call(func=ast.Name(id=name), args=[of], keywords=[]) if name in _FUNCTIONS:
            return partial(_called, name, _compiled(of, names))
    raise ValueError(
        f"{shown(ast.unparse(node))} is not allowed. Expected names, their fields, numbers and texts, comparisons, "
        f"and, or, not, in, + - * /, {', '.join(_FUNCTIONS)}; {_EXAMPLE}"
    )


def _field(of: _Evaluate, key: str | int) -> _Evaluate:
    return lambda scope: _field_of(of(scope), key)


def _field_of(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list):
        if isinstance(key, str):
            return [_field_of(item, key) for item in value]
        return value[key] if -len(value) <= key < len(value) else None
    return None


def _comparison(op: ast.cmpop) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.In | ast.NotIn):
        return lambda one, other: _contains(other, one) != isinstance(op, ast.NotIn)
    if type(op) in _COMPARISONS:
        compare = _COMPARISONS[type(op)]
        return lambda one, other: one is not None and other is not None and bool(compare(one, other))
    return lambda one, other: (one is None and other is None) != isinstance(op, ast.IsNot)


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, str):
        return isinstance(part, str) and part in whole
    return isinstance(whole, list | Mapping) and part in whole


def _compared(ops: list[Callable[[Any, Any], bool]], sides: list[_Evaluate], scope: Mapping[str, Any]) -> Any:
    values = [side(scope) for side in sides]
    if len(ops) == 1 and isinstance(values[0], list) and not isinstance(values[1], list | Mapping):
        return [_holds(ops[0], item, values[1]) for item in values[0]]
    return all(_holds(op, one, other) for op, one, other in zip(ops, values, values[1:], strict=False))


def _holds(op: Callable[[Any, Any], bool], one: Any, other: Any) -> bool:
    try:
        return op(one, other)
    except TypeError:  # a text and a number, say
        return False


def _arithmetic(
    op: Callable[[Any, Any], Any], left: _Evaluate, right: _Evaluate, scope: Mapping[str, Any]
) -> float | None:
    one, other = left(scope), right(scope)
    if not all(isinstance(value, int | float) for value in (one, other)):
        return None
    try:
        found: float = op(one, other)
    except (ZeroDivisionError, OverflowError):
        return None
    return found


def _called(name: str, of: _Evaluate, scope: Mapping[str, Any]) -> Any:
    value = of(scope)
    if name == "len":
        return len(value) if isinstance(value, str | list | Mapping) else None
    return {"any": any, "all": all}[name](_items(value))


def _items(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [value]
