"""A job's logs as they grow."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from .status import read_status
from .store import JobStore

_INTERVAL_S = 1.0


def log_lines(store: JobStore, *, follow: bool = False) -> Iterator[str]:
    """Lines as `source | line`; with `follow`, until the job has ended or nobody runs it. Raises `StorageError`."""
    shown: defaultdict[str, int] = defaultdict(int)
    while True:
        # Asked before the logs are read: what is said last is seen.
        status = read_status(store)
        is_over = status.is_finished or status.next_step is not None
        for source, text in store.read_logs().items():
            end = len(text) if is_over or not follow else text.rfind("\n") + 1
            yield from (f"{source} | {line}" for line in text[shown[source] : end].splitlines())
            shown[source] = max(end, shown[source])
        if is_over or not follow:
            return
        time.sleep(_INTERVAL_S)
