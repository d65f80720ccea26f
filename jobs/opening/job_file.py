"""Reads job files: YAML 1.2 of bounded size, in which aliases stand for few values and no key is given twice.

Plain words follow YAML 1.2's core schema: `yes`, `12:30` and `2026-01-31` are texts, as people mean them. Options that
take text (`choice`, `stop`, `name`, …) keep it as it is written, also `1.10`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from ...system.untrusted import MALFORMED, read_regular, shown_name
from ..errors import JobRequestError
from ..options.problems import field_name
from ..spec import JobSpec

_MAX_BYTES = 4 << 20  # ten thousand adapters by name and URL have 1 MB
# Ten lists that name each other ten times stand for ten thousand million values.
_MAX_ALIASED_VALUES = 10_000
_TAG = "tag:yaml.org,2002:"
# YAML 1.2.2, 10.3.2: tag -> the plain words that have it, and how they begin. The last two are of older YAML: keys that
# merge a mapping, and numbers that older YAML reads in base 8.
_OCTAL = re.compile(r"[-+]?0[0-9]+")
_WORDS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", tuple("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", tuple("-+.")),
    ("merge", r"<<", ("<",)),
)


class _Loader(yaml.SafeLoader):
    """Makes JSON's types of YAML nodes: no dates, sets or bytes. Keys are text, as they are written."""

    yaml_implicit_resolvers = {}  # noqa: RUF012
    yaml_constructors = {None: yaml.SafeLoader.yaml_constructors[None]}  # noqa: RUF012

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        """Makes a dictionary of a mapping; keys keep their text."""
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """A whole number, in base 10, 8 or 16."""
        text = self.construct_scalar(node)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)


for _name, _words, _first in _WORDS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_words})$"), _first)
for _name in ("null", "bool", "float", "str", "seq", "map"):
    _Loader.add_constructor(_TAG + _name, yaml.SafeLoader.yaml_constructors[_TAG + _name])
_Loader.add_constructor(_TAG + "int", _Loader.construct_number)


def read_job_file(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a job file, with `overrides` taking precedence.

    Relative paths inside are relative to the working directory, as on the command line. Raises `JobRequestError` when
    the file is missing, is not a YAML mapping, has a key twice, or stands for very many values by its aliases.
    """
    try:
        loader = _Loader(read_regular(path, _MAX_BYTES).decode())
        root = loader.get_single_node()
        _mark_texts(root)
        _check_values(root)
        problems = [f"job file {path}: {problem}" for problem in _repeated_keys(root)]
        value = None if problems or root is None else loader.construct_document(root)
    except FileNotFoundError:
        raise JobRequestError(f"job file {path}: not found. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobRequestError(f"job file {path}: cannot be read ({error}).") from None
    except RecursionError:
        raise JobRequestError(f"job file {path}: not valid YAML (it nests too deeply).") from None
    except (yaml.YAMLError, *MALFORMED) as error:
        # `MALFORMED`: numbers that Python refuses, values that do not fit their tag, and unknown tags.
        raise JobRequestError(f"job file {path}: not valid YAML ({_in_one_line(error)}). Correct it there.") from None
    if problems:
        raise JobRequestError(*problems)
    if not isinstance(value, dict):
        raise JobRequestError(f"job file {path}: expected a mapping such as `model: …`, found {type(value).__name__}.")
    return {field_name(str(name)): item for name, item in value.items()} | dict(overrides)


def _mark_texts(root: yaml.Node | None) -> None:
    """Tag the values of options that take text as texts: `choice: [1.10, true]` has two texts."""
    if not isinstance(root, yaml.MappingNode):
        return
    for key, value in root.value:
        field = JobSpec.model_fields.get(field_name(str(key.value)))
        kinds = set() if field is None else {field.annotation, *get_args(field.annotation)}
        if isinstance(value, yaml.SequenceNode) and tuple[str, ...] in kinds:
            items = value.value
        elif isinstance(value, yaml.MappingNode) and dict[str, str] in kinds:
            items = [item for _, item in value.value]
        else:
            is_text = bool(kinds) and (str in kinds or tuple[str, ...] in kinds) and value.tag != _TAG + "null"
            items = [value] if is_text else []
        for item in items:
            if isinstance(item, yaml.ScalarNode) and item.style is None and item.value:
                item.tag = _TAG + "str"


def _check_values(root: yaml.Node | None) -> None:
    """Raise `ValueError` for aliases that stand for too many values, ambiguous numbers, and keys that are no text."""
    if root is None:
        return
    # Id of a node -> values that it stands for, itself and its aliases written out; 0 while they are counted.
    counts: dict[int, int] = {}
    total = _num_values(root, counts)
    if total > len(counts) + _MAX_ALIASED_VALUES:
        raise ValueError(
            f"line 1: its aliases stand for more than {_MAX_ALIASED_VALUES} values, expected at most that. Write them "
            "out"
        )


def _num_values(node: yaml.Node, counts: dict[int, int]) -> int:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode) and not node.value.isascii():
        # JSON writes characters beyond 16 bits as two escapes, which the library leaves apart.
        try:
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise ValueError(f"line {line}: half of a character that is written as two escapes") from None
    if node.tag == _TAG + "int" and isinstance(node, yaml.ScalarNode) and _OCTAL.fullmatch(node.value):
        raise ValueError(
            f"line {line}: {shown_name(node.value)} begins with 0, which YAML reads as a number in base 8 or 10. "
            "Write it in quotes for text, without the 0 for a number"
        )
    found = counts.setdefault(id(node), 0)
    if found:
        return found
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key that is no text")
            if key.tag != _TAG + "merge":
                key.tag = _TAG + "str"
            inner += (key, value)
    total = 1
    for item in inner:
        if counts.get(id(item)) == 0:
            raise ValueError(f"line {line}: an alias that is part of what it stands for")
        total += _num_values(item, counts)
    counts[id(node)] = total
    return total


def _repeated_keys(root: yaml.Node | None) -> list[str]:
    """Problems with keys given twice in one mapping, also in two spellings: YAML would keep the last value."""
    problems = []
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        lines: dict[str, list[int]] = {}
        for key, value in node.value:
            name = field_name(str(key.value)) if node is root else str(key.value)
            lines.setdefault(name, []).append(key.start_mark.line + 1)
            nodes.append(value)
        problems += [
            f"{shown_name(name)}: given {len(found)} times, "
            f"line {' and '.join(dict.fromkeys(map(str, found)))}; keep one."
            for name, found in lines.items()
            if len(found) > 1
        ]
    return problems


def _in_one_line(error: Exception) -> str:
    """The finding of an error of YAML, with its place."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
