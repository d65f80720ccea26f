"""What hosts report, as a coordinator takes it in: the latest of each that is not stale, and the scheduler's events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..scheduler.events import Progress
from .messages import HostReport
from .roll_call import SILENCE_LIMIT_S


def latest_reports(events: Iterable[tuple[float, Mapping[str, Any]]]) -> list[HostReport]:
    """The last report of each worker, from a topic's events: (seconds by the Dask scheduler's clock, report).

    Workers that have been silent for long while others reported are left out: who was adopted with its shards would
    keep them until it is found to be silent.
    """
    latest: dict[str, tuple[float, HostReport]] = {}
    for told_s, message in events:
        report = HostReport.from_plain(message)
        latest[report.worker] = (told_s, report)
    newest_s = max((told_s for told_s, _ in latest.values()), default=0.0)
    return [report for told_s, report in latest.values() if newest_s - told_s <= SILENCE_LIMIT_S]


def progress_of(
    report: HostReport, time_s: float, shard_ids: Collection[int], adapter_name: Callable[[str], str]
) -> Progress:
    """A report as the scheduler's event. `shard_ids`: of the shards that the worker has tasks of; a host may still list
    one whose task has just failed, which is not to be adopted as running.
    """
    return Progress(
        time_s=time_s,
        replica_id=report.worker,
        open_rows=report.open_rows,
        running_rows=report.running_rows,
        tokens_per_s=report.tokens_per_s,
        resident_adapters=tuple(map(adapter_name, report.resident_adapter_ids)),
        open_shards=tuple((shard_id, rows) for shard_id, rows in report.open_shards if shard_id in shard_ids),
        finished=tuple(
            (adapter_name(f.adapter_id) if f.adapter_id else "", f.num_rows, f.output_tokens) for f in report.finished
        ),
        mode=report.mode,
        running_tokens=report.running_tokens,
        lent_shards=report.lent_shards,
        guest_rows=report.guest_rows,
    )
