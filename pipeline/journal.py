"""A run's events and commands on their way to `events.jsonl`, from which it can be replayed (`scheduler/replay.py`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from ..jobs.errors import StorageError
from ..jobs.store import JobStore
from ..scheduler.commands import Command
from ..scheduler.events import Event

logger = logging.getLogger(__name__)


class Journal:
    """Keeps lines until storage has them. `beginning`: what the scheduler says before its first event."""

    def __init__(self, store: JobStore, beginning: Mapping[str, Any]) -> None:
        self._store = store
        self._lines = [json.dumps(beginning)]

    def add(self, *records: Event | Command) -> None:
        """An event and the commands it gave, in order."""
        self._lines += [json.dumps(record.to_json()) for record in records]

    def flush(self) -> None:
        """Write what is kept; when storage refuses, it is kept for the next attempt."""
        if not self._lines:
            return
        try:
            self._store.append_events(("\n".join(self._lines) + "\n").encode())
        except StorageError as error:
            logger.warning("events are kept for the next attempt: %s", error)
        else:
            self._lines.clear()
