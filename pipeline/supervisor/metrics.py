"""Turns what an engine process says into one `HostReport` after another, for each run that uses it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...engine.request import EngineTelemetry
from ..messages import FinishedRows, HostReport
from .open_shard import OpenShard

# What a process has counted when it starts.
_NOTHING = EngineTelemetry(0, 0, (), "base", 0, 0, 0, 0, 0)


class HostMeter:
    """The latest state of one engine."""

    def __init__(self, worker: str, batch_rows: int) -> None:
        self._latest = HostReport(worker, "starting", batch_rows)
        self._counted_s = time.monotonic()
        self._counted = _NOTHING

    @property
    def latest(self) -> HostReport:
        """The state as last set."""
        return self._latest

    def set(self, **changes: Any) -> None:
        """Change fields of the coming reports."""
        self._latest = replace(self._latest, **changes)

    def process_started(self, pid: int) -> None:
        """A new engine process is ready: its token counts start at 0."""
        self._counted_s, self._counted = time.monotonic(), _NOTHING
        self.set(state="ready", engine_pid=pid)

    def process_died(self, reason: str) -> None:
        """The engine process is gone."""
        self.set(
            state="restarting",
            error=reason,
            engine_pid=None,
            num_crashes=self._latest.num_crashes + 1,
            running_rows=0,
            running_tokens=0,
            tokens_per_s=0.0,
            prompt_tokens_per_s=0.0,
            resident_adapter_ids=(),
        )

    def engine_said(self, telemetry: EngineTelemetry) -> None:
        """A snapshot from the engine process; rates are over the time since the one before."""
        now_s = time.monotonic()
        seconds = max(now_s - self._counted_s, 1e-3)
        before, self._counted = self._counted, telemetry
        self._counted_s = now_s
        rows_in_step = (telemetry.num_step_rows - before.num_step_rows) / max(1, telemetry.num_steps - before.num_steps)
        used_place_s = rows_in_step * min(telemetry.busy_s - before.busy_s, seconds)
        self.set(
            running_rows=telemetry.num_running,
            running_tokens=telemetry.running_tokens,
            tokens_per_s=(telemetry.generated_tokens - before.generated_tokens) / seconds,
            prompt_tokens_per_s=(telemetry.prompt_tokens - before.prompt_tokens) / seconds,
            used_place_s=self._latest.used_place_s + used_place_s,
            offered_place_s=self._latest.offered_place_s + self._latest.batch_rows * seconds,
            mode=telemetry.mode,
            resident_adapter_ids=telemetry.resident_adapter_ids,
            pages_used=telemetry.pages_used,
            pages_total=telemetry.pages_total,
            prefix_hit_rate=telemetry.prefix_hit_rate,
            adapter_loads=telemetry.adapter_loads,
            adapter_stall_s=telemetry.adapter_stall_s,
        )

    def report(
        self,
        open_shards: Iterable[OpenShard],
        finished: tuple[FinishedRows, ...] = (),
        lent: Mapping[int, int] | None = None,
        share: float = 1.0,
    ) -> HostReport:
        """One run's next report. `finished`: rows since its last one. `lent`: rows on loan by shard. `share`: of the
        engine's rows that are the run's; what the engine does is told in this proportion.
        """
        unfinished = [(shard.shard_id, shard.num_unfinished) for shard in open_shards]
        return replace(
            self._latest,
            open_shards=tuple((shard_id, rows) for shard_id, rows in unfinished if shard_id is not None),
            guest_rows=sum(rows for shard_id, rows in unfinished if shard_id is None),
            lent_shards=tuple((lent or {}).items()),
            finished=finished,
            running_rows=round(share * self._latest.running_rows),
            running_tokens=round(share * self._latest.running_tokens),
            tokens_per_s=share * self._latest.tokens_per_s,
            prompt_tokens_per_s=share * self._latest.prompt_tokens_per_s,
        )
