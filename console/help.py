"""Help of one command: its usage, its arguments, and its options in panels, at any width of the terminal.

The name of an option is never cut or wrapped: the column of names is as wide as the longest one, and texts wrap beside
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .terminal import plain_console

_ARGUMENTS, _OPTIONS, _COMMANDS = "Arguments", "Options", "Commands"
# Columns around the texts of a panel: its border, and the spaces beside the columns of its table.
_FRAME_COLUMNS = 8
# Fewest columns for the texts beside the names; below, texts are printed under their names.
_FEWEST_TEXT_COLUMNS = 24


def print_help(command: Any, ctx: Any, is_shown: Callable[[Any], bool], closing: str = "") -> None:
    """Print the help of a command. `is_shown`: which of its parameters are shown. `closing`: a last line."""
    console = plain_console()
    # typer puts required arguments into braces
    console.print(Padding(Text(re.sub(r"\{(.*?)\}", r"\1", command.get_usage(ctx)), "bold"), (1, 1)))
    if command.help:
        console.print(Padding(Text(" ".join(_paragraphs(command.help)[:1])), (0, 1)))
        for paragraph in _paragraphs(command.help)[1:]:
            console.print(Padding(Text(paragraph), (1, 1, 0, 1)))
        console.print()
    panels: dict[str, list[Any]] = {_ARGUMENTS: [], _OPTIONS: []}
    for parameter in command.get_params(ctx):
        if is_shown(parameter) and not getattr(parameter, "hidden", False):
            kind = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(parameter)
    rows = {title: [_row(parameter, ctx) for parameter in shown] for title, shown in panels.items()}
    if isinstance(command, TyperGroup):
        commands = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
        rows[_COMMANDS] = [(Text(n, "bold cyan"), Text(_paragraphs(c.help or "")[0])) for n, c in commands if c]
    longest = max((name.cell_len for title in panels for name, _ in rows[title]), default=0)
    is_beside = console.width - longest - _FRAME_COLUMNS >= _FEWEST_TEXT_COLUMNS
    for title, panel in sorted(rows.items(), key=lambda item: (item[0] == _OPTIONS) + 2 * (item[0] == _COMMANDS)):
        if panel:
            columns = longest if title in panels else max(name.cell_len for name, _ in panel)
            table = _table(panel, columns if is_beside else None)
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))
    if closing:
        console.print(Padding(Text(closing), (0, 1, 1, 1)))


def _table(rows: list[tuple[Text, Text]], name_columns: int | None) -> Table:
    """A table of names and texts. `name_columns`: width of the names; None for texts under their names."""
    table = Table(box=None, show_header=False, expand=True, padding=(0, 1, 0, 0))
    if name_columns is None:
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(name)
            table.add_row(Padding(text, (0, 0, 0, 2)))
        return table
    table.add_column(no_wrap=True, width=name_columns)
    table.add_column(ratio=1, overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _row(parameter: Any, ctx: Any) -> tuple[Text, Text]:
    """The name of a parameter with the kind of its value, and its text."""
    name, said = parameter.get_help_record(ctx)
    help = parameter.help or ""
    # The help is markup; the default and range behind it are not.
    text = Text.from_markup(help)
    text.append(said[len(help) :] if said.startswith(help) else "")
    if parameter.param_type_name == "argument":
        return Text(_of_one(name), "bold cyan"), text
    long = next((flag for flag in parameter.opts if flag.startswith("--")), "")
    short = next((flag for flag in parameter.opts if flag != long), "")
    shown = Text(f"{f'{short}, ' if short else '    '}{long}", "bold cyan")
    # `name` has all flags, and the kind of the value behind them
    kind = [] if parameter.is_flag else [_of_one(word) for word in name.split() if not word.startswith("-")]
    shown.append("".join(f" {word}" for word in kind), "yellow")
    return shown, text


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _of_one(name: str) -> str:
    """A kind of values, where a list is shown as one of its items."""
    return name.replace("<list[", "<").replace("]>", ">")
