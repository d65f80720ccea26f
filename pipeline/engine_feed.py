"""What an engine process must be told so that it can work on some rows. Pure: messages come out, nobody is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..engine.exported_row import ExportedRow
from ..engine.wire import pack_exported_row, pack_request
from .messages import LocalAdapter


class EngineFeed:
    """Remembers where adapters lie and which of them the present process has heard of."""

    def __init__(self) -> None:
        self._adapters: dict[str, LocalAdapter] = {}
        self._told: set[str] = set()
        self._expected: dict[str, int] = {}

    def learn(self, adapters: Iterable[LocalAdapter]) -> None:
        """Rows of these adapters may come."""
        self._adapters.update({adapter.source.adapter_id: adapter for adapter in adapters})

    def expect(self, adapter_id: str, num_rows: int) -> None:
        """So many rows of an adapter will still come; told with its next rows."""
        self._expected[adapter_id] = num_rows

    def new_process(self) -> None:
        """The next process has heard of nothing."""
        self._told.clear()

    def messages(self, rows: Sequence[ExportedRow]) -> list[dict[str, Any]]:
        """The adapters that are news, then the rows."""
        needed = dict.fromkeys(row.request.adapter_id for row in rows if row.request.adapter_id is not None)
        messages = [self._adapter(adapter_id) for adapter_id in needed if adapter_id not in self._told]
        self._told |= needed.keys()
        messages += [
            {"op": "expect", "adapter_id": adapter_id, "num_rows": self._expected.pop(adapter_id)}
            for adapter_id in needed.keys() & self._expected.keys()
        ]
        begun = [row for row in rows if row.token_ids]
        fresh = [row for row in rows if not row.token_ids]
        if begun:
            messages.append({"op": "import", "rows": [pack_exported_row(row) for row in begun]})
        if fresh:
            messages.append({"op": "add", "requests": [pack_request(row.request) for row in fresh]})
        return messages

    def _adapter(self, adapter_id: str) -> dict[str, Any]:
        adapter = self._adapters[adapter_id]
        return {
            "op": "adapter",
            "adapter_id": adapter_id,
            "path": str(adapter.folder),
            "name": adapter.source.name,
        }
