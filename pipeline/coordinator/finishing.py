"""Finishes a job whose rows are all answered: checks the count, writes the summary, keeps what the run has measured."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from ...engine.adapter_use import AdapterUse
from ...jobs.contents import part_name
from ...jobs.errors import JobFailedError
from ...jobs.history import add_to_history
from ...jobs.updates import put_in_place
from ...scheduler.costs.cost import CostModel
from ...scheduler.estimates.lengths import OTHER_TASKS, AnswerKey, AnswerLengths, frequent_tasks
from ..dataset.wide_files import WideRange, wide_ranges, write_wide_files
from ..dataset.writer import empty_part
from ..planning.plan import JobPlan
from ..result import JobResult
from .control import JobRun
from .fan_out import FanOut
from .summary import Account

#: Seconds of steps from which on their measured costs are kept for later jobs: the first steps are slower.
HISTORY_S = 5.0
# Files of a wide output that one task writes, which looks once where their rows are.
_FILES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Coordinated:
    """Measurements of one `coordinate`; `working_s`, `bound_s`, `corrected_s`, `batch_fill` and `prefix_hit_rate` go
    into the `JobResult`.
    """

    #: Seconds from the first shard opened to the last part written; None when another coordinator of the run did some
    #: of the work.
    working_s: float | None
    #: Lower bound of `working_s` by the measured costs of steps; None when it is not known.
    bound_s: float | None
    #: Seconds predicted from the first steps; None when the plan's costs of steps were no guess.
    corrected_s: float | None
    #: Measured costs of steps; None when fewer than `HISTORY_S` seconds of steps were seen.
    measured: CostModel | None
    #: Share to which steps were full while shards were queued; None when it is not known.
    batch_fill: float | None
    #: Share of prompt tokens that engines did not compute; None when it is not known.
    prefix_hit_rate: float | None
    #: Costs of adapters on all workers.
    adapter_use: AdapterUse = field(default_factory=AdapterUse)


def finish(run: JobRun, plan: JobPlan, account: Account, done: Coordinated) -> JobResult:
    """Check that the parts hold every row, write the summary, and report that the job is done."""
    account.check_complete(plan)
    job, ended_s = run.job, time.time()
    phases_s = _phase_seconds(run, ended_s, done.working_s)
    began_s = min(at_s for _, at_s in run.reporter.phases)
    # Rows that earlier runs have answered tell nothing of this run's pace.
    working_s = done.working_s if not account.num_reused else None
    result = JobResult(
        output=job.spec.output,
        job_id=job.record.job_id,
        num_rows=account.num_rows,
        num_errors=account.num_errors,
        num_parts=max(account.num_parts, 1),
        prompt_tokens=account.prompt_tokens,
        completion_tokens=account.completion_tokens,
        errors=account.error_kinds(plan.errors),
        adapters=account.adapter_outcomes(working_s),
        # Clocks may be set back meanwhile.
        seconds=max(ended_s - began_s, sum(phases_s.values()), done.working_s or 0.0),
        num_reused=account.num_reused,
        predicted_s=plan.predicted_s,
        working_s=done.working_s,
        bound_s=done.bound_s,
        corrected_s=done.corrected_s,
        batch_fill=done.batch_fill,
        prefix_hit_rate=done.prefix_hit_rate,
        adapter_use=done.adapter_use,
        started_at=_time_text(began_s),
        ended_at=_time_text(ended_s),
        phases_s=phases_s,
        rows_per_s=(account.num_rows - account.num_reused) / done.working_s if done.working_s else None,
        prompt_tokens_per_s=account.prompt_tokens / working_s if working_s else None,
        completion_tokens_per_s=account.completion_tokens / working_s if working_s else None,
        cost_origin=run.settings.cost_origin,
        stages={name: dict(counts) for name, counts in account.stages.items()},
    )
    run.reporter.check_budget(account.num_errors, account.num_rows)
    run.control.check_displaced()
    job.store.check_current(job.record)
    # Not by a listing, in which parts that were just written may be missing.
    parts = dict(sorted(account.parts.items()))
    if not plan.shards:
        job.store.commit_part(0, empty_part(job.record, run.run_id))
        with job.store.open_part(0) as part:
            parts[0] = (part.seek(0, os.SEEK_END), "")
    if job.record.is_wide:
        _write_wide(run, plan, sum(num_bytes for num_bytes, _ in parts.values()))
    job.store.write_parts(parts)
    job.store.write_summary(result.to_json())
    job.store.mark_success()
    put_in_place(job.store)
    # Reported last, since a client that waits for "done" may read the output.
    run.reporter.done(result)
    _keep_history(run, account, done)
    return result


def _write_wide(run: JobRun, plan: JobPlan, num_bytes: int) -> None:
    """Write the files of a wide output on the workers. `num_bytes`: stored bytes of all parts.

    A run that is killed meanwhile leaves an output without `_SUCCESS`, and the next one writes all files again.
    """
    job = run.job
    ranges = wide_ranges(job.record, plan.num_rows, num_bytes)
    shard_ids = tuple(shard.shard_id for shard in plan.shards)
    given = {"store": job.store, "record": job.record, "shard_ids": shard_ids}
    name, attempt = f"wide-{run.run_id}", run.control.coordinator_id
    groups = [ranges[start : start + _FILES_AT_ONCE] for start in range(0, len(ranges), _FILES_AT_ONCE)]
    writing = FanOut(run.client, write_wide_files, groups, name, attempt, _refuse_deadly, **given)
    sizes = {number: num_bytes for found in writing.results(run.control) for number, num_bytes in found.items()}
    run.control.check_displaced()
    job.store.check_current(job.record)
    job.store.keep_files(sizes)


def _refuse_deadly(ranges: Sequence[WideRange]) -> Any:
    raise JobFailedError(
        f"output: two workers or more were lost while they wrote {part_name(ranges[0][0])}, rows {ranges[0][1]:,} to "
        f"{ranges[-1][2]:,} of the input. The workers' logs may say more; run the same command to go on."
    )


def _phase_seconds(run: JobRun, ended_s: float, working_s: float | None) -> dict[str, float]:
    """Seconds of each phase of the run, in their order, which add up to the whole; "answering": from the first shard
    opened to the last part written. Empty when another coordinator has done a part of the work.
    """
    if working_s is None:
        return {}
    found: dict[str, float] = {}
    for (name, start_s), (_, end_s) in pairwise([*run.reporter.phases, ("", ended_s)]):
        found[name] = found.get(name, 0.0) + max(0.0, end_s - start_s)
    loading_s = found.pop("loading engines", 0.0)
    finishing_s = found.pop("finishing", 0.0)
    found["loading engines"] = max(0.0, loading_s - working_s)
    return {name: round(s, 3) for name, s in (found | {"answering": working_s, "finishing": finishing_s}).items()}


def _time_text(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _keep_history(run: JobRun, account: Account, done: Coordinated) -> None:
    """Keep the measured costs of steps and lengths of answers for the predictions of later jobs."""
    lengths: defaultdict[AnswerKey, list[AnswerLengths]] = defaultdict(list)
    if account.has_numbers and not run.job.spec.sampling.ignore_eos:
        hashes: dict[str | None, str | None] = {adapter.name: adapter.sha256 for adapter in run.job.record.adapters}
        hashes[None] = None
        # Two names may have the same content.
        found = [(hashes[name], task, one) for (name, task), one in account.answer_lengths().items() if name in hashes]
        tasks: defaultdict[str | None, Counter[int]] = defaultdict(Counter)
        for adapter_id, task, one in found:
            tasks[adapter_id][task] += round(one.num_rows)
        frequent = {adapter_id: frequent_tasks(of_adapter) for adapter_id, of_adapter in tasks.items()}
        for adapter_id, task, one in found:
            lengths[adapter_id, task if task in frequent[adapter_id] else OTHER_TASKS].append(one)
    joined = {key: AnswerLengths.joined(parts) for key, parts in lengths.items()}
    add_to_history(run.settings.history, done.measured, joined)
