"""The terminal as commands print on it."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints text as it is. Names, prompts, answers and messages contain square brackets and colons,
    which are markup and emoji to a console of rich. `options`: see `Console`.
    """
    return Console(stderr=stderr, **options, markup=False, emoji=False, highlight=False)
