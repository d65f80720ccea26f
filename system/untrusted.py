"""Reads what strangers wrote: regular files of bounded size, JSON of bounded numbers; and shows it on one line.

`STOPS` are the exceptions that are never about data; extension modules raise others that are no `Exception`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import reprlib
import stat
from datetime import datetime
from pathlib import Path
from typing import Any


class NoProcessError(Exception):
    """The machine cannot start the process in which untrusted data is read; the data is not at fault."""


#: Exceptions that handlers of bad data let pass: they are never about the data.
STOPS = (KeyboardInterrupt, SystemExit, MemoryError, NoProcessError)
#: Exceptions that data of an unexpected shape raises in readers that do not check every value.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: The largest JSON file of real models is the index of their shards, 10 MB.
MAX_JSON_BYTES = 64 << 20
# Tokenizers of transformers hold numbers of 31 digits.
_MAX_DIGITS = 64
_SHOWN_CHARACTERS = 80
# Unprintable characters that keep their meaning: lines of a message, columns of a table.
_LAYOUT = frozenset("\n\t")


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file. Raises `OSError` for anything else (a pipe, a device), and for a larger one."""
    # A pipe without a writer would block the opening.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if facts.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{facts.st_size} bytes, expected at most {max_bytes}", str(path))
        return file.read(max_bytes)


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text; `hooks` are those of `json.loads`.

    Raises `ValueError` for what is not JSON, nests too deeply for Python, or holds a number of very many digits.
    """
    try:
        return json.loads(text, parse_int=_bounded_int, **hooks)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits, expected at most {_MAX_DIGITS}")
    return int(text)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` for anything else, and for repeated keys, NaN and infinities."""
    value = parse_json(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, expected an object")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {shown(key)} is given twice")
        value[key] = item
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def shown(value: Any) -> str:
    """A value as messages show it: short, on one line, whatever it is."""
    return shortened(printable(_REPR.repr(value)))


def shown_name(name: str) -> str:
    """A name out of a file, without quotes: short, on one line."""
    return shortened(printable(name[: _SHOWN_CHARACTERS + 1]).replace("\n", "\\n").replace("\t", "\\t"))


def shortened(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= characters else text[: characters - 1] + "…"


def printable(text: str) -> str:
    """The text with its control characters written out (`\\x1b`), so that no terminal, browser or log obeys them.

    Line ends and tabs stay. Also written out: characters that turn the direction of what follows, and halves of
    surrogate pairs, which no file can hold.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in _LAYOUT else _written_out(sign) for sign in text)


class LogFormatter(logging.Formatter):
    """Formats log records as printable text. What follows a line's end is indented, so that nothing in a message looks
    like a record of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as printable text, with all lines but its first indented."""
        return printable(super().format(record)).replace("\n", "\n    ")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # of logging
        """The time of the record, ISO 8601 with the offset from UTC: readers may be in other time zones."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


def _written_out(sign: str) -> str:
    # other blanks are unprintable to Python and harmless
    return sign if sign.isspace() and sign >= "\xa0" and sign not in "\u2028\u2029" else ascii(sign)[1:-1]


class _BoundedRepr(reprlib.Repr):
    """`repr` that looks at the beginning of a value only. What fits into a message reads as with `repr`."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 20
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _SHOWN_CHARACTERS
        self.maxstring = self.maxother = self.maxlong = 4 * _SHOWN_CHARACTERS

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """The dictionary in the order of its keys, like `repr`; reprlib would sort them."""
        if level <= 0:
            return "{...}"
        pairs = list(value.items())[: self.maxdict]
        return "{" + ", ".join(f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in pairs) + "}"


_REPR = _BoundedRepr()
