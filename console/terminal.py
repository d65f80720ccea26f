"""The terminal as commands print on it."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is. Names, prompts, answers and messages contain square brackets and colons,
    which are markup and emoji to a console of rich.
    """
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
