"""Reads job files: YAML of bounded size, in which aliases stand for few values and no key is given twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..engine.untrusted import MALFORMED, read_regular, shown_name
from .errors import JobRequestError
from .spec import field_name

_MAX_BYTES = 4 << 20  # ten thousand adapters by name and URL have 1 MB
# Ten lists that name each other ten times stand for ten thousand million values.
_MAX_ALIASED_VALUES = 10_000


def read_job_file(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a job file, with `overrides` taking precedence.

    Relative paths inside are relative to the working directory, as on the command line. Raises `JobRequestError` when
    the file is missing, is not a YAML mapping, has a key twice, or stands for very many values by its aliases.
    """
    try:
        loader = yaml.SafeLoader(read_regular(path, _MAX_BYTES).decode())
        root = loader.get_single_node()
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
        # Dates and numbers that Python does not make; values that are not of their tag's kind.
        raise JobRequestError(f"job file {path}: not valid YAML ({error}).") from None
    if problems:
        raise JobRequestError(*problems)
    if not isinstance(value, dict):
        raise JobRequestError(f"job file {path}: expected a mapping such as `model: …`, found {type(value).__name__}.")
    return {field_name(str(name)): item for name, item in value.items()} | dict(overrides)


def _check_values(root: yaml.Node | None) -> None:
    """Raise `ValueError` for what would take long to make or to show, and for keys that are no text."""
    if root is None:
        return
    # Node -> values that it stands for, itself and its aliases written out; 0 while they are counted.
    counts: dict[int, int] = {}
    total = _num_values(root, counts)
    if total > len(counts) + _MAX_ALIASED_VALUES:
        raise ValueError(
            f"line 1: its aliases stand for more than {_MAX_ALIASED_VALUES} values, expected at most that. Write them "
            "out"
        )


def _num_values(node: yaml.Node, counts: dict[int, int]) -> int:
    line = node.start_mark.line + 1
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
            inner += (key, value)
    total = 1
    for item in inner:
        if counts.get(id(item)) == 0:
            raise ValueError(f"line {line}: an alias that is part of what it stands for")
        total += _num_values(item, counts)
    counts[id(node)] = total
    return total


def _repeated_keys(root: yaml.Node | None) -> list[str]:
    """Keys that stand twice in one mapping of a job file, also under two spellings: YAML would keep the last value."""
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
