"""Small tables of facts as HTML, which notebooks show in place of an object's text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .untrusted import printable


def facts_table(title: str, facts: Mapping[str, object]) -> str:
    """A table with a line per fact below a title. Facts that are "" or None are left out; all text is escaped."""
    lines = "".join(
        f'<tr><th style="text-align:left">{_text(name)}</th><td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in facts.items()
        if value not in ("", None)
    )
    return f"<table><caption><b>{_text(title)}</b></caption><tbody>{lines}</tbody></table>"


def _text(value: object) -> str:
    """A value as HTML: whole numbers with separators, and lines of a text below each other."""
    shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return escape(printable(shown)).replace("\n", "<br>")
