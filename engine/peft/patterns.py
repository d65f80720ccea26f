"""Matches names against the regular expressions of a configuration, within limits of time.

PEFT matches with Python's `re`, and only `re` decides as it does, look-arounds included; but `re` backtracks, and
`([a-z0-9_.]+)+!` on one name would outlast the machine. Expressions that cannot take long are matched here, all others
in a confined process. `run` is the task of that process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ...system.confinement import ConfinedError, confined
from ...system.untrusted import shown
from ..errors import AdapterRefusedError

# Forms in which PEFT uses a pattern; what stands for the pattern is `{}`.
WHOLE = "{}"
END = r"(.*\.)?({})$"
PART = r"(^|.*\.){}($|\..*)"
LAYER = r"(?:^|.*?\.){}\.(?P<index>\d+)\."
CPU_S = 5
_TASK = "engine.peft.patterns"
_MAX_PATTERN_CHARACTERS = 100_000
_MAX_SIMPLE_CHARACTERS = 256
_MAX_SIMPLE_PATTERNS = 64
# Two repetitions at most, none of a group: steps grow with the square of a name's length.
_SIMPLE = re.compile(r"(?:[\w.^$|*+)-]|\\[.dw]|\((?:\?:)?)*")
#: Position of the first pattern that matches, and the group `index` of the match, where there is one.
Match = tuple[int, str | None]


def first_matches(patterns: Iterable[str], form: str, names: Iterable[str]) -> dict[str, Match]:
    """Names that a pattern matches, by the first that does. Raises `AdapterRefusedError` where that takes too long."""
    given, asked = tuple(patterns), tuple(names)
    if not given or not asked:
        return {}
    is_simple = len(given) <= _MAX_SIMPLE_PATTERNS and all(map(_is_simple, given))
    found = (_search if is_simple else _confined)(given, form, asked)
    return {name: (position, index) for name, position, index in found}


def why_invalid(patterns: Iterable[str]) -> str | None:
    """Why one of these is no regular expression; None when all are."""
    given = tuple(patterns)
    costly = tuple(pattern for pattern in given if not _is_simple(pattern))
    try:
        _search(tuple(pattern for pattern in given if _is_simple(pattern)), WHOLE, ())
        if costly:
            _confined(costly, WHOLE, ())
    except (re.error, AdapterRefusedError) as error:
        return str(error)
    return None


def run(payload: Any) -> list[tuple[str, int, str | None]]:
    """The task of the confined process: patterns, form, names."""
    patterns, form, names = payload
    return _search(patterns, form, names)


def _search(patterns: Sequence[str], form: str, names: Sequence[str]) -> list[tuple[str, int, str | None]]:
    compiled = [re.compile(form.format(pattern)) for pattern in patterns]
    tests = [pattern.fullmatch if form == WHOLE else pattern.match for pattern in compiled]
    found = []
    for name in names:
        for position, test in enumerate(tests):
            match = test(name)
            if match:
                found.append((name, position, match.groupdict().get("index") if form == LAYER else None))
                break
    return found


def _confined(patterns: Sequence[str], form: str, names: Sequence[str]) -> list[tuple[str, int, str | None]]:
    long = next((pattern for pattern in patterns if len(pattern) > _MAX_PATTERN_CHARACTERS), None)
    if long is not None:
        raise AdapterRefusedError(
            f"{shown(long)}: {len(long)} characters, expected at most {_MAX_PATTERN_CHARACTERS}. Shorten it."
        )
    try:
        found: list[tuple[str, int, str | None]] = confined().run(_TASK, [patterns, form, names], CPU_S)
    except ConfinedError as error:
        more = f" or one of {len(patterns) - 1} after it" if len(patterns) > 1 else ""
        raise AdapterRefusedError(f"{shown(patterns[0])}{more}: {error}. Write a simpler pattern.") from None
    return found


def _is_simple(pattern: str) -> bool:
    return (
        len(pattern) <= _MAX_SIMPLE_CHARACTERS
        and pattern.count("*") + pattern.count("+") <= 2
        and pattern.count("(") <= 1
        and not any(sign in pattern for sign in (")*", ")+", "**", "*+", "+*", "++"))
        and _SIMPLE.fullmatch(pattern) is not None
    )
