"""Patterns such as `data/*.parquet` that a shell has replaced by the names of files before a command saw them."""

from __future__ import annotations

import shlex
from itertools import takewhile
from pathlib import Path

_INPUT, _ADAPTERS = ("--input", "-i"), ("--adapters", "-a")
_JOB_FILES = (".yaml", ".yml", ".json")
_SHOWN = 3


def with_expanded_patterns(args: list[str]) -> list[str]:
    """The words of a command with its option in front of each file that a shell has put behind `--input FILE`.

    Files of the first one's kind are inputs; one job file may follow them. Raises `ValueError`, with the words to
    quote, for files of several kinds, and for several folders behind `--adapters`.
    """
    made: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        made.append(word)
        if word == "--":
            return made + rest
        if word not in (*_INPUT, *_ADAPTERS) or not rest:
            continue
        first = rest.pop(0)
        made.append(first)
        more = list(takewhile(lambda text: not text.startswith("-"), rest))
        if word in _ADAPTERS:
            _check_folders(word, first, more)
            continue
        found = _files_of_pattern(word, first, more)
        made += [text for name in found for text in (word, name)]
        rest = rest[len(found) :]
    return made


def _files_of_pattern(flag: str, first: str, more: list[str]) -> list[str]:
    """The words of `more` that are inputs beside `first`. Raises `ValueError` if they are not known apart."""
    found = list(takewhile(lambda name: _is_alike(first, name), more))
    left = more[len(found) :]
    if not left or (not found and len(left) == 1):
        return found  # one word of another kind is a job file, or no file
    if len(left) == 1 and left[0].endswith(_JOB_FILES) and Path(left[0]).parent != Path(first).parent:
        return found
    raise ValueError(_problem(flag, [first, *more], "Quote it, so that lorabatch reads it", _pattern(first)))


def _check_folders(flag: str, first: str, more: list[str]) -> None:
    """Raise `ValueError` for folders behind one that is given as the folder of adapters."""
    if more and Path(first).is_dir() and Path(more[0]).is_dir():
        advice = "Give the folder that holds the adapters, or NAME=URL for each"
        raise ValueError(_problem(flag, [first, *more], advice, str(Path(first).parent)))


def _is_alike(first: str, name: str) -> bool:
    """Whether both are there, and are folders or files with one ending."""
    one, other = Path(first), Path(name)
    if not (one.exists() and other.exists()):
        return False
    return (one.is_dir() and other.is_dir()) or (one.is_file() and other.is_file() and one.suffix == other.suffix)


def _pattern(first: str) -> str:
    """A pattern of Parquet files in the folder of the first word."""
    return str(Path(first).parent / "*.parquet")


def _problem(flag: str, words: list[str], advice: str, example: str) -> str:
    shown = shlex.join(words[:_SHOWN]) + (" …" if len(words) > _SHOWN else "")
    return (
        f"{flag} {shown}: expected one value, found {len(words)} words, as a shell makes them of a pattern. {advice}: "
        f"{flag} {shlex.quote(example)}."
    )
