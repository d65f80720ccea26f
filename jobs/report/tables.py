"""`search_table`: a table with a search field, which sorts by the column whose head is clicked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    CDSView,
    Column,
    ColumnDataSource,
    CustomJS,
    DataTable,
    IndexFilter,
    NumberFormatter,
    StringFormatter,
    TableColumn,
    TextInput,
)

_ROW_PX, _MOST_PX = 25, 430
# Shows the rows in which each word of the search field occurs.
_SEARCH = """
const words = field.value_input.toLowerCase().split(/\\s+/)
const columns = Object.values(source.data)
const rows = Array.from({length: columns[0].length}, (_, i) => i)
shown.indices = rows.filter(i => words.every(
  word => columns.some(values => String(values[i]).toLowerCase().includes(word))))
"""


@dataclass(frozen=True, slots=True)
class TableField:
    """One column of a table."""

    #: Its head.
    title: str
    #: Format of its numbers, as in numbro; "" for text.
    number: str = ""
    #: Width in pixels, scaled with the other columns' to the width of the table.
    width: int = 90


def search_table(fields: Sequence[TableField], rows: Sequence[Sequence[Any]], name: str) -> Column:
    """A table of `rows`, one value per field in each. Values are text, never markup."""
    source = ColumnDataSource({field.title: [row[i] for row in rows] for i, field in enumerate(fields)})
    shown = IndexFilter(indices=list(range(len(rows))))
    search = TextInput(placeholder=f"search {len(rows):,} {name}", name=f"search {name}", width=260)
    search.js_on_change("value_input", CustomJS(args={"source": source, "shown": shown, "field": search}, code=_SEARCH))
    table = DataTable(
        source=source,
        columns=table_columns(fields),
        view=CDSView(filter=shown),
        index_position=None,
        autosize_mode="force_fit",  # other modes fail: SlickGrid uses an undefined variable
        reorderable=False,  # reordering needs jQuery UI
        sizing_mode="stretch_width",
        height=min(_MOST_PX, _ROW_PX * (len(rows) + 1) + 12),
        name=name,
    )
    return column(search, table, sizing_mode="stretch_width")


def table_columns(fields: Sequence[TableField]) -> list[TableColumn]:
    """Bokeh's columns for the fields of a table."""
    return [
        TableColumn(
            field=field.title,
            title=field.title,
            width=field.width,
            formatter=NumberFormatter(format=field.number, text_align="right") if field.number else StringFormatter(),
        )
        for field in fields
    ]


def as_csv(fields: Sequence[TableField], rows: Sequence[Sequence[Any]]) -> str:
    """The table as CSV, with a line of titles first."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([field.title for field in fields])
    writer.writerows(rows)
    return text.getvalue()
