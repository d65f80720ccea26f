"""Writes a pattern of a JSON Schema, which is of ECMA-262 with the flag `u`, in the syntax of Rust's regex.

Both read most of a pattern alike. Written anew is what they read differently: `.`, classes of characters and what
stands in square brackets, escapes. Refused is what has a meaning in one of them only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BLANKS = r"\t\n\x0B\x0C\r \xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
#: Escape of ECMA-262 -> a class of Rust's.
_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "s": f"[{_BLANKS}]", "S": f"[^{_BLANKS}]"
}  # fmt: skip
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
# An escape, with what belongs to it; a half of a surrogate pair with the other one.
_ESCAPE = re.compile(
    r"""\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    |(?:x(?P<byte>[0-9a-fA-F]{2})|u(?P<unit>[0-9a-fA-F]{4})|u\{(?P<point>[0-9a-fA-F]{1,6})\})
    |c(?P<control>[a-zA-Z])|(?P<property>[pP](?:\{[^}]*\}|[A-Z]))|(?P<sign>.))""",
    re.VERBOSE | re.DOTALL,
)
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_FLAGS = re.compile(r"\(\?(?P<flags>[a-zA-Z]*(?:-[a-zA-Z]*)?)[:)]")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")


def rust_pattern(pattern: str) -> str:
    """The pattern that matches the same texts in Rust's syntax. What both refuse is left as it is.

    Raises ValueError for a part that has another meaning in Rust's syntax, or none, with a sentence about it.
    """
    return "".join(_parts(pattern))


def _parts(pattern: str) -> Iterator[str]:
    place, is_repeated = 0, False
    while place < len(pattern):
        sign, was_repeated, is_repeated = pattern[place], is_repeated, False
        if sign == "\\":
            written, place = _escape(pattern, place, is_in_class=False)
            yield written
            continue
        if sign == "[":
            written, place = _bracketed(pattern, place)
            yield written
            continue
        if sign in "*+?" or _COUNT.match(pattern, place):
            if was_repeated:
                raise ValueError(f"a repeat of a repeat, {pattern[place - 1 : place + 1]}, is not of ECMA-262")
            found = _COUNT.match(pattern, place)
            end = found.end() if found else place + 1
            # the sign behind a repeat says which match is taken first, which is the same for whole texts
            is_repeated, end = True, end + (pattern[end : end + 1] == "?")
            yield pattern[place:end]
            place = end
            continue
        if sign == "{" and re.match(r"\{,[0-9]+\}", pattern[place:]):
            raise ValueError("a repeat without its least number is not of ECMA-262; write {0,2} for {,2}")
        flags = _FLAGS.match(pattern, place)
        if flags is not None and flags["flags"] not in ("", "i", "-i"):
            raise ValueError(f"flags other than i, here {flags['flags']}, are not supported")
        yield _ANY if sign == "." else f"\\{sign}" if sign in "{}]" else sign
        place += 1


def _escape(pattern: str, place: int, *, is_in_class: bool) -> tuple[str, int]:
    """An escape in Rust's syntax, and the place behind it."""
    found = _ESCAPE.match(pattern, place)
    if found is None:
        raise ValueError("\\ at its end escapes nothing")
    point = _code_point(found)
    sign = found["sign"]
    if point is not None:
        written = _literal(point)
    elif found["property"]:
        written = found[0]
    elif sign in _CLASSES:
        written = _CLASSES[sign]
    elif sign == "0" and not pattern[found.end() : found.end() + 1].isdigit():
        written = _literal(0)
    elif sign in _CONTROLS and (sign != "b" or is_in_class):
        written = _literal(_CONTROLS[sign])
    elif not sign.isalnum() or not sign.isascii():
        written = _literal(ord(sign))
    elif sign in "bBAzk123456789" and not is_in_class:
        written = found[0]  # places and references, of which Rust says what it does not have
    else:
        raise ValueError(f"\\{sign} is no escape of ECMA-262")
    return written, found.end()


def _code_point(found: re.Match[str]) -> int | None:
    """The character that an escape names by its number."""
    if found["high"]:
        return 0x10000 + ((int(found["high"], 16) - 0xD800) << 10) + int(found["low"], 16) - 0xDC00
    if found["control"]:
        return ord(found["control"]) % 32
    number = found["byte"] or found["unit"] or found["point"]
    return int(number, 16) if number else None


def _literal(point: int) -> str:
    return f"\\x{{{point:X}}}"


def _bracketed(pattern: str, place: int) -> tuple[str, int]:
    """A class in square brackets, in which [, && and -- are characters, and where it ends."""
    start = place
    is_negated = pattern.startswith("^", place + 1)
    place += 1 + is_negated
    if pattern.startswith("]", place):
        raise ValueError("[] and [^] with nothing in them are not supported; write \\] for the bracket")
    written = ["[^" if is_negated else "["]
    while not pattern.startswith("]", place):
        if place >= len(pattern):
            raise ValueError(f"unclosed character class {pattern[start : start + 20]}")
        if (named := _POSIX.match(pattern, place)) is not None:
            raise ValueError(f"{named[0]} is not of ECMA-262; write the characters")
        first, place = _atom(pattern, place)
        written.append(first)
        if pattern.startswith("-", place) and not pattern.startswith("-]", place) and place + 1 < len(pattern):
            last, place = _atom(pattern, place + 1)
            # beside a class, - is a character
            is_range = first.startswith("\\x") and last.startswith("\\x")
            written.append(f"-{last}" if is_range else f"\\-{last}")
    return "".join([*written, "]"]), place + 1


def _atom(pattern: str, place: int) -> tuple[str, int]:
    """One character or class of a class."""
    if pattern.startswith("\\", place):
        return _escape(pattern, place, is_in_class=True)
    return _literal(ord(pattern[place])), place + 1
