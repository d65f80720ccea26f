"""The canary of a running job, and the limits and conditions by which the job stops itself."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from ...jobs.errors import DamagedRecordError, JobLimitError, naming_damage
from ...jobs.options.conditions import condition_met
from ...jobs.options.values import parse_price
from ...jobs.parts import PartMark, read_mark
from ...jobs.progress import AdapterCount, added_up, clock
from ...jobs.storage.redaction import redacted_url
from ...scheduler.estimates.canary import with_canary
from ...scheduler.estimates.time_left import TimeLeft
from ...scheduler.messages import CanaryAnswered, FinishedRows
from ...scheduler.planning.waves import merged_waves
from ..dataset.reader import ShardReader
from ..dataset.staged_writer import lengths_of_rows
from ..planning.plan import JobPlan, serving_adapters
from .control import JobRun
from .summary import Account, account_parts

# Rows from which on conditions are checked while a job runs; the canary's are checked however few they are.
_LEAST_ROWS = 16
_KEPT = "Finished rows are kept"


class JobLimits:
    """Checks one run of a job: its canary, once, and its conditions and limits, again and again."""

    def __init__(self, run: JobRun, plan: JobPlan, committed: Iterable[int], done: Iterable[AdapterCount]) -> None:
        """`committed`: shards that have their parts before the run. `done`: their rows by adapter."""
        self._run, self._plan = run, plan
        canary = [shard for shard in plan.shards if shard.is_canary]
        #: Shards of the canary; empty for a job without one.
        self.shard_ids = [shard.shard_id for shard in canary]
        #: Rows of the canary.
        self.canary_rows = sum(shard.num_rows for shard in canary)
        #: Account of the canary, the content of `canary.json`; None until it was counted.
        self.canary = self._earlier_canary(set(committed))
        self._counts: defaultdict[str, list[AdapterCount]] = defaultdict(list)
        self.committed(done)
        #: Seconds that workers had the job before this run, added up over all workers.
        self.worker_s = run.reporter.latest.worker_s

    def _earlier_canary(self, committed: set[int]) -> dict[str, Any] | None:
        """The account of an earlier run. One that is damaged, or that has rows which are computed again, is removed."""
        if not self.shard_ids:
            return None
        store = self._run.job.store
        try:
            found = store.read_canary()
            with naming_damage("canary.json"):
                is_whole = found is not None and isinstance(CanaryAnswered.from_json(found["event"]), CanaryAnswered)
        except DamagedRecordError:
            found, is_whole = {}, False
        if found and is_whole and committed.issuperset(self.shard_ids):
            if self._run.can_ask and found.get("confirmed") is False:
                found["confirmed"] = None
                store.write_canary(found)
            return found
        if found is not None:
            store.remove_canary()
        return None

    @property
    def answered(self) -> CanaryAnswered | None:
        """The scheduler's event for a canary that was counted before it began; None without one."""
        if self.canary is None:
            return None
        event = CanaryAnswered.from_json(self.canary["event"])
        return replace(event, time_s=0.0, goes_on=not self.is_to_confirm)

    @property
    def is_uncounted(self) -> bool:
        """Whether the job has a canary that is not counted yet."""
        return bool(self.shard_ids) and self.canary is None

    @property
    def is_settled(self) -> bool:
        """Whether the job has no canary, or one that is counted, and confirmed if it must be."""
        return not self.shard_ids or (self.canary is not None and not self.is_to_confirm)

    @property
    def is_to_confirm(self) -> bool:
        """Whether the job waits for a person's word after its canary. A run that begins after the canary was counted
        waits only if it can ask.
        """
        if not (self._run.job.spec.confirm and self.shard_ids):
            return False
        return self.canary is None or (self._run.can_ask and self.canary.get("confirmed") is not True)

    def committed(self, counts: Iterable[AdapterCount]) -> None:
        """Take in the rows of parts."""
        for count in counts:
            before = self._counts[count.adapter]
            self._counts[count.adapter] = [added_up(count.adapter, [*before, count])]

    def count_canary(self) -> Account:
        """Count the canary's parts."""
        run = self._run
        settings = replace(run.settings, lengths={})
        return account_parts(
            self.shard_ids,
            store=run.job.store,
            record=run.job.record,
            run_id=run.run_id,
            settings=settings,
            spec=run.job.spec,
        )

    def event_of(self, account: Account, num_workers: int, time_s: float) -> CanaryAnswered:
        """The scheduler's event for the counted canary."""
        event = CanaryAnswered(time_s, self._answers(account), goes_on=not self.is_to_confirm)
        settings = self._run.settings
        if settings.is_dealt or settings.wave_mode != "auto":
            return event
        ranks = {adapter.adapter_id: adapter.rank for adapter in serving_adapters(self._run.job.record)}
        rest = [shard for shard in with_canary(self._plan.shards, event) if not shard.is_canary]
        limits = settings.limits
        merged = merged_waves(rest, ranks, settings.cost, batch_rows=limits.batch_rows, num_replicas=num_workers)
        return replace(event, merged_waves=tuple(sorted(merged)))

    def _answers(self, account: Account) -> tuple[FinishedRows, ...]:
        """Lengths of the canary's answers; none where the plan knew all lengths, or some rows' lengths are fixed."""
        record = self._run.job.record
        if record.spec.sampling.ignore_eos:
            return ()
        ids: dict[str | None, str | None] = {adapter.name: adapter.sha256 for adapter in record.adapters}
        ids[None] = None
        if record.spec.stages is not None:
            found = Counter((ids[name], tokens) for name, tokens in self._staged_lengths() if name in ids)
            return tuple(FinishedRows(adapter_id, count, count * n) for (adapter_id, n), count in found.items())
        if not account.has_numbers:
            return ()
        reader = ShardReader(self._run.job.store, record)
        try:
            if any(reader.numbers(i, ("fixed_tokens",))["fixed_tokens"].any() for i in self.shard_ids):
                return ()
        finally:
            reader.close()
        rows: defaultdict[tuple[str | None, int], list[int]] = defaultdict(lambda: [0, 0])
        for name, tally in account.adapters.items():
            for (task, number, is_cut), num_rows in tally.answers.items():
                if name in ids:
                    rows[ids[name], number][0] += num_rows
                    rows[ids[name], number][1] += tally.answer_tokens[task, number, is_cut]
        return tuple(FinishedRows(key[0], *found) for key, found in rows.items())

    def _staged_lengths(self) -> list[tuple[str | None, int]]:
        """Adapter and tokens of each row of the canary, those of all its stages, as workers report rows with stages."""
        marks = (read_mark(self._run.job.store, shard_id) for shard_id in self.shard_ids)
        return [row for mark in marks if isinstance(mark, PartMark) for row in lengths_of_rows(mark.requests)]

    def counted(
        self, account: Account, event: CanaryAnswered, seconds: float, left: TimeLeft | None, num_workers: int
    ) -> None:
        """Keep the account of the canary. `seconds`: since the first shard was opened. `left`: by its lengths."""
        price = parse_price(self._run.job.spec.gpu_hour_price)
        facts: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "predicted_s": self._plan.predicted_s,
            "left_s": None if left is None else [round(s, 3) for s in (left.seconds, left.least_s, left.most_s)],
            "adapters": [asdict(outcome) for outcome in account.adapter_outcomes()],
            "errors": [asdict(kind) for kind in account.error_kinds(())],
            "event": event.to_json(),
            "confirmed": None,
        }
        if price is not None and left is not None:
            facts |= {"cost": (self.worker_s + left.seconds * num_workers) / 3600 * price[0], "currency": price[1]}
        self._run.job.store.write_canary(facts)
        self.canary = facts

    def check_canary(self, event: CanaryAnswered) -> None:
        """Raise `JobLimitError` when the counted rows meet a condition, or are to be confirmed and nobody can be asked
        now.
        """
        self._check_conditions()
        if not (event.goes_on or self._run.can_ask):
            output = redacted_url(self._run.job.spec.output)
            raise JobLimitError(
                f"confirm: the canary is answered, and nobody can be asked here. {_KEPT}; look at `lorabatch status "
                f"{output}`, and go on with `lorabatch resume {output}`."
            )

    def check_answer(self) -> bool:
        """Whether a person has agreed to go on. Raises `JobLimitError` when a person has not."""
        facts = self._run.job.store.read_canary() or {}
        if facts.get("confirmed") is False:
            raise JobLimitError(f"confirm: you did not agree after the canary. {_KEPT}; the same command asks again.")
        return facts.get("confirmed") is True

    def check(self, num_workers: int, left: TimeLeft | None) -> None:
        """Raise `JobLimitError` when the rows so far meet a condition, or a limit is exceeded or will be. `left`: the
        time left; None while it is not sure enough to stop a job by.
        """
        if self.canary is not None or not self.shard_ids:
            self._check_conditions()
        spec = self._run.job.spec
        least_s, about_s = (0.0, 0.0) if left is None else (left.least_s, left.seconds)
        if spec.max_seconds is not None:
            began_s = min((at_s for _, at_s in self._run.reporter.phases), default=time.time())
            taken_s = max(0.0, time.time() - began_s)
            if taken_s + least_s > spec.max_seconds:
                raise JobLimitError(
                    f"max_seconds={spec.max_seconds:g}: the run has taken {taken_s:,.0f} s{_more(about_s, least_s)}. "
                    f"{_KEPT}; the same command with a higher limit goes on."
                )
        if spec.max_cost is not None:
            most, price = parse_price(spec.max_cost), parse_price(spec.gpu_hour_price)
            assert most is not None, f"max_cost={spec.max_cost!r} is no amount"
            assert price is not None, f"max_cost={spec.max_cost!r} without a price"
            each_s = price[0] / 3600
            spent, least = each_s * self.worker_s, each_s * (self.worker_s + num_workers * least_s)
            if least > most[0]:
                about = each_s * (self.worker_s + num_workers * about_s)
                raise JobLimitError(
                    f"max_cost={spec.max_cost!r}: the job has cost {spent:,.2f}"
                    + (f", and would cost at least {least:,.2f}, about {about:,.2f}" if least_s else "")
                    + f" {most[1] or price[1]}".rstrip()
                    + f". {_KEPT}; the same command with a higher limit goes on."
                )

    def _check_conditions(self) -> None:
        counts = [count for counts in self._counts.values() for count in counts]
        if self.canary is None and sum(count.num_rows for count in counts) < _LEAST_ROWS:
            return
        if met := condition_met(self._run.job.spec.stop_if, counts):
            raise JobLimitError(
                f"stop_if: {met}. {_KEPT}; correct the cause and start over with --overwrite, or run the same command "
                "with another condition."
            )


def _more(about_s: float, least_s: float) -> str:
    return f", and takes at least {clock(least_s)} more, about {clock(about_s)}" if least_s else ""
