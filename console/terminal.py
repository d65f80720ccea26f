"""Prints on the terminal: all text of jobs, adapters and errors goes through `plain_console` or `echo`."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from ..system.untrusted import printable


class _PlainConsole(Console):
    """A console that prints strings as text: control characters in them do not move the cursor or set a title."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text with its control characters written out."""
        return super().render_str(printable(text), **options)


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints text as it is. Names, prompts, answers and messages contain square brackets and colons,
    which a rich console reads as markup and emoji. `options`: further arguments of `rich.console.Console`.
    """
    return _PlainConsole(stderr=stderr, **options, markup=False, emoji=False, highlight=False)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines of plain text, with their control characters written out."""
    typer.echo(printable(text), err=err)
