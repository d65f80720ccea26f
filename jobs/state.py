"""`JobState`: where a running job stands, rewritten about once a second so that anybody can ask storage."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from .errors import DamagedRecordError

Phase = Literal[
    "checking", "indexing", "planning", "running", "finishing", "done", "failed", "cancelled", "interrupted"
]
FINAL_PHASES: tuple[Phase, ...] = ("done", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, as last heard of. `mode`: how its latest step served its rows. `lent_rows`: of its open rows, those
    that other workers' engines work on; `guest_rows`: rows of others that its engine works on. `prefix_hit_rate`:
    share of prompt tokens copied instead of computed; `adapter_stall_s`: seconds its steps waited for adapters.
    """

    name: str
    tokens_per_s: float = 0.0
    open_rows: int = 0
    running_rows: int = 0
    mode: str = ""
    resident_adapters: tuple[str, ...] = ()
    lent_rows: int = 0
    guest_rows: int = 0
    prefix_hit_rate: float = 0.0
    adapter_loads: int = 0
    adapter_stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobState:
    """Phase and counters. `updated_at_s`: seconds since the epoch. `eta_s`: None while nobody can tell. `batch_fill`:
    how full the engines' batches were while shards were queued, from 0 to 1; None when there was no such time.
    `prefix_hit_rate`: share of the prompt tokens of the run's finished shards that nobody had to compute; None before
    the first.

    `message` says in one sentence why a job stopped, and what to do.
    """

    phase: Phase
    updated_at_s: float
    rows: int = 0
    rows_done: int = 0
    rows_error: int = 0
    shards: int = 0
    shards_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    batch_fill: float | None = None
    prefix_hit_rate: float | None = None
    workers: tuple[WorkerState, ...] = ()
    message: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the run that wrote this has ended."""
        return self.phase in FINAL_PHASES

    def to_json(self) -> bytes:
        """As stored."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> JobState:
        """The state that `to_json` wrote; keys of newer versions are dropped. Raises `DamagedRecordError`."""
        try:
            raw = json.loads(data)
            workers = tuple(
                WorkerState(**_known(WorkerState, worker | {"resident_adapters": tuple(worker["resident_adapters"])}))
                for worker in raw.get("workers", ())
            )
            return cls(**_known(cls, raw | {"workers": workers}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedRecordError(f"state.json: cannot be read back ({error}).") from None


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}
